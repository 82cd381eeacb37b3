"""What a training wrote on machines stays, until it is exported or a person names the run."""

import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.local_runs import on_this_machine
from support.waiting import until

from manycpu.pipeline import train
from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger import Lease, VerbRecord
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import CancelledError, ExportError, ForeignRunError, TrainingFailedError
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.transfer.claims import Holding
from manycpu.pipeline.verbs import prepare as verb
from manycpu.pipeline.verbs.cleanup import cleanup, may_delete_expired
from manycpu.pipeline.verbs.prepare import prepare

pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
Script = Callable[..., str]

SAVES = """
import os, sys, time
folder = os.environ["MANYCPU_CHECKPOINTS"]
attempt = int(os.environ["MANYCPU_ATTEMPT"])
if attempt > 1:
    assert os.listdir(folder) == ["checkpoint-1"], os.listdir(folder)
    open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("done")
    sys.exit()
os.makedirs(folder, exist_ok=True)
open(folder + "/checkpoint-1", "w").write("a day of work")
print("saved", flush=True)
"""
FAILS = SAVES + "sys.exit(3)"
WAITS = SAVES + "time.sleep(600)"


class Acts(Silent):
    """Does something once the first checkpoint is there."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def line(self, line: Any) -> None:
        if line.text == "saved":
            self._act()


def fields(tmp_path: Path, program: str, **more: Any) -> dict[str, Any]:
    return {"program": program, "output": str(tmp_path / "out"), "nproc_per_node": 1, **more}


def report(tmp_path: Path) -> Report:
    return Report.model_validate_json((tmp_path / "out" / "report.json").read_text())


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def kill_supervisor(home: Path, number: signal.Signals = signal.SIGKILL) -> None:
    (ctx,) = on_this_machine(home)
    until(lambda: ctx.ledger.read().handle)
    handle: Any = ctx.ledger.read().handle
    os.kill(handle.pid, number)


def interrupt() -> None:
    raise KeyboardInterrupt


RESUMABLE = {"ledger.json", "lease.json", "owner", "checkpoints/checkpoint-1", "attempts/1/handle.json"}


def test_of_a_training_that_failed_output_and_checkpoints_stay_alone_and_the_same_run_continues(
    script: Script, tmp_path: Path, home: Path
) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        train(fields(tmp_path, script(FAILS)), run_id="x")
    (kept,) = (home / "runs").glob("train-*")
    assert contents(kept) == RESUMABLE | {"attempts/1/exit.json", "attempts/1/heard.json"}
    written = report(tmp_path)
    assert str(kept / "checkpoints") in written.kept
    assert written.left_behind == []
    (advice,) = caught.value.__notes__
    assert advice == written.advice
    assert f"`manycpu clean {kept.name} --delete-model` deletes it" in advice
    again = train(fields(tmp_path, script(FAILS)), run_id="x")
    assert (again.state, again.attempts, again.advice) == ("succeeded", 2, None)
    assert list((home / "runs").iterdir()) == []


def test_a_checkpoint_in_the_place_of_its_folder_stays(script: Script, tmp_path: Path, home: Path) -> None:
    program = """
