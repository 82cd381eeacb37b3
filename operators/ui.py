"""The command behind ``make ui``: Airflow's own web UI on loopback, with the DAGs ready to trigger."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from manycpu.operators import local_airflow

__all__ = ["end_session", "main"]

_DEFAULT_PORT = 8080
_HEALTH_CHECK_INTERVAL_S = 0.5
_SESSION_CHECK_INTERVAL_S = 0.05
_END_TIMEOUT_S = 10.0  # for Airflow to end by itself after SIGTERM
_PASSWORDS = "simple_auth_manager_passwords.json.generated"


def main() -> int:
    """Run Airflow until Ctrl-C or SIGTERM; its exit code where it ends by itself."""
    home = local_airflow.home()
    if text := os.environ.get("PORT"):
        if not text.isdecimal() or not 0 < int(text) < 1 << 16:
            raise SystemExit(f"manycpu: PORT={text} is no port; choose one: PORT=9000 make ui")
        if not _is_free(int(text)):
            raise SystemExit(f"manycpu: port {text} is taken; choose another, or none: make ui")
        port = int(text)
    else:
        ports = range(_DEFAULT_PORT, _DEFAULT_PORT + 100)
        port = next(filter(_is_free, ports), 0)
        if not port:
            taken = f"{ports[0]} to {ports[-1]}"
            raise SystemExit(f"manycpu: ports {taken} are taken; choose one: PORT=9000 make ui")
    local_airflow.configure(home, port)
    return asyncio.run(_serve(home, port, Console(highlight=False)))


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return True
    return False


def end_session(leader: int, timeout_s: float = _END_TIMEOUT_S) -> None:
    """End every process of a session: Airflow's parent leaves its children behind.

    Trainings continue: each has a session of its own.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + timeout_s
        for process in _members(leader):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        while _members(leader) and time.monotonic() < deadline:
            time.sleep(_SESSION_CHECK_INTERVAL_S)


def _members(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


async def _serve(home: Path, port: int, console: Console) -> int:
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
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    ready = asyncio.create_task(_ready(port))
    try:
        await asyncio.wait({ended, stopped, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            passwords = json.loads((home / _PASSWORDS).read_text())
            console.out(f"\n  address:  http://127.0.0.1:{port}/dags/train")
            for user, password in passwords.items():
                console.out(f"  login:    {user}\n  password: {password}\n")
            console.out("Trigger DAG `train` with the blue button; the run's tab Training shows it.")
            console.out("Ctrl-C ends all of it.")
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
        await asyncio.to_thread(end_session, process.pid)
        await asyncio.to_thread(_cancel_trainings)
    if stopped.done():
        return 0
    console.out(f"Airflow ended by itself with exit code {process.returncode}; see {log}")
    return process.returncode or 1


async def _ready(port: int) -> None:
    """Wait until the web server answers and the DAGs can be triggered."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://127.0.0.1:{port}/api/v2/monitor/health"
    parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
    health: dict[str, Any] = {}
    while not all(health.get(part, {}).get("status") == "healthy" for part in parts):
        await asyncio.sleep(_HEALTH_CHECK_INTERVAL_S)
        with suppress(OSError, ValueError):
            health = json.load(await asyncio.to_thread(direct.open, url, timeout=5))


def _cancel_trainings() -> None:
    """Cancel the trainings, which outlive their workers; their DAG runs notice when Airflow restarts."""
    from manycpu.pipeline.spec.errors import RunGoneError
    from manycpu.pipeline.targets.context import home
    from manycpu.pipeline.targets.runs import on_this_machine
    from manycpu.pipeline.verbs.cancel import cancel

    for ctx in on_this_machine(home()):
        with suppress(RunGoneError):
            if ctx.ledger.lease().holder is None:  # commands and notebooks hold theirs, and end them
                cancel(ctx, by="the end of make ui")


if __name__ == "__main__":
    sys.exit(main())
