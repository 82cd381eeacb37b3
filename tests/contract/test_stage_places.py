"""Data that is not written twice: clones where the file system has them, and data that is used in place."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manycpu.pipeline import train, transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.run_report import Report

TELLS = """
import os, pathlib
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text(os.environ["MANYCPU_DATA"])
"""


@pytest.fixture
def clones(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system that clones files."""
    if os.geteuid() != 0 or not shutil.which("mkfs.xfs"):
        pytest.skip("a file system that clones files needs root and xfsprogs (tests/system-packages)")
    image, folder = tmp_path / "xfs", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    folder.mkdir()
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False).returncode:
        pytest.skip("no file can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_copy_shares_its_blocks_where_the_file_system_clones_files(clones: Path) -> None:
    source, copy = clones / "source", clones / "home" / "copy"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(8 << 20))
    (source / "small").write_bytes(b"small")
    done: list[int] = []
    location = Location.of(str(source), "run.data")
    stored = transfer.fetch(location, copy, lambda now, _: done.append(now), read_only=True)
    extents = subprocess.run(
        ["filefrag", "-v", str(copy / "large")], check=True, capture_output=True, text=True
    )
    assert "shared" in extents.stdout
    assert stored.manifest == transfer.scan(location)
    assert done[-1] == (8 << 20) + 5
    before = (source / "large").read_bytes()
    (copy / "large").chmod(0o600)
    (copy / "large").write_bytes(b"changed by a program")
    assert (source / "large").read_bytes() == before
    assert (source / "large").stat().st_mode & 0o200


@pytest.mark.usefixtures("light_torch", "no_process_left")
@pytest.mark.parametrize("name", ["set", "set/train.txt"])
def test_data_is_used_in_its_place_by_a_word_of_its_owner(
    home: Path, script: Callable[..., str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.txt").write_text("some data")
    (tmp_path / "set" / "linked").symlink_to("train.txt")

    def trained(stage: str) -> tuple[str, Report]:
        run = {"program": script(TELLS), "data": str(tmp_path / name), "output": str(tmp_path / stage)}
        report = train({**run, "nproc_per_node": 1}, {"kind": "local", "stage": stage})
        return (tmp_path / stage / "model.txt").read_text(), report

    path, in_place = trained("in_place")
    assert path == str(tmp_path / name)
    assert not (home / "data").exists()
    path, copied = trained("copy")
    assert path.startswith(str(home / "data"))
    assert in_place.digests["data"] == copied.digests["data"]