import os, sys
os.rmdir(os.environ["MANYCPU_CHECKPOINTS"])
open(os.environ["MANYCPU_CHECKPOINTS"], "w").write("a day of work")
sys.exit(3)
"""
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, script(program)), run_id="x")
    (kept,) = (home / "runs").glob("train-*")
    assert (kept / "checkpoints").read_text() == "a day of work"


def test_a_run_that_a_person_interrupts_keeps_its_checkpoints_for_its_time(
    script: Script, tmp_path: Path, home: Path
) -> None:
    with pytest.raises(CancelledError):
        train(fields(tmp_path, script(WAITS)), run_id="x", listener=Acts(interrupt))
    (ctx,) = on_this_machine(home)
    lease = ctx.ledger.lease()
    assert lease.until is not None
    assert abs(lease.until - time.time() - ctx.run.keep_for) < 600
    assert (lease.kept, lease.ended) == (True, True)
    assert train(fields(tmp_path, script(WAITS)), run_id="x").state == "succeeded"


def test_ctrl_c_at_the_word_that_a_run_is_cleaned_up_does_not_end_the_cleaning_up(
    script: Script, tmp_path: Path, home: Path
) -> None:
    class AtTheWord(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "interrupted: ending the training, and cleaning up":
                interrupt()

    log, handler = logging.getLogger("manycpu"), AtTheWord()
    log.addHandler(handler)
    try:
        with pytest.raises(CancelledError, match="interrupted; the training was ended"):
            train(fields(tmp_path, script(WAITS)), run_id="x", listener=Acts(interrupt))
    finally:
        log.removeHandler(handler)
    (ctx,) = on_this_machine(home)
    assert (ctx.ledger.lease().kept, ctx.ledger.lease().ended) == (True, True)


@pytest.mark.parametrize("verb", ["stage", "export"])
def test_ctrl_c_before_or_after_the_training_does_not_say_that_it_ended_it(
    script: Script, tmp_path: Path, verb: str
) -> None:
    class Begins(Silent):
        def begin(self, begun: str) -> None:
            if begun == verb:
                interrupt()

    run = fields(tmp_path, script(SAVES))
    with pytest.raises(CancelledError, match=r"^interrupted\. See its report"):
        train(run, run_id="x", listener=Begins())
    assert report(tmp_path).attempts == (1 if verb == "export" else 0)


def test_ctrl_c_between_two_steps_says_what_stays(
    script: Script, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Iterator[Callable[[], object]] = iter([interrupt, lambda: False])
    monkeypatch.setattr("manycpu.pipeline.verbs.all_verbs._may_still_train", lambda _: next(answers)())
    with pytest.raises(CancelledError) as caught:
        train(fields(tmp_path, script(FAILS)), run_id="x")
    (ctx,) = on_this_machine(home)
    assert f"all it has in {ctx.where} stays" in str(caught.value)
    assert f"`manycpu clean {ctx.name} --delete-model` removes it" in str(caught.value)


def test_ctrl_c_while_the_end_of_a_run_is_shown_says_that_it_is_over(
    script: Script, tmp_path: Path, home: Path
) -> None:
    class Shows(Silent):
        def report(self, written: Report, path: str) -> None:  # noqa: ARG002
            interrupt()

    with pytest.raises(CancelledError, match="See its report"):
        train(fields(tmp_path, script("pass\n")), run_id="x", listener=Shows())
    assert list((home / "runs").iterdir()) == []


def test_never_is_a_word_for_what_failed_by_itself(script: Script, tmp_path: Path, home: Path) -> None:
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, script(FAILS), keep="never"), run_id="x")
    assert list((home / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "its supervisor is gone"),
        (signal.SIGTERM, "its supervisor got SIGTERM without a cancellation"),
    ],
)
def test_what_a_lost_training_wrote_stays_for_ever_whatever_keep_says(
    script: Script,
    tmp_path: Path,
    home: Path,
    manycpu: Callable[..., tuple[int, str]],
    number: signal.Signals,
    message: str,
) -> None:
    given = fields(tmp_path, script(WAITS), keep="never")
    with pytest.raises(TrainingFailedError, match=message):
        train(given, run_id="x", listener=Acts(lambda: kill_supervisor(home, number)))
    (ctx,) = on_this_machine(home)
    assert ctx.ledger.lease().until is None
    assert "Nothing shows why the training ended" in (report(tmp_path).advice or "")
    for words in ([], [ctx.name]):
        assert "left alone" in manycpu("clean", *words, "--yes")[1]
    prepare(
        open_context(fields(tmp_path, given["program"], output=str(tmp_path / "b")), None, "b", base=tmp_path)
    )
    assert (Path(ctx.where) / "checkpoints" / "checkpoint-1").exists()
    assert manycpu("clean", ctx.name, "--delete-model", "--yes")[0] == 0
    assert not Path(ctx.where).exists()


@pytest.mark.parametrize("then", ["clean", "another output"])
def test_what_a_broken_export_left_beside_the_output_is_deleted_with_the_run(
    script: Script,
    tmp_path: Path,
    home: Path,
    manycpu: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    then: str,
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    writes = 'import os; open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("done")'
    given = fields(tmp_path / "first", script(writes))
    (tmp_path / "first").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Holding, "check_others", refuse)
        with pytest.raises(ExportError, match="No space left on device"):
            train(given, run_id="x")
    assert list((tmp_path / "first").glob(".out.*.partial")) != []  # the same run would resume it
    (ctx,) = on_this_machine(home)
    if then == "clean":
        assert manycpu("clean", ctx.name, "--delete-model", "--yes")[0] == 0
    else:
        assert train(given | {"output": str(tmp_path / "out")}, run_id="x").attempts == 1
    assert not Path(ctx.where).exists()
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["out"]


def test_a_half_removed_run_that_cannot_be_deleted_does_not_stop_the_removal_of_others(
    home: Path, tmp_path: Path, script: Callable[..., str]
) -> None:
    runs, elsewhere = home / "runs", tmp_path / "elsewhere"
    (runs / ".b.removed" / "part").mkdir(parents=True)
    elsewhere.mkdir()
    (runs / ".a.removed").symlink_to(elsewhere)  # a folder that was moved, and linked
    ctx = open_context({"program": script(), "output": str(tmp_path / "out")}, None, "c", base=tmp_path)
    assert len([finding for finding in prepare(ctx) if "run a is not wholly removed" in finding.message]) == 1
    assert [path.name for path in runs.glob(".*.removed")] == [".a.removed"]
    assert elsewhere.exists()
    cleanup(ctx)


def test_the_next_run_in_the_folder_removes_what_was_kept_when_its_time_is_over(
    script: Script, tmp_path: Path, home: Path, manycpu: Callable[..., tuple[int, str]]
) -> None:
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, script(FAILS)), run_id="x")
    (kept,) = on_this_machine(home)
    other = open_context(fields(tmp_path, script(), output=str(tmp_path / "b")), None, "b", base=tmp_path)
    prepare(other)
    assert "its output and checkpoints are kept" in manycpu("clean", kept.name, "--yes")[1]
    assert kept.ledger.exists()
    kept.ledger.change_lease(until=time.time() - 1)
    assert prepare(other) == []
    assert not Path(kept.where).exists()
    cleanup(other)
    assert list((home / "runs").iterdir()) == []


def test_a_run_that_is_removed_when_its_time_is_over_leaves_no_claim(script: Script, tmp_path: Path) -> None:
    never_launched = open_context(fields(tmp_path, script()), None, "x", base=tmp_path)
    prepare(never_launched)
    assert list(tmp_path.glob(".out.*.claim"))
    never_launched.ledger.change_lease(until=time.time() - 1)
    prepare(open_context(fields(tmp_path, script(), output=None), None, "b", base=tmp_path))
    assert not list(tmp_path.glob(".out.*.claim"))


def test_the_end_of_a_run_releases_the_outputs_that_it_had_before(script: Script, tmp_path: Path) -> None:
    for output in ("first", "second"):
        ctx = open_context(
            fields(tmp_path, script(), output=str(tmp_path / output)), None, "x", base=tmp_path
        )
        prepare(ctx)
    assert len(list(tmp_path.glob(".*.claim"))) == 2
    cleanup(ctx)
    assert not list(tmp_path.glob(".*.claim"))


def test_a_refused_second_process_of_a_run_leaves_the_claim_to_the_first(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed at once: with it as holder, another run would take the output."""
    ctx = open_context(fields(tmp_path, script()), None, "x", base=tmp_path)
    first = process.handle_of_this_process(Path(), ctx.name, 0)
    prepare(ctx, first)
    claimed: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(verb, "claim", lambda _, holder: claimed.append(holder))
        patched.setattr(Lease, "held_by_another", lambda *_: True)
        with pytest.raises(ForeignRunError):
            prepare(ctx, first.model_copy(update={"pid": 1}))
    assert claimed == [first]
    cleanup(ctx)


