"""Images for the builder pods of tests: buildah, and rootless BuildKit, on Debian, each built once.

BuildKit is compiled when the first test needs it, since the cluster does not use it.
"""

import hashlib
import inspect
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import go, images, layers, registry
from cluster.command import run
from cluster.images import Image
from cluster.modules import Module
from cluster.registry import Layer
from cluster.settings import cache

from manycpu.pipeline.adapters.registry import Connection, Repository, of_bytes
from manycpu.pipeline.spec.image import Image as Made
from manycpu.pipeline.spec.image import Reference, sha256

USER, HOME = 1000, Path("home/user")
RUNTIME = Path("run/user/1000")
MAPPERS = {"newuidmap": 7, "newgidmap": 6}  # Linux capabilities: CAP_SETUID, CAP_SETGID


class BuildKit(Module):
    """BuildKit's Go module, whose folder is not among the cluster's modules."""

    @property
    def folder(self) -> Path:
        return Path(__file__).with_name("buildkit")


BUILDKIT = BuildKit("buildkit", "0.31")
DAEMONLESS = "buildctl-daemonless.sh"


@dataclass(frozen=True)
class Builder:
    """The content of a builder image: Debian packages, configuration and further layers."""

    packages: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    more: Callable[[Path, Path], list[Layer]] = lambda *_: []
    """Gets the root folder of the image and a folder for files; changes the first, and makes more layers."""
    made_from: str = ""
    """What ``more`` depends on, as text: if it changes, the image is built again."""


def buildkit() -> Path:
    """Return the folder of BuildKit's programs; compile them if it does not exist."""
    if not BUILDKIT.built.exists():
        part = BUILDKIT.built.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        go.install(BUILDKIT, part / "bin", part / "go")
        source = go.source(BUILDKIT, "github.com/moby/buildkit", part / "go")
        shutil.copy(source / "examples" / "buildctl-daemonless" / DAEMONLESS, part / "bin")
        (part / "bin" / DAEMONLESS).chmod(0o755)
        shutil.rmtree(part / "go")
        part.rename(BUILDKIT.built)
    return BUILDKIT.built / "bin"


def _rootless(root: Path, workshop: Path) -> list[Layer]:
    """Lay it out as the image moby/buildkit:rootless: its user, where that may write, whom it may be."""
    for program in buildkit().iterdir():
        shutil.copy(program, root / "usr" / "local" / "bin")
    with (root / "etc" / "passwd").open("a") as users:
        users.write(f"user:x:{USER}:{USER}::/{HOME}:/bin/sh\n")
    with (root / "etc" / "group").open("a") as groups:
        groups.write(f"user:x:{USER}:\n")
    for name in ("subuid", "subgid"):
        (root / "etc" / name).write_text("user:100000:65536\n")
    for folder in (HOME, HOME / ".local", HOME / ".local" / "tmp", RUNTIME.parent, RUNTIME):
        (root / folder).mkdir()
        os.chown(root / folder, USER, USER)
    return [_mappers(root, workshop)]


def _mappers(root: Path, workshop: Path) -> Layer:
    """Give what maps users one capability each: Debian's run as root, who needs CAP_SYS_ADMIN for it."""
    for name, capability in MAPPERS.items():
        program = root / "usr" / "bin" / name
        program.chmod(0o755)
        given = struct.pack("<5I", 0x02000001, 1 << capability, 0, 0, 0)
        os.setxattr(program, "security.capability", given)
    tar = ["tar", "--xattrs", "--xattrs-include=security.capability", "--numeric-owner", "-C", str(root)]
    packed = subprocess.check_output([*tar, "-c", *(f"usr/bin/{name}" for name in MAPPERS)])
    return registry.gzip_layer(packed, workshop / "mappers.tar.gz")


BUILDERS = {
    "pod": Builder(("buildah", "ca-certificates")),
    "buildkit": Builder(
        ("ca-certificates", "rootlesskit", "runc", "uidmap"),
        {
            "Env": [
                images.PATH,
                f"HOME=/{HOME}",
                "USER=user",
                f"XDG_RUNTIME_DIR=/{RUNTIME}",
                f"TMPDIR=/{HOME}/.local/tmp",
            ],
            "User": f"{USER}:{USER}",
        },
        _rootless,
        BUILDKIT.digest() + inspect.getsource(_rootless) + inspect.getsource(_mappers),
    ),
}


def reference(builder: str = "pod") -> str:
    """Return the reference by which a pod pulls a builder image; build and push the image if necessary."""
    return published("builder" if builder == "pod" else builder, BUILDERS[builder])


def published(name: str, wanted: Builder) -> str:
    """Return the reference of an image; build and push the image if the registry lacks it.

    Its tag is a hash of everything that the image is made from, so that a change makes another image.
    """
    config = {"Env": [images.PATH], "Cmd": ["bash"], **wanted.config}
    inputs = (inspect.getsource(_make), str(wanted.packages), layers.suite(), str(config), wanted.made_from)
    tag = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:12]
    image = Image(name, tag, config, lambda: _make(wanted))
    images.publish([image])
    return image.reference


def _make(wanted: Builder) -> Sequence[Layer]:
    workshop = cache() / "builder.part"  # not the other images': tests of another session may clear that
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir(parents=True)
    root = workshop / "root"
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in layers.LEFT_OUT]
    lists = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources")
    sources = [file for file in map(Path, lists) if file.exists()]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root"]
    command += [f"--include={','.join(wanted.packages)}"]
    trim = "--customize-hook=rm -rf $1/var/lib/apt/lists/* $1/var/cache/apt/*"
    run([*command, *left_out, trim, layers.suite(), root, *sources], seconds=600)
    shutil.rmtree(root / "dev")
    (root / "dev").mkdir()
    more = wanted.more(root, workshop)
    packed = layers.pack(root, workshop / "builder.tar.zst")
    shutil.rmtree(root)
    return [packed, *more]


def with_history(name: str) -> str:
    """Push a copy of a cluster image, with a history of its layers for buildah; return its reference."""
    named = Reference.parse(images.reference(name), "test")
    with closing(Connection(named.registry, plain=True)) as connection:
        repository = Repository(connection, named.repository)
        plain = repository.pull(named.version)
        config = plain.config | {"history": [{"created_by": "a test"} for _ in plain.layers]}
        config_bytes = json.dumps(config).encode()
        described = plain.manifest["config"] | {"digest": sha256(config_bytes), "size": len(config_bytes)}
        whole = Made(json.dumps(plain.manifest | {"config": described}).encode(), config_bytes)
        repository.push(of_bytes(config_bytes, described["digest"]))
        repository.push_image(whole, f"{named.tag}-history")
    return str(named.at(f"{named.tag}-history"))
