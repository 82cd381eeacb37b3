"""Until when a run lives, and who may say that it does not."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger import base as ledger_base
from manycpu.pipeline.ledger.base import (
    LEASE_S,
    RENEW_INTERVAL_S,
    Lease,
    from_annotations,
    renewal_pause,
    to_annotations,
)
from manycpu.pipeline.ledger.file import FileLedger, half_removed
from manycpu.pipeline.spec.errors import ForeignRunError, LedgerError, RunGoneError
from manycpu.pipeline.spec.handle import ProcessHandle

NOW = 1_700_000_000.0
ME = process.handle_of_this_process(Path(), "run", 0)


@pytest.fixture
def ledger(tmp_path: Path) -> FileLedger:
    made = FileLedger(tmp_path / "runs" / "x")
    made.open(Entry(key="k", name="x", created=NOW, run={}, target={}))
    return made


def raise_input_output_error(*_: object) -> None:
    raise OSError(5, "Input/output error")


def dead() -> ProcessHandle:
    """Describe a process of this machine that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ME.model_copy(update={"pid": ended.pid})


@pytest.mark.parametrize(
    ("lease", "held", "over"),
    [
        (Lease(until=NOW + 1), True, False),
        (Lease(until=NOW - 1), False, True),
        (Lease(until=NOW + 1, ended=True), False, False),  # kept for a look
        (Lease(until=None, ended=True), False, False),  # a model that was not exported
        (Lease(), False, False),  # of an earlier version: unknown
        (Lease(until=NOW + 1, holder=ME), True, False),
        (Lease(until=NOW + 1, holder=dead()), False, False),
        (Lease(until=NOW + 1, holder=dead().model_copy(update={"host": "another"})), True, False),
        (
            Lease(until=NOW + 1, holder=dead().model_copy(update={"boot_id": "b", "machine": "another"})),
            True,
            False,
        ),
        (Lease(until=NOW + 1, holder=dead().model_copy(update={"pid_namespace": "another"})), True, False),
        (Lease(until=NOW + 1, holder=dead().model_copy(update={"start_ticks": None})), True, False),
    ],
)
def test_who_holds_a_lease_and_when_it_is_over(lease: Lease, *, held: bool, over: bool) -> None:
    assert (lease.held(NOW), lease.over(NOW)) == (held, over)


def test_a_lease_on_kubernetes_is_what_was_written() -> None:
    lease = Lease(until=NOW, ended=True, holder=ME)
    written = to_annotations(until=NOW, ended=True, holder=ME)
    assert from_annotations({"annotations": written}) == lease
    taken_back = to_annotations(until=NOW, ended=False, holder=None)
    assert set(taken_back) == set(written)  # a patch must name what it takes away
    assert from_annotations({"annotations": {k: v for k, v in taken_back.items() if v}}) == Lease(until=NOW)
    assert (
        from_annotations({}) == from_annotations({"annotations": {"manycpu/kept-until": "soon"}}) == Lease()
    )


def test_renewals_of_a_thousand_runs_are_two_a_second_and_far_shorter_apart_than_a_lease() -> None:
    pauses = [renewal_pause() for _ in range(1000)]
    assert RENEW_INTERVAL_S / 2 <= min(pauses) < max(pauses) <= 1.5 * RENEW_INTERVAL_S < LEASE_S / 10
    assert 1000 / RENEW_INTERVAL_S < 2


