"""The command behind ``make demo``: DAG ``train``, run in process by an Airflow of its own.

Two processes: the inner one is Airflow, whose output goes to a file; this one prints the steps.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from manycpu.operators import local_airflow

__all__ = ["main", "perform", "run_dag"]

_LINE_LIMIT_BYTES = 1 << 20  # a line of Airflow's log may hold a whole traceback
_END_TIMEOUT_S = 10.0  # for Airflow to end after Ctrl-C
_INTERRUPTED = 130  # the exit code that a shell reports of a program that Ctrl-C ended
_STEPS = {
    "PrepareOperator": "prepare",
    "StageDatasetOperator": "stage",
    "BuildImageOperator": "build",
    "TrainOperator": "train",
    "TrainingTrigger": "train",
    "ExportModelOperator": "export",
    "CleanupOperator": "cleanup",
}
"""Class whose logger wrote a record -> its step; without report, whose records the final tables repeat."""


def main() -> int:
    """Run the demo; 0 only when the DAG run and every verb succeeded."""
    from manycpu.pipeline.recipes.question_answering.demo import demo_run
    from manycpu.pipeline.spec.machine import Machine

    home = local_airflow.home()
    run = demo_run(str(home / "models" / time.strftime("demo-%Y%m%dT%H%M%S")))
    scarce = Machine.observe().processors < run["nproc_per_node"]
    return perform({**run, "nnodes": str(run["nnodes"]), "oversubscribe": scarce}, home, Console())


def perform(conf: Mapping[str, Any], home: Path, console: Console) -> int:
    """Run DAG ``train`` with ``conf`` as its parameters, print its steps, and end with the report's path.

    Returns 0 when the DAG run and every verb succeeded.
    """
    from manycpu.pipeline import display, run_report
    from manycpu.pipeline.adapters.storage import Location

    local_airflow.configure(home, AIRFLOW__LOGGING__JSON_LOGS="True")
    log = home / "demo.log"
    console.out(f"Airflow in {home}; its output is in {log}", highlight=False)
    try:
        code = asyncio.run(_follow(console, log, json.dumps(conf)))
    except KeyboardInterrupt:
        _clean_up_runs()
        return _INTERRUPTED
    output = conf["output"]
    written = run_report.parse(Location.of(output, "run.output").read_text(run_report.REPORT))
    if written is None:
        _clean_up_runs()
        console.out(f"the DAG run ended without a report; see {log}", highlight=False)
        return code or 1
    display.summary(console, written, f"{output}/{run_report.REPORT}")
    return code


def run_dag(conf: str) -> int:
    """Run DAG ``train`` in this process, with a configuration as JSON; 0 when the run succeeded."""
    from airflow.dag_processing.dagbag import DagBag
    from airflow.utils import db

    db.initdb()
    bag = DagBag(local_airflow.DAGS)
    dag_run = bag.dags["train"].test(run_conf=json.loads(conf))
    return 0 if dag_run.state == "success" else 1


async def _follow(console: Console, log: Path, conf: str) -> int:
    """Run the inner process, print its steps, and wait for its end."""
    process = await asyncio.create_subprocess_exec(  # noqa: TID251 - adapters.commands is for short programs
        *(sys.executable, "-m", "manycpu.operators.demo", conf),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LINE_LIMIT_BYTES,
    )
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    began = time.monotonic()
    try:
        with log.open("wb") as file:
            async for raw in process.stdout:
                file.write(raw)
                if line := _line_of(raw):
                    console.out(f"{time.monotonic() - began:6.1f} s  {line}", highlight=False)
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
        raise
    return await process.wait()


def _line_of(raw: bytes) -> str | None:
    """Return the line to print for a record of Airflow's log; None if it is of no interest to users."""
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    _, found, rest = str(record.get("logger", "")).partition("manycpu.operators.")
    step = _STEPS.get(rest.rpartition(".")[2]) if found else None
    if step:
        return f"{step:<8} {record['event']}"
    return f"airflow  {record.get('event')}" if record.get("level") in ("error", "critical") else None


def _clean_up_runs() -> None:
    """Cancel and clean up the runs that are left: a training outlives its worker on purpose."""
    from manycpu.pipeline.targets.context import home
    from manycpu.pipeline.targets.runs import on_this_machine
    from manycpu.pipeline.verbs.cleanup import cleanup

    for ctx in on_this_machine(home()):
        cleanup(ctx, keep=False)


if __name__ == "__main__":
    sys.exit(run_dag(sys.argv[1]) if sys.argv[1:] else main())
