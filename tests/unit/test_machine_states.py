"""What is said of a supervised training: the same by `manycpu status` and by the process that waits."""

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger import Attempt
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import UnseenError
from manycpu.pipeline.spec.exit_records import FOLDER, write
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.machines.context import MachineContext, attempt_directory, is_on_machines
from manycpu.pipeline.targets.machines.stage import stage
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.wait import watch


@pytest.fixture
def attempt(script: Callable[..., str], home: Path, tmp_path: Path) -> tuple[MachineContext, ProcessHandle]:
    """Have an attempt whose supervisor is this process; the run asks for two ranks."""
    assert home
    fields = {"program": script(), "output": str(tmp_path / "out"), "nproc_per_node": 2}
    ctx = open_context(fields, None, "a", base=tmp_path)
    assert is_on_machines(ctx)
    ctx.ledger.open(ctx.new_entry(time.time()))
    folder = attempt_directory(ctx, 1)
    folder.mkdir(parents=True)
    handle = process.handle_of_this_process(folder, ctx.name, 1)
    with ctx.ledger.update() as entry:
        entry.attempt, entry.handle = 1, handle
    return ctx, handle


def says(handle: ProcessHandle, rank: int, event: str, **fields: object) -> None:
    line = events.join(rank, "a", events.encode(event, rank=rank, host="a", **fields))
    with (Path(handle.directory) / process.LOG).open("a") as log:
        log.write(line + "\n")


def meets(handle: ProcessHandle, rank: int) -> None:
    says(handle, rank, "proof", world_size=2, meeting="m")
    says(handle, rank, "backend", requested="gloo", observed="gloo", world_size=2)


def both(ctx: MachineContext, handle: ProcessHandle) -> Status:
    """See that both say the same; what they say."""
    watching = watch(ctx, handle)
    _, waited = watching.look()
    while watching.behind:
        _, waited = watching.look()
    waited = outcome(ctx, waited, watching.observed) if waited.state.terminal else waited
    assert attempt_status(ctx, handle, ctx.ledger.read()) == waited
    return waited


def test_the_command_that_declares_a_training_gone_is_given_whole(
    script: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "there"
    fields = {"program": script(), "output": str(tmp_path / "out")}
    ctx = open_context(fields, {"directory": str(folder)}, "a", base=tmp_path)
    ctx.ledger.open(ctx.new_entry(time.time()))
    directory = Path(ctx.where) / "attempts" / "1"
    handle = process.handle_of_this_process(directory, ctx.name, 1).model_copy(update={"host": "elsewhere"})
    with ctx.ledger.update() as entry:
        entry.attempt, entry.handle = 1, handle
    with pytest.raises(UnseenError, match=f"say so: manycpu cancel {ctx.name} --gone --directory {folder}"):
        cancel(ctx, "a person")


def test_a_training_runs_once_its_ranks_have_met(attempt: tuple[MachineContext, ProcessHandle]) -> None:
    ctx, handle = attempt
    starting = Status(state=RunState.PENDING, reason="starting")
    assert both(ctx, handle) == starting
    says(handle, 0, "warning", message="slow")
    meets(handle, 0)
    assert both(ctx, handle) == starting
    meets(handle, 1)
    assert both(ctx, handle) == Status(state=RunState.RUNNING)


@pytest.mark.parametrize(
    ("ranks", "state", "reason"),
    [((0, 1), RunState.SUCCEEDED, ""), ((0,), RunState.FAILED, "2 ranks met, but 1 introduced themselves")],
)
def test_a_success_counts_once_its_ranks_have_proved_it(
    attempt: tuple[MachineContext, ProcessHandle], ranks: tuple[int, ...], state: RunState, reason: str
) -> None:
    ctx, handle = attempt
    for rank in ranks:
        meets(handle, rank)
    record = {"code": 0, "reason": "", "started": 0.0, "ended": 1.0}
    process.write_json(Path(handle.directory) / process.EXIT, record)
    assert both(ctx, handle) == Status(state=state, reason=reason)


@pytest.mark.parametrize(
    ("codes", "state"),
    [((0, 0), RunState.SUCCEEDED), ((0,), RunState.FAILED), ((0, 1), RunState.FAILED), ((), RunState.FAILED)],
)
def test_what_all_ranks_recorded_counts_before_a_budget(
    attempt: tuple[MachineContext, ProcessHandle], codes: tuple[int, ...], state: RunState
) -> None:
    ctx, handle = attempt
    for rank in (0, 1):
        meets(handle, rank)
    for rank, code in enumerate(codes):
        line = events.encode("exit", rank=rank, host="a", code=code, meeting="m")
        record = {"meeting": "m", "rank": rank, "host": "a", "world_size": 2, "code": code, "time": 1.0}
        write(Path(handle.directory) / FOLDER, record | {"lines": [line]})
    record = {"code": -9, "reason": "run.run_timeout: not done", "started": 0.0, "ended": 1.0}
    process.write_json(Path(handle.directory) / process.EXIT, record)
    assert both(ctx, handle).state is state


@pytest.mark.parametrize(
    ("cancelled", "state"),
    [({1: "a person"}, RunState.CANCELLED), ({1: "cleanup"}, RunState.FAILED), ({}, RunState.FAILED)],
)
def test_a_cancelled_attempt_is_cancelled_also_where_its_supervisor_was_killed(
    attempt: tuple[MachineContext, ProcessHandle], cancelled: dict[int, str], state: RunState
) -> None:
    ctx, handle = attempt
    with ctx.ledger.update() as entry:
        entry.cancelled = cancelled
    gone = handle.model_copy(update={"start_ticks": 1})
    assert attempt_status(ctx, gone, ctx.ledger.read()).state is state


def test_a_dead_supervisor_leaves_nothing_to_cancel(attempt: tuple[MachineContext, ProcessHandle]) -> None:
    ctx, handle = attempt
    with ctx.ledger.update() as entry:
        entry.handle = handle.model_copy(update={"start_ticks": 1})
    assert not ctx.driver.cancel(ctx, "a person", None)
    assert ctx.ledger.read().cancelled == {}


def test_a_training_is_ended_also_if_a_full_disk_takes_no_record_of_it(
    attempt: tuple[MachineContext, ProcessHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, handle = attempt
    ended: list[ProcessHandle] = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(process, "cancel", ended.append)
    monkeypatch.setattr(FileLedger, "save", full)
    with pytest.raises(OSError, match="no space"):
        ctx.driver.cancel(ctx, "a person", None)
    assert ended == [handle]


def test_what_a_training_wrote_into_its_data_stays_while_it_goes_on(
    attempt: tuple[MachineContext, ProcessHandle], tmp_path: Path
) -> None:
    ctx, handle = attempt
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.txt").write_text("x")
    first = stage(ctx, {"data": str(tmp_path / "set")}, lambda *_: None)["data"].path
    with ctx.ledger.update() as entry:
        entry.attempts[1] = Attempt(run=ctx.run_fields, target=ctx.target_fields, data=first)
    (Path(first) / "cache.arrow").write_text("mine")
    again = stage(ctx, {"data": str(tmp_path / "set")}, lambda *_: None)["data"]
    assert (again.path, again.reused) == (f"{first}-2", False)
    assert [path.name for path in Path(again.path).iterdir()] == ["train.txt"]
    assert (Path(first) / "cache.arrow").read_text() == "mine"
    process.write_json(Path(handle.directory) / process.EXIT, {"code": 1, "reason": "ended"})
    assert stage(ctx, {"data": str(tmp_path / "set")}, lambda *_: None)["data"].path == first
    assert not (Path(first) / "cache.arrow").exists()
