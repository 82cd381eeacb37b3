"""An Airflow of its own on this machine: its settings, and the commands behind ``make demo`` and ``make ui``.

The demo has two processes. The child is Airflow, whose output goes to a file. The parent prints the steps.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
import urllib.request
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

DAGS = Path(__file__).resolve().parents[1] / "dags"
_END_TIMEOUT_S = 10.0  # for Airflow to end by itself after SIGTERM
_LINE_LIMIT_BYTES = 1 << 20  # a line of Airflow's log may hold a whole traceback
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
"""Class that wrote a record of the log -> step to print. No report: the final tables repeat its records."""
_DEFAULT_PORT = 8080
_HEALTH_CHECK_INTERVAL_S = 0.5
_SESSION_CHECK_INTERVAL_S = 0.05
_PASSWORDS = "simple_auth_manager_passwords.json.generated"


def airflow_home() -> Path:
    """Find the folder of the embedded Airflow: $AIRFLOW_HOME, or ``.airflow`` here."""
    return Path(os.environ.get("AIRFLOW_HOME") or ".airflow").absolute()


def configure(home: Path, port: int = 8080, **more: str) -> None:
    """Set the environment variables of the embedded Airflow, and ``more``; those that are set stay unchanged.

    Also creates the folder ``home``, and puts the folder of this Python first in PATH.
    """
    home.mkdir(parents=True, exist_ok=True)
    variables = settings(home, port) | {"AIRFLOW__MANYCPU__INSTANCE": instance(home)} | more
    os.environ.update({name: os.environ.get(name, value) for name, value in variables.items()})
    # `airflow standalone` starts its parts as `airflow`, which is beside this Python.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"


def settings(home: Path, port: int = 8080, dags: dict[str, Path] | None = None) -> dict[str, str]:
    """Return the environment variables of an Airflow on loopback that keeps everything in one folder.

    ``dags`` are folders of DAGs by the name of their bundle; by default those of this package.
    """
    bundles = [
        {
            "name": name,
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(folder), "refresh_interval": 5},
        }
        for name, folder in (dags or {"manycpu": DAGS}).items()
    ]
    url = f"http://127.0.0.1:{port}"
    options: dict[str, dict[str, object]] = {
        "api": {"host": "127.0.0.1", "port": port, "base_url": url, "workers": 1},
        "core": {
            "execution_api_server_url": f"{url}/execution/",
            "load_examples": False,
            "dags_are_paused_at_creation": False,
            "parallelism": 8,
            "lazy_load_plugins": True,
        },
        "dag_processor": {
            "dag_bundle_config_list": json.dumps(bundles),
            "refresh_interval": 5,
            "min_file_process_interval": 300,  # a changed file is parsed at once
        },
        "logging": {"logging_level": "INFO"},
        "usage_data_collection": {"enabled": False},
        # The most seconds until a worker notices that a person has ended its task.
        "workers": {"min_heartbeat_interval": 1},
    }
    return {
        "AIRFLOW_HOME": str(home),
        "PYTHONUNBUFFERED": "1",
        "MANYCPU_HOME": str(home / "manycpu"),
        **{
            f"AIRFLOW__{section}__{option}".upper(): str(value)
            for section, values in options.items()
            for option, value in values.items()
        },
    }


def instance(home: Path) -> str:
    """Return a name that no other Airflow has: it is random, and kept in a file of the folder ``home``."""
    file, partial_file = home / "instance", home / f".instance.{os.getpid()}"
    if not file.exists():
        partial_file.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            os.link(partial_file, file)  # atomic, and keeps the file that another process linked first
        partial_file.unlink()
    return file.read_text()


def demo() -> int:
    """Run the demo's training in DAG ``train``; returns 0 only if the DAG run and every verb succeeded."""
    from manycpu.pipeline.recipes.question_answering.demo import demo_run
    from manycpu.pipeline.spec.machine import Machine

    folder = airflow_home()
    run = demo_run(str(folder / "models" / time.strftime("demo-%Y%m%dT%H%M%S")))
    oversubscribe = Machine.observe().processors < run["nproc_per_node"]
    # Like the values of the trigger form, in which the number of nodes is a string.
    conf = {**run, "nnodes": str(run["nnodes"]), "oversubscribe": oversubscribe}
    return perform(conf, folder, Console())


