"""The command behind ``make demo``: DAG ``train``, run in process by an Airflow of its own.

Two processes: the inner one is Airflow, whose every word goes to a file; this one tells what matters of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from manycpu.operators import local_airflow

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Mapping
    from pathlib import Path

__all__ = ["main", "perform", "run_dag"]

_LINE_LIMIT = 1 << 20  # bytes: a line of Airflow's log may hold a whole traceback
_OURS = "manycpu.operators."
_GRACE = 10.0  # seconds for Airflow to end after Ctrl-C
_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def main() -> int:
    """Run the demo; 0 only when the DAG run and every verb succeeded."""
    from manycpu.pipeline.recipes.question_answering.demo import demo_run
    from manycpu.pipeline.spec.machine import Machine

    home = local_airflow.home()
    run = demo_run(str(home / "models" / time.strftime("demo-%Y%m%dT%H%M%S")))
    scarce = Machine.observe().processors < run["nproc_per_node"]
    return perform({**run, "nnodes": str(run["nnodes"]), "oversubscribe": scarce}, home, Console())


def perform(conf: Mapping[str, Any], home: Path, console: Console) -> int:
    """Run DAG ``train`` with a configuration, print its steps, and end with the report's path.

    Args:
        conf: The parameters of DAG ``train``.
        home: Folder of the embedded Airflow.
        console: Where to tell it.

    Returns:
        0 when the DAG run and every verb succeeded.
    """
    local_airflow.enter(home, AIRFLOW__LOGGING__JSON_LOGS="True")
    log = home / "demo.log"
    _print(console, f"Airflow in {home}; all it says is in {log}")
    try:
        code = asyncio.run(_follow(console, log, json.dumps(conf)))
    except KeyboardInterrupt:
        _clean_up()
        return _INTERRUPTED
    return _conclude(console, conf["output"], code, log)


def run_dag(conf: str) -> int:
    """Run DAG ``train`` in this process, with a configuration as JSON; 0 when the run succeeded."""
    from airflow.dag_processing.dagbag import DagBag
    from airflow.utils import db

    db.initdb()
    bag = DagBag(local_airflow.DAGS)
    dag_run = bag.dags["train"].test(run_conf=json.loads(conf))
    return 0 if dag_run.state == "success" else 1


async def _follow(console: Console, log: Path, conf: str) -> int:
    """Run the inner process, print what it does, and wait for its end."""
    process = await asyncio.create_subprocess_exec(  # noqa: TID251 - the program of a command of ours
        *(sys.executable, "-m", "manycpu.operators.demo", conf),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LINE_LIMIT,
    )
    assert process.stdout is not None  # noqa: S101 - it was asked for
    try:
        with log.open("wb") as file:
            await _print_steps(console, process.stdout, file.write)
    except asyncio.CancelledError:
        await _end(process)
        raise
    return await process.wait()


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _GRACE)
    except TimeoutError:
        process.kill()


async def _print_steps(console: Console, lines: AsyncIterable[bytes], keep: Any) -> None:
    began = time.monotonic()
    async for raw in lines:
        keep(raw)
        record = _read(raw)
        step = _step(record)
        if step and step != "report":  # what it says, the tables at the end say
            _print(console, f"{time.monotonic() - began:6.1f} s  {step:<8} {record['event']}")
        elif record.get("level") in ("error", "critical"):
            _print(console, f"{time.monotonic() - began:6.1f} s  airflow  {record.get('event')}")


def _read(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _step(record: dict[str, Any]) -> str:
    """Return the step whose operator or trigger wrote a record; empty where it was Airflow itself."""
    _, ours, rest = str(record.get("logger", "")).partition(_OURS)
    module = rest.split(".", 1)[0] if ours else ""
    return "train" if module == "triggers" else module


def _conclude(console: Console, output: str, code: int, log: Path) -> int:
    from manycpu.pipeline import display, run_report
    from manycpu.pipeline.adapters.storage import Location

    written = run_report.parse(Location.of(output, "run.output").read_text(run_report.REPORT))
    if written is None:
        _clean_up()
        _print(console, f"the DAG run ended before there was a report; see {log}")
        return code or 1
    display.summary(console, written, f"{output}/{run_report.REPORT}")
    return code


def _clean_up() -> None:
    """Cancel what an interrupted run left: the training outlives its worker on purpose."""
    from manycpu.pipeline.targets.context import home
    from manycpu.pipeline.targets.runs import on_this_machine
    from manycpu.pipeline.verbs.cleanup import cleanup

    for ctx in on_this_machine(home()):
        cleanup(ctx, keep=False)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run_dag(sys.argv[1]) if sys.argv[1:] else main())