def test_a_lease_is_renewed_while_somebody_works_and_a_volume_that_is_away_is_no_matter(
    ledger: FileLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed, away = threading.Semaphore(0), threading.Event()
    change = ledger.change_lease

    def changes(*only_if: Any, **fields: Any) -> None:
        renewed.release()
        if away.is_set():
            raise OSError("the volume is away")
        change(*only_if, **fields)

    monkeypatch.setattr(ledger, "change_lease", changes)
    monkeypatch.setattr(ledger_base, "renewal_pause", lambda: 0.01)
    ledger.keep(0)
    with ledger.kept_alive():
        away.set()
        for _ in range(5):
            assert renewed.acquire(timeout=30)
        away.clear()
        for _ in range(5):
            assert renewed.acquire(timeout=30)
    lease = ledger.lease()
    assert (lease.ended, lease.held(NOW)) == (False, True)


def test_a_run_that_is_taken_up_again_has_no_end_of_its_time_as_a_kept_one(ledger: FileLedger) -> None:
    ledger.keep(0)
    ledger.open(ledger.read())
    assert not ledger.lease().over(NOW)
    assert not ledger.lease().ended


def test_a_late_renewal_leaves_a_lease_that_has_ended(ledger: FileLedger) -> None:
    ledger.keep(30 * LEASE_S)
    kept = ledger.lease()
    ledger.renew()
    assert ledger.lease() == kept


def test_a_lease_that_a_process_held_for_a_while_is_as_before(ledger: FileLedger) -> None:
    ledger.keep(30 * LEASE_S)
    kept = ledger.lease()
    with ledger.held_by(ME, kept):
        assert ledger.lease().held(ledger.now())
    assert ledger.lease() == kept
    with ledger.held_by(ME, kept):
        ledger.keep(None)
    assert (ledger.lease().until, ledger.lease().kept) == (None, True)


def test_a_lease_that_has_changed_is_not_held(ledger: FileLedger) -> None:
    ledger.keep(0)
    found = ledger.lease()
    ledger.open(ledger.read())
    resumed = ledger.lease()
    with pytest.raises(ForeignRunError, match="another process has taken up"), ledger.held_by(ME, found):
        pytest.fail("the run is held")
    assert ledger.lease() == resumed


@pytest.mark.parametrize("seconds", [-1, 30 * LEASE_S, None], ids=["over", "kept", "kept for ever"])
def test_of_a_killed_removal_only_a_run_whose_time_was_over_is_no_longer_kept(
    ledger: FileLedger, seconds: float | None
) -> None:
    ledger.keep(seconds)
    with ledger.held_by(dead(), ledger.lease()):
        lease, now = ledger.lease(), ledger.now()
        assert (lease.held(now), lease.over(now), lease.no_longer_kept(now)) == (False, False, seconds == -1)


def test_a_run_whose_folder_was_taken_away_says_so(ledger: FileLedger) -> None:
    ledger.remove()
    for act in (ledger.read, ledger.renew):
        with pytest.raises(RunGoneError, match="the run has not begun, or was taken away"):
            act()
    assert list(ledger.directory.parent.iterdir()) == []


def test_a_run_begins_again_only_when_nothing_of_the_earlier_one_is_left_elsewhere(
    ledger: FileLedger,
) -> None:
    entry = ledger.read()
    assert ledger.remove(lambda _: ["host-b:/runs/x"]) == ["host-b:/runs/x"]
    assert not ledger.exists()
    assert [one.directory.name for one in half_removed(ledger.directory.parent)] == ["x"]
    with pytest.raises(LedgerError, match="an earlier run x is not wholly removed"):
        ledger.open(entry)
    assert ledger.finish_removal(lambda removed: [removed.name]) == ["x"]
    assert ledger.finish_removal(lambda _: []) == []
    assert list(ledger.directory.parent.iterdir()) == []
    assert ledger.open(entry).owner != ""


def test_a_folder_that_a_rank_made_again_goes_with_the_rest_of_the_run(ledger: FileLedger) -> None:
    ledger.remove(lambda _: ["host-b:/runs/x"])
    (ledger.directory / "checkpoints").mkdir(parents=True)
    assert [one.directory.name for one in half_removed(ledger.directory.parent)] == ["x"]
    assert ledger.finish_removal(lambda _: []) == []
    assert list(ledger.directory.parent.iterdir()) == []


def test_what_another_user_owns_of_a_removed_run_does_not_keep_its_name(
    ledger: FileLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, rmtree, runs = ledger.read(), shutil.rmtree, ledger.directory.parent
    (ledger.directory / "of-root").touch()

    def refuse(folder: Path) -> None:
        if (folder / "of-root").exists():
            raise PermissionError
        rmtree(folder)

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(PermissionError):
        ledger.remove()
    for _ in range(2):
        assert ledger.open(entry).name == "x"
        assert ledger.remove() == []
    assert [(path.is_dir(), path.suffix) for path in runs.iterdir()] == [(True, ".removed")]


def test_a_removed_run_whose_ledger_cannot_be_read_for_a_moment_keeps_its_name(
    ledger: FileLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.remove(lambda _: ["host-b:/runs/x"])
    with monkeypatch.context() as patched:
        patched.setattr(FileLedger, "read", raise_input_output_error)
        with pytest.raises(OSError, match="Input/output"):
            ledger.remove()
    assert [path.name for path in ledger.directory.parent.glob("*.removed")] == [".x.removed"]


def test_a_run_that_another_user_alone_may_read_is_not_half_removed(
    ledger: FileLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.parent == ledger.directory:
            raise PermissionError
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    assert half_removed(ledger.directory.parent) == []
    monkeypatch.undo()


def test_a_removal_whose_ledger_only_a_newer_version_can_read_is_left_to_that_version(
    ledger: FileLedger,
) -> None:
    ledger.remove(lambda _: ["host-b:/runs/x"])
    (trash,) = ledger.directory.parent.glob(".x.removed")
    (trash / "ledger.json").write_text("{}")
    (left,) = ledger.finish_removal(lambda _: [])
    assert "another version of manycpu" in left
    assert trash.exists()


def test_a_folder_that_another_machines_run_has_here_is_not_begun_in(ledger: FileLedger) -> None:
    entry = ledger.read()
    (ledger.directory / "attempts").mkdir()
    (ledger.directory / "ledger.json").unlink()
    with pytest.raises(ForeignRunError, match="belongs to a run of another machine"):
        ledger.open(entry)
    (ledger.directory / "attempts").rmdir()
    assert ledger.open(entry).name == "x"


def test_a_run_begins_again_once_all_of_it_is_removed(ledger: FileLedger) -> None:
    with ThreadPoolExecutor() as pool:
        entry, again = ledger.read(), []

        def remove_elsewhere(_: Entry) -> list[str]:
            again.append(pool.submit(ledger.open, entry))
            time.sleep(0.2)
            assert not again[0].done()
            return []

        ledger.remove(remove_elsewhere)
        assert again[0].result(timeout=60).name == "x"
    assert ledger.exists()


def test_changes_of_a_lease_at_the_same_time_are_all_kept(ledger: FileLedger) -> None:
    """Each thread changes a field of its own; none may find another's file gone, nor undo its change."""
    for number in range(20):
        changes: list[dict[str, Any]] = [{"until": NOW + number}, {"ended": number % 2 == 0}]
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(ledger.change_lease, **change) for change in changes]:
                done.result()
        assert ledger.lease() == Lease(until=NOW + number, ended=number % 2 == 0)


def test_a_run_that_another_process_works_on_is_left_alone(ledger: FileLedger) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = process._start_ticks(other.pid)  # noqa: SLF001 - of a process that is no manycpu's
        holder = ME.model_copy(update={"pid": other.pid, "start_ticks": started})
        ledger.change_lease(until=time.time() + LEASE_S, holder=holder)
        for act in (lambda: ledger.open(ledger.read()), lambda: ledger.change_lease(holder=ME)):
            with pytest.raises(ForeignRunError, match=f"process {other.pid} of this machine works on run"):
                act()
        assert ledger.lease().holder == holder
        ledger.renew()  # its own threads, and a process that waits
    finally:
        other.communicate(b"\n")
    ledger.change_lease(holder=ME)
    assert ledger.lease().holder == ME


def test_a_ledger_that_another_version_wrote_says_so(ledger: FileLedger) -> None:
    (ledger.directory / "ledger.json").write_text('{"schema": 99}')
    with pytest.raises(LedgerError, match=r"ledger.json cannot be read, another version of manycpu"):
        ledger.read()


@pytest.mark.parametrize(
    "fields",
    [{"host": "another"}, {"pid_namespace": "another"}, {"boot_id": "b", "machine": "another"}],
    ids=["host", "container", "machine"],
)
def test_a_run_is_not_taken_over_from_who_cannot_be_seen(ledger: FileLedger, fields: dict[str, str]) -> None:
    ledger.change_lease(until=time.time() + LEASE_S, holder=ME)
    holder = ME.model_copy(update=fields)
    process.write_json(
        ledger.directory / "lease.json", ledger.lease().model_copy(update={"holder": holder}).model_dump()
    )
    for act in (lambda: ledger.open(ledger.read()), lambda: ledger.change_lease(holder=ME)):
        with pytest.raises(
            ForeignRunError, match=r"cannot be seen from here. See there. .* cancel run --gone"
        ):
            act()
    assert ledger.lease().holder == holder


def test_a_handle_of_an_earlier_version_tells_only_who_lives() -> None:
    old = ME.model_copy(update={"start_ticks": None, "pid_namespace": None, "machine": None})
    assert process.is_alive(old) is True
    if sys.platform == "linux":
        assert process.is_alive(old.model_copy(update={"start_time": old.start_time - 100})) is None


def test_a_process_of_this_machine_is_known_to_be_dead() -> None:
    assert process.is_alive(ME) is True
    assert process.is_alive(dead()) is False
    assert ME.host == socket.gethostname()


def test_a_lease_that_could_not_be_taken_up_is_taken_up_by_a_renewal(
    ledger: FileLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.keep(0)
    take_up, tries = FileLedger.take_up, list[float]()

    def fails_once(one: FileLedger, seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        take_up(one, seconds)

    monkeypatch.setattr(FileLedger, "take_up", fails_once)
    monkeypatch.setattr(ledger_base, "renewal_pause", lambda: 0.01)
    with ledger.kept_alive(NOW):
        until(lambda: not ledger.lease().ended)
