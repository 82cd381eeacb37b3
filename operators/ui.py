"""The command behind ``make ui``: Airflow's own web UI on loopback, with the DAGs ready to trigger."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
from rich.console import Console

from manycpu.operators import local_airflow

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["end_session", "free_port", "main"]

_PORT = 8080
_POLL = 0.5  # seconds between two questions whether the web server answers
_GRACE = 10.0  # seconds for Airflow to end by itself
_PASSWORDS = "simple_auth_manager_passwords.json.generated"


def main() -> int:
    """Run Airflow until Ctrl-C or SIGTERM; its exit code where it ends by itself."""
    home = local_airflow.home()
    port = _asked_port(os.environ.get("PORT")) or free_port(_PORT)
    local_airflow.enter(home, port)
    return asyncio.run(_serve(home, port, Console()))


def _asked_port(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise SystemExit(f"manycpu: PORT={text} is no port; choose one: PORT=9000 make ui")
    if not _is_free(int(text)):
        raise SystemExit(f"manycpu: port {text} is taken; choose another, or none: make ui")
    return int(text)


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return True
    return False


def free_port(first: int) -> int:
    """Find the first free port of loopback, from one on."""
    for port in range(first, first + 100):
        if _is_free(port):
            return port
    raise SystemExit(f"manycpu: ports {first} to {first + 99} are taken; choose one: PORT=9000 make ui")


def end_session(leader: int, grace: float = _GRACE) -> None:
    """End every process of a session: Airflow's parent leaves its children behind.

    A training has a session of its own, and goes on.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        for process in _members(leader):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        while _members(leader) and time.monotonic() < deadline:
            time.sleep(_POLL / 10)


def _members(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


async def _serve(home: Path, port: int, console: Console) -> int:
    log = home / "standalone.log"
    _print(console, f"starting Airflow in {home}; all it says is in {log}")
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(  # noqa: TID251 - the program of a command of ours
            *(sys.executable, "-m", "airflow", "standalone"),
            stdout=file,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    ended = asyncio.create_task(process.wait())
    stopped = asyncio.create_task(_signal())
    ready = asyncio.create_task(_ready(port))
    try:
        await asyncio.wait({ended, stopped, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            _welcome(console, home, port)
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
        await asyncio.to_thread(end_session, process.pid)
        await asyncio.to_thread(_cancel_trainings)
    if stopped.done():
        return 0
    _print(console, f"Airflow ended by itself with exit code {process.returncode}; see {log}")
    return process.returncode or 1


async def _signal() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


async def _ready(port: int) -> None:
    """Wait until the web server answers and the DAGs can be triggered."""
    while not await asyncio.to_thread(_healthy, port):  # noqa: ASYNC110 - what is asked is another process
        await asyncio.sleep(_POLL)


def _healthy(port: int) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://127.0.0.1:{port}/api/v2/monitor/health", timeout=5) as answer:
            health = json.load(answer)
    except (OSError, urllib.error.URLError, ValueError):
        return False
    parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
    return all(health.get(part, {}).get("status") == "healthy" for part in parts)


def _welcome(console: Console, home: Path, port: int) -> None:
    passwords = json.loads((home / _PASSWORDS).read_text())
    _print(console, f"\n  address:  http://127.0.0.1:{port}/dags/train")
    for user, password in passwords.items():
        _print(console, f"  login:    {user}\n  password: {password}\n")
    _print(console, "Trigger DAG `train` with the blue button; the run's tab Training shows it as it goes.")
    _print(console, "Ctrl-C ends all of it.")


def _cancel_trainings() -> None:
    """End what outlives its worker on purpose; the DAG runs find it cancelled when Airflow is back."""
    from manycpu.pipeline.spec.errors import RunGoneError
    from manycpu.pipeline.targets.context import home
    from manycpu.pipeline.targets.runs import on_this_machine
    from manycpu.pipeline.verbs.cancel import cancel

    for ctx in on_this_machine(home()):
        with suppress(RunGoneError):
            if ctx.ledger.lease().holder is None:  # others are of commands and notebooks, which see to them
                cancel(ctx, by="the end of make ui")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
