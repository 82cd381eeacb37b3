"""Without a registry an image is a file, which nodes load; the code in it is known by its tag."""

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import debian
from support import registry_server
from support.registry_images import push_base
from support.waiting import until

from manycpu.pipeline.adapters.archive import Archive
from manycpu.pipeline.spec.errors import BadInputError, BuildError
from manycpu.pipeline.targets.kubernetes import build
from manycpu.pipeline.targets.kubernetes.build import save_image
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.open_run import open_context


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a registry with an image `base:1`, where nothing may be pushed to later."""
    with registry_server.running(tmp_path_factory.mktemp("registry")) as found:
        push_base(found)
        yield found


def context(folder: Path, **target: object) -> ClusterContext:
    """Describe a run with a script."""
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "train.py").write_text("print('one')")
    run = {"program": "code/train.py", "output": str(folder / "out")}
    made = open_context(run, {"kind": "kubernetes", **target}, "test", base=folder)
    assert is_on_kubernetes(made)
    return made


def test_an_archive_has_all_that_the_image_needs(frozen: str, tmp_path: Path) -> None:
    file = tmp_path / "image.tar"
    name = save_image(context(tmp_path, image=f"http://{frozen}/base:1"), file)
    image = Archive(file).image
    assert len(image.layers) == 3
    with tarfile.open(file) as tar:
        names = set(tar.getnames())
        index = json.loads(tar.extractfile("index.json").read())  # type: ignore[union-attr]
    assert {f"blobs/{layer['digest'].replace(':', '/')}" for layer in image.layers} <= names
    (entry,) = index["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == name


def test_a_saved_image_is_known_by_its_tag_on_the_nodes(frozen: str, tmp_path: Path) -> None:
    name = save_image(context(tmp_path, image=f"http://{frozen}/base:1"), tmp_path / "image.tar")
    built, reused = build.build(context(tmp_path, image=name, pull_policy="Never"))
    assert (built.image, reused) == (name, True)


def test_containerd_loads_an_archive(frozen: str, tmp_path: Path) -> None:
    name = save_image(context(tmp_path, image=f"http://{frozen}/base:1"), tmp_path / "image.tar")
    with containerd(tmp_path) as ctr:
        ctr("images", "import", "--no-unpack", str(tmp_path / "image.tar"))
        assert ctr("images", "ls", "-q").split() == [name]
        assert "complete (4/4)" in ctr("images", "check")


@contextmanager
def containerd(folder: Path) -> Iterator[Callable[..., str]]:
    """Run containerd as nodes have it; yields what runs ctr."""
    if os.geteuid() != 0:
        pytest.skip("containerd needs root")
    config = folder / "containerd.toml"
    config.write_text(
        f"""version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{folder}/c.sock"
"""
    )
    with (folder / "containerd.log").open("wb") as log:
        process = subprocess.Popen([debian.program("containerd"), "-c", config], stdout=log, stderr=log)
    ctr: list[str] = [str(debian.program("ctr")), "-a", f"{folder}/c.sock"]

    def run(*argv: str) -> str:
        return subprocess.run([*ctr, *argv], check=True, capture_output=True, text=True, timeout=300).stdout

    try:
        until(lambda: subprocess.run([*ctr, "version"], check=False, capture_output=True).returncode == 0)
        yield run
    finally:
        process.terminate()
        process.wait(300)


def test_what_only_a_pod_could_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"^target\.builder: .*not into a file"):
        save_image(context(tmp_path), tmp_path / "image.tar")
    assert not list(tmp_path.glob("*image.tar*"))


@pytest.mark.parametrize(
    ("path", "said"), [("code", "code is a folder"), ("none/x.tar", "x.tar is in no folder that exists")]
)
def test_a_place_where_no_archive_can_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str
) -> None:
    monkeypatch.setattr(build, "_base", lambda *_: pytest.fail("the work has begun"))
    with pytest.raises(BadInputError, match=rf"^--archive: .*{re.escape(said)}"):
        save_image(context(tmp_path, image="registry.example/base:1"), tmp_path / path)
    assert [each.name for each in tmp_path.iterdir()] == ["code"]


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"nothing")
    with pytest.raises(BuildError, match=r"x\.tar is no archive of an image"):
        Archive(tmp_path / "x.tar")
