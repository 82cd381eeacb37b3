"""The command behind `make demo`, with a run of seconds: what it tells, and that Ctrl-C leaves nothing."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.killable_programs import Program
from support.waiting import processes_of

from manycpu.operators import local_airflow
from manycpu.operators.base import airflow_instance
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.targets import driver_of
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.stage import stage

PERFORM = """
import json, sys
from pathlib import Path
from rich.console import Console
from manycpu.operators import local_airflow
sys.exit(local_airflow.perform(json.loads(sys.argv[2]), Path(sys.argv[1]), Console()))
"""

pytestmark = pytest.mark.usefixtures("no_process_left", "light_torch")


def start(tmp_path: Path, program: str) -> Program[str]:
    conf = {"program": program, "output": str(tmp_path / "out"), "nproc_per_node": 1, "dtype": "fp32"}
    empty = {"args": "", "data": None, "model": None}
    return Program(
        [sys.executable, "-c", PERFORM, str(tmp_path / "airflow"), json.dumps(conf | empty)],
        env={name: value for name, value in os.environ.items() if "AIRFLOW" not in name},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_demo_ends_with_a_table_and_the_reports_path(tmp_path: Path, script: Callable[..., str]) -> None:
    program = script(
        "import os\nfrom manycpu.pipeline.node.metrics import metrics, progress\n"
        "progress(step=1, total_steps=2, loss=0.5)\nmetrics({'exact_match': 93.5})\n"
        "open(os.path.join(os.environ['MANYCPU_OUTPUT'], 'model'), 'w').write('x')\n"
    )
    with start(tmp_path, program) as demo:
        said, _ = demo.communicate()
    assert demo.returncode == 0, said
    lines = said.splitlines()
    assert lines[-1] == f"report: {tmp_path}/out/report.json"
    assert any(" s  train    [rank 0 " in line and "step 1 of 2, loss 0.5" in line for line in lines)
    steps = {line.split()[2] for line in lines if " s  " in line}
    assert steps >= {"prepare", "build", "train", "export", "cleanup"}
    assert any("exact_match" in line and "93.5" in line for line in lines)
    assert not any("airflow.sdk" in line for line in lines)


def test_ctrl_c_ends_the_training_too(new_database: Path, tmp_path: Path, script: Callable[..., str]) -> None:
    program = script("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    (tmp_path / "airflow").mkdir()
    shutil.copy(new_database, tmp_path / "airflow")
    with start(tmp_path, program) as demo:
        assert demo.stdout is not None
        assert any("begun" in line for line in demo.stdout)
        demo.send_signal(signal.SIGINT)
        demo.communicate()
    assert demo.returncode == 130
    assert list(processes_of(tmp_path)) == []
    assert list((tmp_path / "airflow" / "manycpu" / "runs").iterdir()) == []


def test_runs_of_others_in_the_same_folder_are_not_cleaned_up(
    home: Path, tmp_path: Path, script: Callable[..., str]
) -> None:
    for name in ("demo", "other"):
        ctx = open_context({"program": script(), "output": f"{tmp_path}/{name}"}, None, name, base=tmp_path)
        prepare(ctx)
    local_airflow._clean_up_run(f"{tmp_path}/demo")  # noqa: SLF001 - an interrupted demo does
    assert [ctx.run.output for ctx in driver_of("local").runs(Local())] == [f"{tmp_path}/other"]
    assert home.exists()


@pytest.fixture
def launched(
    home: Path,  # noqa: ARG001 - the runs are in it
    tmp_path: Path,
    script: Callable[..., str],
) -> Iterator[Callable[[str, str], RunContext]]:
    """Launch trainings that end by themselves after minutes: their names, and the Airflow they are of."""
    program, begun = script("import time\ntime.sleep(600)"), list[RunContext]()

    def launch_one(name: str, airflow: str) -> RunContext:
        run = {"program": program, "output": f"{tmp_path}/{name}", "nproc_per_node": 1}
        ctx = replace(open_context(run, None, name, base=tmp_path), dag={"instance": airflow})
        prepare(ctx)
        launch(ctx, stage(ctx), build(ctx))
        begun.append(ctx)
        return ctx

    yield launch_one
    for ctx in begun:
        cleanup(ctx, keep=False, delete_model=True)


def test_the_end_of_make_ui_ends_the_trainings_of_this_airflow_alone(
    launched: Callable[[str, str], RunContext], capsys: pytest.CaptureFixture[str]
) -> None:
    unseen, own = (launched(name, airflow_instance()) for name in ("unseen", "own"))
    other = launched("other", "another Airflow in the same $MANYCPU_HOME")
    handle = unseen.ledger.read().handle
    with unseen.ledger.update() as entry:
        entry.handle = entry.handle and entry.handle.model_copy(update={"host": "another-host"})
    try:
        local_airflow._cancel_trainings(Console())  # noqa: SLF001 - Ctrl-C does
    finally:
        with unseen.ledger.update() as entry:
            entry.handle = handle
    cancelled = [ctx.ledger.read().cancelled for ctx in (unseen, own, other)]
    assert cancelled == [{}, {1: "the end of make ui"}, {}]
    assert "another-host" in capsys.readouterr().out


def test_the_end_of_make_ui_ends_every_training_while_the_disk_is_full(
    launched: Callable[[str, str], RunContext],
) -> None:
    runs = [launched(name, airflow_instance()) for name in ("one", "two")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # bytes of a file: no ledger is written
    try:
        local_airflow._cancel_trainings(Console(file=StringIO()))  # noqa: SLF001 - Ctrl-C does
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [status_of(ctx).state.terminal for ctx in runs] == [True, True]


def status_of(ctx: RunContext) -> Status:
    entry = ctx.ledger.read()
    assert entry.handle is not None
    return attempt_status(ctx, entry.handle, entry)