def perform(conf: Mapping[str, Any], home: Path, console: Console) -> int:
    """Run DAG ``train`` in a child process with ``conf`` as its parameters; print its steps, then its report.

    Returns the exit code: 0 if the DAG run and every verb succeeded, 130 after Ctrl-C, else another one.
    """
    from manycpu.pipeline import display, run_report
    from manycpu.pipeline.adapters.storage import Location
    from manycpu.pipeline.spec.output import REPORT

    configure(home, AIRFLOW__LOGGING__JSON_LOGS="True")
    log, output = home / "demo.log", conf["output"]
    console.out(f"Airflow in {home}; its output is in {log}", highlight=False)
    try:
        code = asyncio.run(_follow_demo(console, log, json.dumps(conf)))
    except KeyboardInterrupt:
        _clean_up_run(output)
        return _INTERRUPTED
    report = run_report.parse(Location.of(output, "run.output").read_text(REPORT))
    if report is None:  # cleanup, which writes it, did not run or failed
        _clean_up_run(output)
        console.out(f"the DAG run ended without a report; see {log}", highlight=False)
        return code or 1  # not 0: without a report, nothing shows a success
    display.summary(console, report, f"{output}/{REPORT}")
    return code


def _run_dag(conf: str) -> int:
    """Run DAG ``train`` in this process, with parameters as JSON; return 0 if it succeeded, else 1."""
    from airflow.utils import db

    from manycpu.operators.airflow_versions import dag_bag

    db.initdb()
    dag_run = dag_bag(DAGS).dags["train"].test(run_conf=json.loads(conf))
    return 0 if dag_run.state == "success" else 1


async def _follow_demo(console: Console, log: Path, conf: str) -> int:
    """Run DAG ``train`` in a child process, print its steps, and return its exit code.

    The child's whole output goes to the file ``log``; ``conf`` holds the DAG's parameters as JSON.
    """
    process = await asyncio.create_subprocess_exec(  # noqa: TID251 - adapters.commands is for short programs
        *(sys.executable, "-m", "manycpu.operators.local_airflow", "train", conf),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LINE_LIMIT_BYTES,
    )
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    began = time.monotonic()
    try:
        with log.open("wb") as file:
            async for output_line in process.stdout:
                file.write(output_line)
                if line := _line_to_print(output_line):
                    console.out(f"{time.monotonic() - began:6.1f} s  {line}", highlight=False)
    except asyncio.CancelledError:  # Ctrl-C
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
        raise
    return await process.wait()


def _line_to_print(raw: bytes) -> str | None:
    """Return the line to print for a JSON record of Airflow's log: the text of a step, or an error.

    None: ``raw`` is no JSON record, or the record is neither of a step nor an error.
    """
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    logger = str(record.get("logger", ""))
    if "manycpu.operators." in logger:
        step = _STEPS.get(logger.rpartition(".")[2])
        if step:
            return f"{step:<8} {record['event']}"
    if record.get("level") in ("error", "critical"):
        return f"airflow  {record.get('event')}"
    return None


def _clean_up_run(output: str) -> None:
    """Cancel and clean up the run with this output: its training may outlive the Airflow that launched it."""
    from manycpu.pipeline.spec.targets import Local
    from manycpu.pipeline.targets import driver_of
    from manycpu.pipeline.verbs.cleanup import cleanup

    for ctx in driver_of("local").runs(Local()):
        if ctx.run.output == output:  # $MANYCPU_HOME may have runs of others
            cleanup(ctx, keep=False)  # even if run.keep asks to keep the whole run


def ui() -> int:
    """Run Airflow until Ctrl-C or SIGTERM; returns 0 then, or Airflow's exit code if it ends by itself."""
    folder = airflow_home()
    if chosen_port := os.environ.get("PORT"):
        if not chosen_port.isdecimal() or not 0 < int(chosen_port) < 1 << 16:
            raise SystemExit(f"manycpu: PORT={chosen_port} is no port; choose one: PORT=9000 make ui")
        if not _is_free(int(chosen_port)):
            raise SystemExit(f"manycpu: port {chosen_port} is taken; choose another, or none: make ui")
        port = int(chosen_port)
    else:
        ports = range(_DEFAULT_PORT, _DEFAULT_PORT + 100)
        port = next(filter(_is_free, ports), 0)
        if not port:
            taken = f"{ports[0]} to {ports[-1]}"
            raise SystemExit(f"manycpu: ports {taken} are taken; choose one: PORT=9000 make ui")
    configure(folder, port)
    return asyncio.run(_run_standalone(folder, port, Console(highlight=False)))


