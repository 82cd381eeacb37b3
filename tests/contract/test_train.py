"""Whole runs on this machine, from Python: what ends well, and what ends badly and says why."""

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support import ccl_requirements
from support.event_collector import EventCollector
from support.local_runs import on_this_machine
from support.waiting import processes_of, until

from manycpu.pipeline import train
from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.listeners import Silent, tell
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import (
    CancelledError,
    ExportError,
    Finding,
    ManycpuError,
    StageError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.event_types import Event, readable
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext, home
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs import cancel as cancel_module
from manycpu.pipeline.verbs import prepare as verb
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cancel import cancel, cancel_or_prevent
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.export import export
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.stage import stage
from manycpu.pipeline.verbs.wait import conclude, wait, watch

pytestmark = pytest.mark.usefixtures("home", "no_process_left")
light = pytest.mark.usefixtures("light_torch")
Script = Callable[..., str]

WRITES = "import os; open(os.environ['MANYCPU_OUTPUT'] + '/model.txt', 'w').write('the model')\n"
UNMOUNTS = """
import os, subprocess, sys
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("the model")
subprocess.run(["umount", sys.argv[1]], check=True)
"""
WAITS = """
import os, time
print("waiting", flush=True)
gate = os.environ["GATE"]
while not os.path.exists(gate):
    time.sleep(0.05)
open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model.txt"), "a").write("done")
"""


class Lines(Silent):
    """Keeps what the ranks report, as people read it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, event: Event, line: RankLine) -> None:
        self.texts.append(readable(line, event))


def fields(tmp_path: Path, program: str, **more: Any) -> dict[str, Any]:
    return {"program": program, "output": str(tmp_path / "out"), "nproc_per_node": 1, **more}


def report(tmp_path: Path) -> Report:
    return Report.model_validate_json((tmp_path / "out" / "report.json").read_text())


@light
def test_a_run_delivers_its_model_with_a_report(script: Script, tmp_path: Path, home: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("some data")
    given = fields(tmp_path, script(), data=str(tmp_path / "data"), nproc_per_node=2)
    found = train(given, run_id="a")
    assert (tmp_path / "out" / "model.txt").read_text() == "sum 2"
    assert found == report(tmp_path)
    assert (found.state, found.world_size, len(found.hosts)) == ("succeeded", 2, 1)
    verbs = ["prepare", "stage", "build", "launch", "wait", "export", "cleanup"]
    assert list(found.verbs) == verbs
    assert found.left_behind == []
    assert list((home / "runs").glob("*")) == []
    assert {Path(path).parent.name for path in found.kept} == {"data", "code"}


def test_a_backend_that_is_left_out_is_the_best_there_is(script: Script, tmp_path: Path) -> None:
    reason = "run.backend is left out, and {}"
    if missing := ccl_requirements.missing():
        known = ("gloo", reason.format(f"rank 0 on {socket.gethostname()} has no ccl: {missing}"))
    else:
        known = ("ccl", reason.format("every rank has ccl"))
    listener = Lines()
    found = train(fields(tmp_path, script()), listener=listener)
    assert (found.backend, found.backend_reason) == known
    assert any(f"backend {known[0]}," in text and known[1] in text for text in listener.texts)


@light
def test_where_there_is_no_ccl_a_backend_that_is_left_out_is_gloo(script: Script, tmp_path: Path) -> None:
    """As with the stand-in for torch; test_ccl_launchers.py has ranks that can neither find nor build it."""
    listener = Lines()
    found = train(fields(tmp_path, script()), listener=listener)
    assert (found.state, found.backend) == ("succeeded", "gloo")
    said = f"run.backend is left out, and rank 0 on {socket.gethostname()} has no ccl: "
    assert found.backend_reason is not None
    assert found.backend_reason.startswith(said)
    assert any("backend gloo," in text and said in text for text in listener.texts)
    assert not any("waits for the backend ccl" in text for text in listener.texts)


REPORTS = """
import os, time
from manycpu.pipeline.node.metrics import metrics, progress
progress(step=1, total_steps=2, loss=0.5)
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.05)
progress(step=2, total_steps=2, loss=0.25, learning_rate=1e-5)
metrics({"f1": 90.0}, step=2)
print("trained", flush=True)
open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model.txt"), "a").write("done")
"""


@light
def test_a_listener_hears_each_event_once_also_where_a_watch_goes_on_from_another(
    script: Script, tmp_path: Path
) -> None:
    ctx, built = begin(tmp_path, script(REPORTS), nproc_per_node=1)
    handle, _ = launch(ctx, *built)
    whole, parts = EventCollector(), EventCollector()
    first = watch(ctx, handle)

    def has_begun() -> bool:
        tell(first.look()[0], parts)
        return "progress 1" in parts.kinds

    until(has_begun)
    (tmp_path / "gate").touch()
    assert wait(ctx, handle, whole).state == "succeeded"
    second = watch(ctx, handle, first.cursor)
    tell(second.look()[0], parts)
    assert [kind for kind in whole.kinds if kind != "start"] == [
        "proof",
        "progress 1",
        "progress 2",
        "metrics 2",
        "exit",
    ]
    assert (parts.events, parts.lines) == (whole.events, whole.lines)
    assert whole.lines == ["trained"]
    times = [event.time or 0 for _, event in whole.events if event.event != "exit"]
    assert 0 < min(times) <= max(times)
    assert times == sorted(times)
    conclude(ctx, handle, attempt_status(ctx, handle, ctx.ledger.read()))
    export(ctx, handle)
    written = cleanup(ctx)
    assert written is not None
    assert written.metrics == {"loss": 0.25, "learning_rate": 1e-5, "f1": 90.0}


@light
def test_what_was_staged_and_built_is_used_again(script: Script, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("some data")
    see = "import os; assert open(os.environ['MANYCPU_DATA']).read() == 'some data'\n"
    program = script(see + WRITES)
    for run_id in ("a", "b"):
        given = fields(tmp_path, program, data=str(tmp_path / "data.txt"), output=str(tmp_path / run_id))
        found = train(given, run_id=run_id)
    assert (found.verbs["stage"].result, found.verbs["build"].result) == ("reused", "reused")


@light
def test_a_run_that_has_succeeded_says_that_it_trains_again(script: Script, tmp_path: Path) -> None:
    class Warned(Silent):
        def __init__(self) -> None:
            self.findings: list[str] = []

        def finding(self, finding: Finding) -> None:
            self.findings.append(finding.message)

    given = fields(tmp_path, script(WRITES))
    first, second = Warned(), Warned()
    train(given, run_id="same", listener=first)
    train(given, run_id="same", listener=second)
    assert not any("trains again" in message for message in first.findings)
    assert any("trains again" in message for message in second.findings)


STEPS = """
import os, sys
from pathlib import Path
rate, fails = sys.argv[1:]
state = Path(os.environ["MANYCPU_CHECKPOINTS"], "state")
steps = state.read_text().split() if state.exists() else []
while len(steps) < 3:
    steps.append(rate)
    state.write_text(" ".join(steps))
    if fails == "fails":
        sys.exit(3)
Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text(" ".join(steps))
"""


@light
def test_a_run_that_is_typed_again_after_a_success_knows_that_before_it_begins(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = fields(tmp_path, script(STEPS), checkpoints=str(tmp_path / "checkpoints"))
    first = train(given | {"args": ["0.1", "ends"]}, run_id="same")
    ctx = open_context(given, None, "cli", "same", base=tmp_path)

    def interrupt(_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(verb, "read_report", interrupt)  # it may take long
        with pytest.raises(KeyboardInterrupt):
            verb.prepare(ctx)
    assert not ctx.ledger.exists()
    verb.prepare(ctx)
    cleaned = cleanup(ctx)  # a report without a success replaces the first one
    assert cleaned is not None
    assert cleaned.checkpoints_since is not None
    assert first.checkpoints_since is None
    train(given | {"args": ["0.2", "ends"]}, run_id="same")
    assert (tmp_path / "out" / "model.txt").read_text() == "0.2 0.2 0.2"


@light
def test_a_run_whose_ledger_is_removed_while_it_is_taken_up_knows_of_its_success(
    script: Script, tmp_path: Path
) -> None:
    given = fields(tmp_path, script(STEPS), checkpoints=str(tmp_path / "checkpoints"))
    train(given | {"args": ["0.1", "ends"]}, run_id="same")
    ctx = open_context(given, None, "cli", "same", base=tmp_path)
    verb._take_up(ctx, None)  # noqa: SLF001 - the ledger was there a moment ago
    assert ctx.ledger.read().checkpoints_since is not None
    cleanup(ctx)


@light
def test_a_run_that_trains_again_after_a_success_has_a_new_folder_of_checkpoints(
    script: Script, tmp_path: Path
) -> None:
    """A training that failed has its steps continued, also if nothing but its checkpoints is kept."""
    folder, out = tmp_path / "checkpoints", tmp_path / "out"
    given = fields(tmp_path, script(STEPS), checkpoints=str(folder), keep="never")

    def trained(*args: str) -> str:
        train(given | {"args": args}, run_id="same")
        return (out / "model.txt").read_text()

    def fail(*args: str) -> None:
        with pytest.raises(TrainingFailedError):
            trained(*args)

    fail("0.1", "fails")
    assert trained("0.2", "") == "0.1 0.2 0.2"
    fail("0.3", "fails")
    assert trained("0.4", "") == "0.3 0.4 0.4"
    states = [state.read_text() for state in sorted(folder.glob("*/state"))]
    assert states == ["0.1 0.2 0.2", "0.3 0.4 0.4"]


@light
def test_a_script_that_fails_is_reported_with_its_rank_and_last_lines(script: Script, tmp_path: Path) -> None:
    text = """