def test_a_run_that_is_resumed_while_another_finds_that_its_time_is_over_keeps_its_lease(
    script: Script, tmp_path: Path
) -> None:
    ctx = open_context(fields(tmp_path, script()), None, "x", base=tmp_path)
    prepare(ctx)
    with ctx.ledger.update() as entry:  # a trained model that was not exported is kept
        entry.attempt, entry.verbs["wait"] = 1, VerbRecord(seconds=1, result="done")
    resumed = ctx.ledger.lease()
    assert not may_delete_expired(ctx)
    assert ctx.ledger.lease() == resumed
    cleanup(ctx, delete_model=True)


def test_a_run_id_that_a_lost_terminal_showed_is_known_to_status(
    script: Script, tmp_path: Path, home: Path, manycpu: Callable[..., tuple[int, str]]
) -> None:
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, script(FAILS)), run_id="known-only-here")
    (ctx,) = on_this_machine(home)
    assert "known-only-here" in manycpu("status", ctx.name)[1]
    assert "The same run (--run-id known-only-here) continues" in (report(tmp_path).advice or "")
    words = ("--program", script(), "--output", str(tmp_path / "out"), "--run-id", ctx.name)
    code, printed = manycpu("run", *words)
    assert (code, "Give --run-id known-only-here" in printed) == (2, True), printed