def _is_free(port: int) -> bool:
    """Whether a server can listen on a port of the loopback address."""
    with socket.socket() as listener:
        # Servers set this option too: a port whose last connections have just ended counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return True
    return False


def end_session(leader: int, timeout_s: float = _END_TIMEOUT_S) -> None:
    """End every process of the session whose leader has this process id.

    Sends SIGTERM, and after ``timeout_s`` SIGKILL to those that are left; waits again for up to that time.
    Airflow's main process does not end its children. Trainings continue: each has a session of its own.
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + timeout_s
        for process in _processes_of_session(leader):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
        while _processes_of_session(leader) and time.monotonic() < deadline:
            time.sleep(_SESSION_CHECK_INTERVAL_S)


def _processes_of_session(leader: int) -> list[psutil.Process]:
    """List the living processes of the session whose id is ``leader``."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


async def _run_standalone(home: Path, port: int, console: Console) -> int:
    """Run ``airflow standalone`` until it ends or a signal comes; print address and login when it is ready.

    Returns 0 after SIGINT or SIGTERM, else the exit code of Airflow.
    """
    log = home / "standalone.log"
    console.out(f"starting Airflow in {home}; its output is in {log}")
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(  # noqa: TID251 - adapters.commands is for short programs
            *(sys.executable, "-m", "airflow", "standalone"),
            stdout=file,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    ended = asyncio.create_task(process.wait())
    stopping = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    ready = asyncio.create_task(_wait_until_ready(port))
    try:
        await asyncio.wait({ended, stopped, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():  # else Airflow has ended, or a signal came
            passwords = json.loads((home / _PASSWORDS).read_text())
            console.out(f"\n  address:  http://127.0.0.1:{port}/dags/train")
            for user, password in passwords.items():
                console.out(f"  login:    {user}\n  password: {password}\n")
            console.out("Trigger DAG `train` with the blue button; the run's tab Training shows it.")
            console.out("Ctrl-C ends all of it.")
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
        # Airflow first: its scheduler could start other trainings.
        await asyncio.to_thread(end_session, process.pid)
        await asyncio.to_thread(_cancel_trainings, console)
    if stopped.done():
        return 0
    console.out(f"Airflow ended by itself with exit code {process.returncode}; see {log}")
    return process.returncode or 1


async def _wait_until_ready(port: int) -> None:
    """Wait, without a time limit, until the web server answers and reports all parts of Airflow healthy."""
    # The web server is on loopback: a proxy of the environment must not get the request.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://127.0.0.1:{port}/api/v2/monitor/health"
    parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
    health: dict[str, Any] = {}
    while not all(health.get(part, {}).get("status") == "healthy" for part in parts):
        await asyncio.sleep(_HEALTH_CHECK_INTERVAL_S)
        with suppress(OSError, ValueError), await asyncio.to_thread(opener.open, url, timeout=5) as answer:
            health = json.load(answer)


def _cancel_trainings(console: Console) -> None:
    """Cancel the trainings of this Airflow, which outlive their workers; print the error if one fails.

    Their DAG runs see the cancellation when Airflow starts again.
    """
    from manycpu.operators.base import airflow_instance
    from manycpu.pipeline.spec.errors import ManycpuError, RunGoneError
    from manycpu.pipeline.spec.targets import Local
    from manycpu.pipeline.targets import driver_of
    from manycpu.pipeline.verbs.cancel import cancel

    for ctx in driver_of("local").runs(Local()):
        try:
            # $MANYCPU_HOME may have runs of other Airflows.
            if ctx.ledger.read().dag.get("instance") == airflow_instance():
                cancel(ctx, by="the end of make ui")
        except RunGoneError:  # it was cleaned up meanwhile
            continue
        except (ManycpuError, OSError) as error:  # OSError: a full disk, after the training was ended
            console.out(str(error))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["train", conf]:
            sys.exit(_run_dag(conf))
        case ["ui"]:
            sys.exit(ui())
        case ["demo"]:
            sys.exit(demo())
        case _:
            sys.exit("usage: python -m manycpu.operators.local_airflow demo|ui")
