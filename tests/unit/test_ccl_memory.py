"""Memory that the ranks of one host share: all of a group have it, or none."""

import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from manycpu.pipeline.node.ccl import peers

LONG, PART = timedelta(seconds=20), mmap.PAGESIZE


def shared(store: HashStore, size: int) -> list[int | None]:
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(peers.share, store, rank, size, LONG, PART) for rank in reversed(range(size))]
        return [rank.result() for rank in reversed(ranks)]


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_all_ranks_have_the_same_memory_and_no_file_system_has_it() -> None:
    opened = [one for one in shared(HashStore(), 3) if one is not None]
    maps = [mmap.mmap(one, 3 * PART) for one in opened]
    maps[0][2 * PART] = 7
    assert [one[2 * PART] for one in maps] == [7, 7, 7]
    assert os.fstat(opened[0]).st_nlink == 0
    for one, view in zip(opened, maps, strict=True):
        view.close()
        os.close(one)


def test_a_rank_alone_has_none() -> None:
    assert peers.share(HashStore(), 0, 1, LONG, PART) is None


NO_ROOM = """
import resource, sys
from test_ccl_memory import PART, HashStore, descriptors, shared
resource.setrlimit(resource.RLIMIT_FSIZE, (PART, PART))
before = descriptors()
assert [shared(HashStore(), 2) for _ in range(2)] == [[None, None]] * 2
assert descriptors() == before
"""


def test_without_room_none_has_it_and_it_is_said_once() -> None:
    # A process of its own: no file may be longer there than one part, and its output is a pipe.
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    words = [sys.executable, "-c", NO_ROOM]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.count("share no memory, so that collectives are slower: [Errno 27]") == 1


def test_with_a_rank_elsewhere_none_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    before, store = descriptors(), HashStore()
    PrefixStore("memory", store).set("1", "elsewhere")
    assert peers.share(store, 0, 2, LONG, PART) is None
    assert descriptors() == before
    assert capsys.readouterr().out == ""


def test_an_offer_of_another_host_is_not_opened() -> None:
    store = HashStore()
    ours = PrefixStore("memory", store)
    ours.set("offer", "elsewhere\n/proc/1/fd/0\n/memfd:manycpu")
    ours.set("verdict", "elsewhere")
    assert peers.share(store, 1, 2, LONG, PART) is None
    assert ours.get("1") == b"elsewhere"


def test_what_is_not_the_memory_that_was_offered_is_not_opened() -> None:
    before, store = descriptors(), HashStore()
    ours = PrefixStore("memory", store)
    with Path(os.devnull).open() as other, ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers.share, store, 0, 2, LONG, PART)
        ours.wait(["offer"], LONG)
        host, _, target = ours.get("offer").decode().split("\n")
        ours.set("offer", f"{host}\n/proc/self/fd/{other.fileno()}\n{target}")
        assert peers.share(store, 1, 2, LONG, PART) is None
        assert first.result() is None
    assert "is not /memfd:manycpu-" in ours.get("1").decode()
    assert descriptors() == before
