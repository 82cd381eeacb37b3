"""What killed processes leave in /dev/shm: deleted once the owner is dead, and never while it may live."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from support import namespaces
from support.killable_programs import Program
from support.waiting import until

from manycpu.pipeline.node.ccl import leftovers

OWNER = """
import mmap, os, pathlib, signal, sys
from manycpu.pipeline.node.ccl import leftovers
folder = pathlib.Path(sys.argv[1])
region = folder / f"{os.getpid()}:0:0"
region.write_bytes(bytes(mmap.PAGESIZE))
memory = mmap.mmap(os.open(region, os.O_RDWR), mmap.PAGESIZE)
leftovers.claim(folder)
child = os.fork() if "forks" in sys.argv else None
if child != 0:
    print(region.name, child, flush=True)
signal.pause()
"""
Begin = Callable[..., tuple[Program[str], str, str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start the owner of a region; gives it, the region's name, and the owner's child."""
    with ExitStack() as owners:

        def begin(*words: str, place: tuple[str, ...] = ()) -> tuple[Program[str], str, str]:
            command = [*place, sys.executable, "-c", OWNER, str(tmp_path), *words]
            owner = owners.enter_context(Program(command, stdout=subprocess.PIPE, text=True))
            assert owner.stdout is not None
            name, child = owner.stdout.readline().split()
            return owner, name, child

        yield begin


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Path]:
    """Make a region of this process, as libfabric does."""
    path = tmp_path / f"{os.getpid()}:0:0"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
        yield path
    leftovers.release()


def test_a_region_is_deleted_once_its_owner_is_dead(begin: Begin, tmp_path: Path) -> None:
    owner, name, _ = begin()
    assert leftovers.sweep(tmp_path) == []
    owner.end()
    assert leftovers.sweep(tmp_path) == [name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "")
def test_a_region_of_another_container_is_kept_while_its_owner_lives(begin: Begin, tmp_path: Path) -> None:
    """Its process id means nothing here, or another process."""
    owner, name, _ = begin(place=tuple(namespaces.CONTAINER))
    assert leftovers.sweep(tmp_path) == []
    assert (tmp_path / name).exists()
    owner.end()
    until(lambda: leftovers.sweep(tmp_path) == [name])


def test_a_region_without_a_known_owner_is_kept(tmp_path: Path) -> None:
    for name in ("4194399:0:0", f"{os.getpid()}:0:0", "other", "a:0:0"):
        (tmp_path / name).touch()
    leftovers.claim(tmp_path)  # none is mapped here: they are of another container's process of this number
    leftovers.release()
    assert leftovers.sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_a_child_that_outlives_its_rank_keeps_no_region(begin: Begin, tmp_path: Path) -> None:
    owner, name, child = begin("forks")
    try:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert leftovers.sweep(tmp_path) == [name]
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_process_deletes_its_own_regions_at_its_end(region: Path, tmp_path: Path) -> None:
    leftovers.claim(tmp_path)
    assert leftovers.sweep(tmp_path) == []
    leftovers.release()
    assert not region.exists()


def test_a_region_that_libfabric_deleted_keeps_no_memory(region: Path, tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    leftovers.claim(tmp_path)
    assert psutil.Process().num_fds() == before + 1
    region.unlink()
    leftovers.claim(tmp_path)
    assert psutil.Process().num_fds() == before