def test_a_run_of_which_all_is_kept_stays_until_its_time_is_over(
    script: Script, tmp_path: Path, home: Path, manycpu: Callable[..., tuple[int, str]]
) -> None:
    kept = train(fields(tmp_path, script(), keep="always"), run_id="x")
    (ctx,) = on_this_machine(home)
    assert "All of the run is kept until 2" in (kept.advice or "")
    for words in ([], [ctx.name]):
        assert "left alone: all of it is kept, as run.keep says" in manycpu("clean", *words, "--yes")[1]
    assert (Path(ctx.where) / "checkpoints").exists()
    assert manycpu("clean", ctx.name, "--delete-model", "--yes")[0] == 0
    assert not Path(ctx.where).exists()


def test_whoever_reads_the_log_of_a_kept_run_does_not_shorten_its_time(
    script: Script, tmp_path: Path, home: Path, manycpu: Callable[..., tuple[int, str]]
) -> None:
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, script(FAILS), keep="always", keep_for=30 * 86_400), run_id="x")
    (kept,) = on_this_machine(home)
    before = kept.ledger.lease()
    code, printed = manycpu("logs", "--follow", kept.name)
    assert (code, "] saved" in printed) == (0, True), printed
    assert kept.ledger.lease() == before


def test_a_report_that_names_another_folder_has_nothing_of_it_deleted(
    script: Script, tmp_path: Path, home: Path
) -> None:
    given = fields(tmp_path, script())
    train(given, run_id="x")
    (home / "runs" / "train-0123456789").mkdir()
    (tmp_path / "own").mkdir()
    for name in ("train-0123456789", "../../own"):
        written = report(tmp_path)
        written.name = name
        written.verbs.pop("cleanup", None)
        (tmp_path / "out" / "report.json").write_text(written.model_dump_json())
        train(given, run_id="x")
    assert (home / "runs" / "train-0123456789").exists()
    assert (tmp_path / "own").exists()


def test_what_a_killed_process_had_begun_to_delete_is_deleted_by_the_next_run(
    script: Script, tmp_path: Path, home: Path
) -> None:
    left = home / "runs" / ".train-0123456789.removed"
    left.mkdir(parents=True)
    (left / "lease.json").write_text("{}")
    train(fields(tmp_path, script()), run_id="x")
    assert list((home / "runs").iterdir()) == []
