"""Locks hold across processes, also where the file is deleted by its holder."""

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from support.killable_programs import Program
from support.waiting import until

from manycpu.pipeline.adapters import lock as locks
from manycpu.pipeline.adapters.lock import leased, locked
from manycpu.pipeline.spec.errors import BadInputError, DeadlineError

HOLD = "from manycpu.pipeline.adapters.lock import leased; import pathlib, sys, time\n"
HOLD += "with leased(pathlib.Path(sys.argv[1]), 0.05): time.sleep(60)"
lease = partial(leased, beat=0.02, stale=0.5)


@pytest.mark.parametrize("lock", [locked, lease])
def test_only_one_at_a_time_also_when_each_deletes_the_file(
    tmp_path: Path, lock: Callable[[Path], AbstractContextManager[object]]
) -> None:
    inside, most = [], []

    def work() -> None:
        for _ in range(20):
            with lock(tmp_path / "lock"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                if lock is locked:
                    (tmp_path / "lock").unlink()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80
    assert max(most) == 1


def test_a_lease_is_kept_while_its_holder_lives_and_free_after_its_death(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = Program([sys.executable, "-c", HOLD, str(path)])
    entered = threading.Event()

    def enter() -> None:
        with lease(path):
            entered.set()

    waiting = threading.Thread(target=enter)
    try:
        until(path.exists)
        waiting.start()
        assert not entered.wait(1.5), "entered beside a holder that lives"
    finally:
        holder.kill()
        holder.wait()
    assert entered.wait(10)
    waiting.join()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_was_lost_is_not_taken_from_its_next_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lease(path):
        path.unlink()
        path.write_text("another")
        before = path.stat().st_mtime_ns
    assert path.read_text() == "another"
    assert path.stat().st_mtime_ns == before


def test_a_lease_whose_holder_does_not_get_on_is_another_s(tmp_path: Path) -> None:
    works = threading.Event()
    works.set()
    entered = threading.Event()

    def enter() -> None:
        with lease(tmp_path / "lock"):
            entered.set()

    waiting = threading.Thread(target=enter)
    with lease(tmp_path / "lock", alive=works.is_set):
        waiting.start()
        assert not entered.wait(1.5), "entered beside a holder that works"
        works.clear()
        assert entered.wait(30)
    waiting.join()


def test_who_waits_for_a_lease_gets_on_as_long_as_its_holder_does(tmp_path: Path) -> None:
    ticks: list[int] = []
    ticked = threading.Event()

    def tick() -> None:
        ticks.append(1)
        if len(ticks) > 3:
            ticked.set()

    def enter() -> None:
        with lease(tmp_path / "lock", tick=tick):
            pass

    waiting = threading.Thread(target=enter)
    with lease(tmp_path / "lock"):
        waiting.start()
        assert ticked.wait(30)
    waiting.join()


def test_a_lock_that_is_never_let_go_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_SILENCE_TIMEOUT_S", 0.2)
    refused = pytest.raises(DeadlineError, match="another process holds the lock")
    with ThreadPoolExecutor(1) as pool, locked(tmp_path / "lock"), refused:
        pool.submit(locked(tmp_path / "lock").__enter__).result()
    with locked(tmp_path / "lock"):
        pass


def test_a_lock_that_an_interrupt_kept_from_its_release_is_free_for_its_thread(tmp_path: Path) -> None:
    """Ctrl-C in ``__exit__`` before its first step: the traceback keeps the block's generator alive."""
    interrupted = locked(tmp_path / "lock")
    interrupted.__enter__()
    for _ in range(2):
        with locked(tmp_path / "lock"):
            taken = subprocess.run(["flock", "-n", str(tmp_path / "lock"), "true"], check=False)
            assert taken.returncode == 1
    assert subprocess.run(["flock", "-n", str(tmp_path / "lock"), "true"], check=False).returncode == 0
    del interrupted


def test_a_disk_without_locks_is_named_and_a_disk_that_fails_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    for number, error in {errno.ENOSYS: BadInputError, errno.EIO: OSError}.items():
        monkeypatch.setattr(fcntl, "flock", lambda *_, number=number: fail(number))
        with pytest.raises(error, match=re.escape(os.strerror(number))), locked(tmp_path / "lock"):
            pass
