"""Secrets of a run, searched in all that it writes and shows, here and on a simulated cluster."""

import base64
import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from support import cluster_scenes, fault_scenes, registry_server
from support.cluster_scenes import OnCluster, Pushes
from support.fault_scenes import Runs, Scene
from support.rank_launches import LIGHT
from support.registry_images import push_base
from support.registry_server import PASSWORD, USER

from manycpu.pipeline.adapters.registry_login import Login

PAIR = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

CANARIES = {"variable": "canary-in-a-variable", "option": "canary-in-an-option", "url": "canary'in;a$(url)"}
PROGRAM = """
import json, os, pathlib, sys
import torch.distributed
torch.distributed.init_process_group()
server = os.environ["SERVER"]
for said in (os.environ["API_KEY"], sys.argv, json.dumps(sys.argv), server, ascii(server)):
    print("it says", said, flush=True)
commands = b"".join(path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"))
if any(os.environ[name].encode() in commands for name in ("API_KEY", "SERVER")):
    print("ps shows a variable", flush=True)
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("learned")
if "fails" in sys.argv:
    raise ValueError(os.environ["API_KEY"] + sys.argv[2] + server)
"""
FIELDS: dict[str, Any] = {
    "env": LIGHT | {"API_KEY": CANARIES["variable"], "SERVER": f"https://bob:{CANARIES['url']}@host/x"},
    "args": ["--api-token", CANARIES["option"]],
    "keep": "always",
}


class Tells(Runs):
    """`manycpu run` of a program that prints all secrets that it knows."""

    program = PROGRAM
    fields: ClassVar[dict[str, Any]] = FIELDS


class Fails(Tells):
    """The same of a program whose traceback has them."""

    fields: ClassVar[dict[str, Any]] = FIELDS | {"args": [*FIELDS["args"], "fails"]}


class TellsThere(OnCluster, Tells):
    """The first, on the cluster."""


class FailsThere(OnCluster, Fails):
    """The second, on the cluster."""


def written(scene: Scene) -> Iterator[tuple[str, str]]:
    """Yield all that others than the owner of a run may read: what is shown, and files that are for all."""
    yield "what the command showed", scene.said
    roots = [scene.out, scene.home, *([scene.volume] if isinstance(scene, OnCluster) else [])]
    for path in (path for root in roots for path in root.rglob("*") if path.is_file()):
        around = [path, *(folder for folder in path.parents if folder.is_relative_to(scene.folder / "home"))]
        private = any(not each.stat().st_mode & 0o007 for each in around)
        if not private:
            yield str(path.relative_to(scene.folder)), path.read_text(errors="replace")
    if isinstance(scene, OnCluster):
        for kind, found in scene.at.cluster.objects.items():
            if kind != "Secret":
                yield from ((f"{kind} {one['metadata']['name']}", json.dumps(one)) for one in found)


def places_of_canaries(scene: Scene) -> set[tuple[str, str]]:
    """Return in which place (a file, or a kind of object) which canary is."""
    found = dict(written(scene))
    assert "report.json" in " ".join(found)
    assert "it says" in scene.said
    assert "ps shows a variable" not in scene.said
    assert "--api-token *** is a secret" in scene.said
    spelled = {
        what: (text, text.replace("$", "$$"), base64.b64encode(text.encode()).decode())
        for what, text in CANARIES.items()
    }
    return {
        (place.partition(" ")[0], what)
        for place, text in found.items()
        for what, forms in spelled.items()
        if any(form in text or json.dumps(form)[1:-1] in text for form in forms)
    }


class PushesWithPassword(Pushes):
    """`manycpu run` with a registry that requires a password."""

    def reset(self) -> None:
        super().reset()
        settings, described = self.folder / "docker.json", yaml.safe_load(self.file.read_text())
        settings.write_text(json.dumps({"auths": {self.registry: {"auth": PAIR}}}))
        described["target"]["registry_connection"] = str(settings)
        self.file.write_text(yaml.safe_dump(described))


@pytest.mark.parametrize("kind", [Tells, Fails])
def test_a_run_here_tells_no_secret(kind: type[Runs], tmp_path: Path) -> None:
    with fault_scenes.server() as server:
        scene = kind(tmp_path)
        scene.reset()
        ended = scene.meet(server, None)
        assert (ended.code == 0) is (kind is Tells), ended.said
        assert places_of_canaries(scene) == set()


@pytest.mark.parametrize("kind", [TellsThere, FailsThere])
def test_a_run_on_a_cluster_tells_no_secret(kind: type[OnCluster], tmp_path: Path) -> None:
    """The job and its pods have the command, and all variables but those that are named like a secret."""
    with fault_scenes.server("kubernetes") as server, cluster_scenes.place(server) as place:
        scene = kind(tmp_path, place)
        scene.reset()
        ended = scene.meet(server, None)
        assert (ended.code == 0) is (kind is TellsThere), ended.said
        in_manifests = {(kind, what) for kind in ("PyTorchJob", "Pod") for what in ("option", "url")}
        assert places_of_canaries(scene) <= in_manifests


def test_the_password_of_a_registry_is_told_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    with ExitStack() as stack:
        server = stack.enter_context(fault_scenes.server("kubernetes"))
        place = stack.enter_context(cluster_scenes.place(server))
        host = stack.enter_context(registry_server.running(folder, registry_server.basic(folder)))
        push_base(host, Login(USER, PASSWORD))
        scene = PushesWithPassword(tmp_path / "scene", place)
        scene.registry = host
        scene.reset()
        ended = scene.meet(server, None)
        assert ended.code == 0, ended.said
        blobs = [path.read_bytes() for path in (folder / "images").rglob("data")]
        images = [
            (gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob).decode(errors="replace")
            for blob in blobs
        ]
        assert len(images) > 3
        told = [*written(scene), *(("an image", text) for text in images)]
        assert [where for where, text in told if PASSWORD in text or PAIR in text] == []