import os, sys, time, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == 1:
    print("the data is bad")
    sys.exit(3)
time.sleep(600)
"""
    with pytest.raises(TrainingFailedError) as caught:
        train(fields(tmp_path, script(text), nproc_per_node=2))
    assert "rank 1 on " in str(caught.value)
    assert "exit code 3" in str(caught.value)
    assert "the data is bad" in str(caught.value)
    written = report(tmp_path)
    assert (written.state, written.verbs["wait"].result) == ("failed", "failed")
    assert "the data is bad" in (written.error or "")
    assert written.left_behind == []


@light
@pytest.mark.parametrize(
    "said", ["Found no NVIDIA driver on your system.", "Torch not compiled with CUDA enabled"]
)
def test_a_program_that_asks_for_a_gpu_is_told_that_there_is_none(
    script: Script, tmp_path: Path, said: str
) -> None:
    with pytest.raises(TrainingFailedError, match=r"Ranks have no GPU: .* torch\.device\('cpu'\)"):
        train(fields(tmp_path, script(f"raise RuntimeError({said!r})\n")))


@light
@pytest.mark.parametrize("end", ["os._exit(0)", "os.execv(sys.executable, [sys.executable, '-c', ''])"])
def test_ranks_that_never_met_are_no_success_however_they_end(
    end: str, script: Script, tmp_path: Path
) -> None:
    """Nothing in the rank can notice: it is over at once, or is another program."""
    text = f"import os, sys\nopen(os.environ['MANYCPU_OUTPUT'] + '/model', 'w').write('x')\n{end}"
    with pytest.raises(TrainingFailedError, match=r"ever initialised .* \(os\.exec\)\. Make that one"):
        train(fields(tmp_path, script(text), nproc_per_node=2))
    assert report(tmp_path).state == "failed"


@light
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("pass", marks=pytest.mark.long),
        "import os; os.rmdir(os.environ['MANYCPU_OUTPUT'])",
    ],
)
def test_a_program_that_leaves_nothing_has_no_model_to_export_and_trains_again_once_it_was_mended(
    script: Script, tmp_path: Path, text: str
) -> None:
    with pytest.raises(ExportError, match=r"^run\.output: .*wrote nothing"):
        train(fields(tmp_path, script(text)), run_id="x")
    mended = "import os; open(os.environ['MANYCPU_OUTPUT'] + '/model.pt', 'w').write('the model')"
    assert train(fields(tmp_path, script(mended)), run_id="x").state == "succeeded"


@light
def test_a_program_that_wrote_elsewhere_is_told_where_and_trains_again_once_it_was_mended(
    script: Script, tmp_path: Path, home: Path
) -> None:
    save = "import os; open({} + 'model.pt', 'w').write('the model')"
    given = fields(tmp_path, script(save.format("''")))
    with pytest.raises(ExportError, match=r"nothing to its output; it wrote \S+/code/model\.pt instead"):
        train(given, run_id="x")
    advice = report(tmp_path).advice or ""
    assert "Files that the program wrote outside of its output are kept" in advice
    assert "trains again; " in advice
    given = fields(tmp_path, script(save.format("os.environ['MANYCPU_OUTPUT'] + '/'")))
    assert train(given, run_id="x").state == "succeeded"
    assert list((home / "runs").iterdir()) == []
    assert (tmp_path / "out" / "model.pt").read_text() == "the model"


@light
def test_an_attempt_that_wrote_nothing_is_not_attached_to(script: Script, tmp_path: Path) -> None:
    given = fields(tmp_path, script("pass"), keep="on_failure")
    for attempt in (1, 2):
        with pytest.raises(ExportError, match="wrote nothing"):
            train(given, run_id="x")
        assert report(tmp_path).attempts == attempt


def begin(tmp_path: Path, program: str, **more: Any) -> tuple[RunContext, Any]:
    given = fields(tmp_path, program, env={"GATE": str(tmp_path / "gate")}, **more)
    ctx = open_context(given, None, "test", base=tmp_path)
    prepare(ctx)
    return ctx, (stage(ctx), build(ctx))


@light
def test_whoever_comes_again_attaches_to_what_runs(script: Script, tmp_path: Path) -> None:
    ctx, built = begin(tmp_path, script(WAITS))
    first, attached = launch(ctx, *built)
    again, attached_again = launch(ctx, *built)
    assert (attached, attached_again) == (False, True)
    assert again == first
    (tmp_path / "gate").touch()
    assert wait(ctx, again).state == "succeeded"
    assert launch(ctx, *built) == (first, True)
    cleanup(ctx)


def edited(ctx: RunContext, **fields: Any) -> RunContext:
    """Open the same run again, with other fields."""
    run = ctx.run.model_dump(exclude_unset=True) | fields
    return open_context(run, ctx.target, "test", base=ctx.base)


@light
def test_an_attempt_is_judged_by_the_description_that_it_was_started_with(
    script: Script, tmp_path: Path
) -> None:
    ctx, _ = begin(tmp_path, script(WAITS), args=["first"])
    first, _ = launch(ctx, stage(ctx), began := build(ctx))
    Path(ctx.run.program).write_text(WAITS + "# another program")
    again = edited(ctx, nproc_per_node=2, args=["second"], backend="mpi", output=str(tmp_path / "new"))
    (tmp_path / "gate").touch()
    assert launch(again, stage(again), build(again)) == (first, True)
    seen = wait(again, first)
    conclude(again, first, seen)
    assert seen.state == "succeeded"
    export(again, first)
    cleanup(again)
    written = Report.model_validate_json((tmp_path / "new" / "report.json").read_text())
    assert (written.state, written.run["args"], written.image) == ("succeeded", ["first"], began.digest)
    assert (tmp_path / "new" / "model.txt").exists()


@light
def test_the_next_attempt_uses_edited_fields_everywhere(script: Script, tmp_path: Path) -> None:
    ctx, built = begin(tmp_path, script("import sys; sys.exit(3)"))
    first, _ = launch(ctx, *built)
    assert wait(ctx, first).state == "failed"
    program = script(
        "import os, sys, torch.distributed as dist\ndist.init_process_group()\n"
        "open(os.environ['MANYCPU_OUTPUT'] + '/model.txt', 'w').write(sys.argv[1])\n"
    )
    again = edited(ctx, program=program, args=["edited"], nproc_per_node=2, run_timeout=77)
    second, attached = launch(again, stage(again), built_again := build(again))
    assert (second.attempt, attached) == (2, False)
    (known,) = on_this_machine(home())  # as a trigger and `manycpu status` find it
    assert (known.run.args, known.run.nproc_per_node, known.run.run_timeout) == (("edited",), 2, 77)
    seen = wait(known, second)
    conclude(again, second, seen)
    export(again, second)
    found = cleanup(again)
    assert found is not None
    assert (found.state, found.run["args"], found.image) == ("succeeded", ["edited"], built_again.digest)
    assert found.world_size == 2
    assert (tmp_path / "out" / "model.txt").read_text() == "edited"


@light
def test_a_starter_that_was_killed_before_it_noted_the_handle_is_no_second_start(
    script: Script, tmp_path: Path
) -> None:
    ctx, built = begin(tmp_path, script(WAITS))
    first, _ = launch(ctx, *built)
    with ctx.ledger.update() as entry:
        entry.handle = None
    assert launch(ctx, *built) == (first, True)
    cleanup(ctx)


@light
def test_a_failed_attempt_is_followed_by_another(script: Script, tmp_path: Path) -> None:
    text = "import os, sys; sys.exit(int(os.environ['MANYCPU_ATTEMPT']) < 2)"
    ctx, built = begin(tmp_path, script(text))
    first, _ = launch(ctx, *built)
    assert wait(ctx, first).state == "failed"
    second, attached = launch(ctx, *built)
    assert (second.attempt, attached) == (2, False)
    assert wait(ctx, second).state == "succeeded"
    cleanup(ctx)


@light
def test_the_next_attempt_trains_alone_though_a_rank_outlived_its_supervisor(
    script: Script, tmp_path: Path
) -> None:
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    ctx, built = begin(tmp_path, script(f"{text}\nwhile True: time.sleep(0.1)"))
    first, _ = launch(ctx, *built)
    assert isinstance(first, ProcessHandle)
    until(lambda: "deaf" in Path(first.directory, process.LOG).read_text())
    os.kill(first.pid, signal.SIGKILL)
    assert wait(ctx, first).state == "failed"
    second, attached = launch(ctx, *built)
    assert (second.attempt, attached) == (2, False)
    assert list(processes_of(Path(first.directory))) == []
    cleanup(ctx)


@light
def test_a_cancelled_attempt_is_recorded_and_followed_by_another(script: Script, tmp_path: Path) -> None:
    ctx, built = begin(tmp_path, script(WAITS))
    first, _ = launch(ctx, *built)
    assert cancel(ctx, by="a person", attempt=2) is False
    assert cancel(ctx, by="a person") is True
    assert cancel(ctx, by="another") is False
    seen = wait(ctx, first)
    assert (seen.state, seen.reason) == ("cancelled", "ended by a person")
    assert ctx.ledger.read().cancelled == {1: "a person"}
    second, attached = launch(ctx, *built)
    assert (second.attempt, attached) == (2, False)
    cleanup(ctx)


@light
def test_a_run_that_is_cancelled_before_its_next_attempt_is_a_cancelled_one(
    script: Script, tmp_path: Path
) -> None:
    ctx, built = begin(tmp_path, script("raise SystemExit(1)"))
    first, _ = launch(ctx, *built)
    assert wait(ctx, first).state == "failed"
    assert "nothing more of it will be launched" in cancel_or_prevent(ctx, "a person")
    with pytest.raises(CancelledError):
        launch(ctx, *built)
    cleaned = cleanup(ctx)
    assert cleaned is not None
    assert (cleaned.state, cleaned.error) == (
        "cancelled",
        "ended by a person, before anything was launched.",
    )


@light
def test_a_training_that_is_launched_while_a_person_cancels_its_run_is_ended(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, built = begin(tmp_path, script(WAITS))

    def launches_then(*given: Any) -> bool:
        monkeypatch.setattr(cancel_module, "cancel", cancel)
        assert not cancel(*given)
        return not launch(ctx, *built)

    monkeypatch.setattr(cancel_module, "cancel", launches_then)
    assert cancel_or_prevent(ctx, "a person") == "ended"
    assert ctx.ledger.read().cancelled == {1: "a person"}
    cleanup(ctx)


@light
def test_cleanup_ends_what_still_runs_and_says_so(script: Script, tmp_path: Path) -> None:
    ctx, built = begin(tmp_path, script(WAITS))
    launch(ctx, *built)
    cleaned = cleanup(ctx)
    assert cleaned is not None
    assert (cleaned.state, cleaned.error, cleaned.left_behind) == ("cancelled", "ended by cleanup", [])
    assert not Path(ctx.where).exists()
    assert cleanup(ctx) is None


@light
def test_a_cleanup_of_an_earlier_attempt_deletes_nothing_of_a_later_one(
    script: Script, tmp_path: Path
) -> None:
    """Such as that of a triggerer, which takes a minute, while a person clears the task."""
    ctx, built = begin(tmp_path, script(WAITS))
    launch(ctx, *built)
    launched = list[Any]()

    def clear_the_task(_: object) -> None:
        if not launched:
            launched.append(launch(ctx, *built)[0])

    assert cleanup(ctx, attempt=1, tell=clear_the_task) is None
    assert cleanup(ctx, attempt=1) is None
    assert launched[0].attempt == 2
    (tmp_path / "gate").touch()
    assert wait(ctx, launched[0]).state == "succeeded"
    cleanup(ctx, delete_model=True)
    assert not Path(ctx.where).exists()


@light
@pytest.mark.parametrize(("keep", "kept"), [("never", False), ("on_failure", True), ("always", True)])
def test_a_failed_run_is_kept_where_it_was_asked_for(
    script: Script, tmp_path: Path, keep: str, *, kept: bool
) -> None:
    ctx, _ = begin(tmp_path, script(WRITES), keep=keep)
    cleaned = cleanup(ctx)
    assert cleaned is not None
    assert Path(ctx.where).exists() is kept
    assert (ctx.where in cleaned.kept) is kept
    cleanup(ctx, keep=False)
    assert not Path(ctx.where).exists()


@light
def test_a_model_stays_where_the_output_it_was_for_is_null_since(script: Script, tmp_path: Path) -> None:
    text = "import sys; open(sys.argv[1] + '/model', 'w').write('x')"
    ctx, built = begin(tmp_path, script(text), args=["{output}"])
    handle, _ = launch(ctx, *built)
    conclude(ctx, handle, wait(ctx, handle))
    now = replace(ctx, run=ctx.run.model_copy(update={"output": None}))
    assert export(now, handle).path is None
    cleaned = cleanup(now)
    assert cleaned is not None
    assert ctx.where in cleaned.kept
    assert export(ctx, handle).files == 1
    cleanup(ctx)
    assert not Path(ctx.where).exists()


@light
def test_the_ranks_find_the_run_in_their_environment_and_arguments(script: Script, tmp_path: Path) -> None:
    text = """
import json, os, sys
known = {name: value for name, value in os.environ.items() if name.startswith(("MANYCPU_", "AIRFLOW", "HF_"))}
with open(os.environ["MANYCPU_OUTPUT"] + "/seen.json", "w") as file:
    json.dump({"args": sys.argv[1:], "env": known, "user": os.environ["MINE"], "cwd": os.getcwd()}, file)
"""
    (tmp_path / "d.txt").write_text("x")
    os.environ["AIRFLOW__CORE__FERNET_KEY"] = "secret"
    try:
        train(
            fields(
                tmp_path,
                script(text),
                data=str(tmp_path / "d.txt"),
                args=["--data", "{data}", "--out={output}/x", "{not} {{touched}}"],
                env={"MINE": "1"},
                backend="gloo",
                dtype="bf16",
            )
        )
    finally:
        del os.environ["AIRFLOW__CORE__FERNET_KEY"]
    seen = json.loads((tmp_path / "out" / "seen.json").read_text())
    env = seen["env"]
    assert seen["args"] == [
        "--data",
        env["MANYCPU_DATA"],
        f"--out={env['MANYCPU_OUTPUT']}/x",
        "{not} {{touched}}",
    ]
    assert (env["MANYCPU_DTYPE"], env["MANYCPU_NNODES"], env["MANYCPU_BACKEND"]) == ("bf16", "1", "gloo")
    assert env["MANYCPU_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert seen["cwd"].endswith("/attempts/1/work/code")
    assert not [name for name in env if name.startswith("AIRFLOW")]


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted: needs root")
def test_a_full_disk_is_named_and_the_next_try_goes_on(script: Script, tmp_path: Path) -> None:
    from manycpu.pipeline.adapters import commands

    small = tmp_path / "small"
    small.mkdir()
    (tmp_path / "data.bin").write_bytes(os.urandom(1 << 20))
    mounted = commands.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], timeout=300)
    assert mounted.code == 0, mounted.out
    try:
        given = fields(tmp_path, script(), data=str(tmp_path / "data.bin"))
        ctx = open_context(given, {"directory": str(small / "home")}, "test", base=tmp_path)
        prepare(ctx)
        (small / "filler").write_bytes(b"x" * (1_200_000))
        with pytest.raises(StageError, match=r"^run\.data: .* bytes are needed, .*target\.directory"):
            stage(ctx)
        (small / "filler").unlink()
        assert stage(ctx).data is not None
        cleanup(ctx)
    finally:
        commands.run(["umount", str(small)], timeout=300)


@light
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted: needs root")
def test_a_model_is_not_written_below_the_place_where_its_disk_was_mounted(
    script: Script, tmp_path: Path, home: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(disk)]
    given = fields(tmp_path, script(UNMOUNTS), output=str(disk / "out"), args=[str(disk)])
    subprocess.run(mount, check=True)
    try:
        with pytest.raises(ExportError, match=f"nothing is mounted at {disk} any more"):
            train(given, run_id="x")
        assert not (disk / "out" / "model.txt").exists()
        subprocess.run(mount, check=True)
        assert train(given, run_id="x").attempts == 1
        assert (disk / "out" / "model.txt").read_text() == "the model"
    finally:
        subprocess.run(["umount", str(disk)], check=False)
    assert list((home / "runs").iterdir()) == []


@light
def test_an_interrupted_run_leaves_nothing(script: Script, tmp_path: Path, home: Path) -> None:
    class Interrupts(Silent):
        def line(self, line: Any) -> None:
            if line.text == "waiting":
                raise KeyboardInterrupt

    given = fields(tmp_path, script(WAITS), env={"GATE": str(tmp_path / "gate")})
    with pytest.raises(CancelledError):
        train(given, listener=Interrupts())
    assert report(tmp_path).state == "cancelled"
    assert list((home / "runs").glob("*")) == []
    until(lambda: not list(processes_of(tmp_path)))


def test_a_ledger_is_gone_with_its_run(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path / "runs" / "x")
    ledger.remove()
    assert not ledger.exists()


@light
def test_a_model_that_could_not_be_exported_is_kept_and_goes_out_with_the_next_try(
    script: Script, tmp_path: Path, home: Path
) -> None:
    out = tmp_path / "out"
    in_the_way = f"open({str(out)!r}, 'w').write('since preflight')\n"
    given = fields(tmp_path, script(WRITES + in_the_way))
    with pytest.raises(ExportError, match=r"^run\.output: "):
        train(given, run_id="x")
    (kept,) = (home / "runs").glob("train-*")
    assert (kept / "attempts" / "1" / "output" / "model.txt").read_text() == "the model"
    out.unlink()
    found = train(given, run_id="x")
    assert (found.state, found.attempts, found.verbs["launch"].result) == ("succeeded", 1, "reused")
    assert (out / "model.txt").read_text() == "the model"
    assert not kept.exists()


def test_a_source_that_cannot_be_reached_any_more_is_named(
    script: Script, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else the Hub is tried for 23 s
    monkeypatch.setattr("manycpu.pipeline.adapters.storage.Location.fault", lambda *_: None)  # of preflight
    given = fields(tmp_path, script(), data="hf://datasets/nobody/nothing")
    with pytest.raises(StageError, match=r"^run\.data: hf://datasets/nobody/nothing was not staged") as said:
        train(given)
    assert str(said.value).endswith("a private one of the Hub needs HF_TOKEN.")
    assert list((home / "runs").glob("*")) == []
    assert report(tmp_path).verbs["stage"].result == "failed"


SAVES_STRAIGHT = """
import os, sys
os.makedirs(sys.argv[1], exist_ok=True)
open(sys.argv[1] + "/" + sys.argv[2], "w").write("the model")
open(os.environ["MANYCPU_OUTPUT"] + "/metrics.json", "w").write("{}")
"""


@light
@pytest.mark.parametrize("name", ["model.bin", "report.json"])
def test_a_program_that_saves_straight_into_the_output_loses_nothing(
    script: Script, tmp_path: Path, home: Path, name: str
) -> None:
    out = tmp_path / "out"
    given = fields(tmp_path, script(SAVES_STRAIGHT), args=[str(out), name])
    with pytest.raises(ExportError, match=rf"{out} .*{name}") as caught:
        train(given, run_id="x")
    assert (out / name).read_text() == "the model"
    (kept,) = (home / "runs").glob("train-*/attempts/1/output")
    assert name == "report.json" or str(kept) in str(caught.value)
    assert (kept / "metrics.json").exists()
    with pytest.raises(ManycpuError, match=name):
        train(given, run_id="x")
    assert (out / name).read_text() == "the model"
    (out / name).rename(tmp_path / name)
    assert train(given, run_id="x").state == "succeeded"
    assert sorted(path.name for path in out.iterdir()) == [
        *("manifest.json", "metrics.json", "report.html", "report.json", "run.log")
    ]


@light
def test_a_model_that_cleanup_cannot_see_is_kept(script: Script, tmp_path: Path) -> None:
    """As where export ran on a worker with a disk of its own, which went with it."""
    ctx, built = begin(tmp_path, script(WRITES))
    handle, _ = launch(ctx, *built)
    conclude(ctx, handle, wait(ctx, handle))
    export(ctx, handle)
    shutil.rmtree(tmp_path / "out")
    cleaned = cleanup(ctx)
    assert cleaned is not None
    model = Path(ctx.where) / "attempts" / "1" / "output"
    assert cleaned.state == "failed"
    assert f"run.output: the model was exported to {tmp_path / 'out'} and " in (cleaned.error or "")
    assert str(model) in (cleaned.error or "")
    assert (model / "model.txt").read_text() == "the model"
    export(ctx, handle)
    cleaned = cleanup(ctx)
    assert cleaned is not None
    assert cleaned.state == "succeeded"
    assert not model.exists()


@light
def test_a_model_at_the_output_is_not_replaced_by_the_rest_of_the_attempt_that_it_came_from(
    script: Script, tmp_path: Path
) -> None:
    """As where a clean-up was killed while it deleted the attempt, and a person cleared the export."""
    ctx, built = begin(tmp_path, script(WRITES + WRITES.replace("model.txt", "config.json")))
    handle, _ = launch(ctx, *built)
    conclude(ctx, handle, wait(ctx, handle))
    exported = export(ctx, handle)
    (Path(ctx.where) / "attempts" / "1" / "output" / "model.txt").unlink()
    assert export(ctx, handle) == exported
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
    cleaned = cleanup(ctx)
    assert cleaned is not None
    assert cleaned.state == "succeeded"


EVALUATES = """
from manycpu.pipeline.node.emit import say
say("metrics", values={"accuracy": 0.5})
"""


@light
def test_a_program_that_is_to_write_no_model_succeeds_with_its_metrics(script: Script, home: Path) -> None:
    found = train({"program": script(EVALUATES), "output": None, "nproc_per_node": 1}, run_id="x")
    assert (found.state, found.metrics, found.left_behind) == ("succeeded", {"accuracy": 0.5}, [])
    assert found.verbs["export"].result == "skipped"
    assert list((home / "runs").iterdir()) == []
    text = (home / "reports" / found.name / "report.json").read_text()
    assert Report.model_validate_json(text) == found


@light
@pytest.mark.parametrize("place", ["model.pt", "{output}/model.pt"])
def test_what_a_program_writes_without_an_output_is_kept_for_a_time_and_exported_if_one_is_given(
    place: str, script: Script, home: Path, tmp_path: Path
) -> None:
    run = {"program": script("import sys; open(sys.argv[1], 'w').write('x')"), "args": [place]}
    report = train(run | {"output": None, "nproc_per_node": 1}, run_id="x")
    assert report.state == "succeeded"
    assert report.advice is not None
    assert "run.output is null, and what the program wrote is kept until" in report.advice
    (kept,) = (Path(path) for path in report.kept if "/attempts/" in path)
    assert [path.read_text() for path in kept.rglob("model.pt")] == ["x"]
    if place != "model.pt":
        assert train(run | {"output": str(tmp_path / "out"), "nproc_per_node": 1}, run_id="x").attempts == 1
        assert (tmp_path / "out" / "model.pt").read_text() == "x"
        assert list((home / "runs").iterdir()) == []


@light
def test_what_a_program_writes_without_an_output_goes_if_the_run_says_so(script: Script, home: Path) -> None:
    run = {"program": script("open('model.pt', 'w').write('x')"), "output": None, "nproc_per_node": 1}
    assert train(run | {"keep": "never"}).advice is None
    assert list((home / "runs").iterdir()) == []
