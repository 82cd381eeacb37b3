"""A real Airflow for the tests of e2e/ and ui/: `airflow standalone` in a folder and on a port of its own."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import processes_of, until

from manycpu.operators import embedded
from manycpu.operators.ui import end_session, free_port

__all__ = ["Airflow", "airflow"]

_START = 180  # seconds: three times what a busy machine of two cores took
_TINY_DAGS = Path(__file__).parent / "e2e" / "dags"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Airflow:
    """A running Airflow, spoken to over its REST API."""

    def __init__(self, url: str, home: Path, user: str, password: str) -> None:
        self.url, self.home, self.user, self.password = url, home, user, password
        body = {"username": user, "password": password}
        self._token = _ask(f"{url}/auth/token", "POST", body)["access_token"]

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Ask the REST API."""
        return _ask(f"{self.url}/api/v2/{path}", method, body, self._token)

    def trigger(self, dag: str, conf: dict[str, Any] | None = None) -> str:
        """Start a DAG run; returns its path in the API."""
        body = {"logical_date": None, "conf": conf or {}}
        run = self.api("POST", f"dags/{dag}/dagRuns", body)
        return f"dags/{dag}/dagRuns/{run['dag_run_id']}"

    def state(self, run: str) -> str:
        """State of a DAG run."""
        return str(self.api("GET", run)["state"])

    def end(self, run: str, timeout: float = 120) -> str:
        """Wait for the end of a DAG run; returns its state."""
        until(lambda: self.state(run) in ("success", "failed"), timeout)
        return self.state(run)

    def task(self, run: str, task: str = "training.train") -> dict[str, Any]:
        """Describe a task instance."""
        found: dict[str, Any] = self.api("GET", f"{run}/taskInstances/{task}")
        return found

    def log(self, run: str, task: str = "training.train", attempt: int = 1) -> list[str]:
        """Read the log of a try of a task, as the web UI shows it."""
        content = self.api("GET", f"{run}/taskInstances/{task}/logs/{attempt}?full_content=true")["content"]
        return [str(line["event"]) if isinstance(line, dict) else str(line) for line in content]


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Start Airflow; end its whole session, and see that nothing of it is left."""
    home = tmp_path_factory.mktemp("airflow")
    port = free_port(18080)
    settings = embedded.settings(home, port, {"manycpu": embedded.DAGS, "tiny": _TINY_DAGS})
    settings |= {"MANYCPU_HOME": str(home / "manycpu"), "MANYCPU_TEST_HOME": str(home)}
    with (home / "standalone.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "airflow", "standalone"],
            env=os.environ | settings,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield _wait_for(server, f"http://127.0.0.1:{port}", home)
    finally:
        end_session(server.pid, grace=3)
        server.wait(10)
        trainings = list(processes_of(home))
        for process in trainings:
            process.kill()
    assert trainings == [], "a test left a training behind"


def _wait_for(server: "subprocess.Popen[bytes]", url: str, home: Path) -> Airflow:
    passwords = home / "simple_auth_manager_passwords.json.generated"

    def said() -> str:
        return (home / "standalone.log").read_text(errors="replace")[-3000:]

    _until_up(lambda: passwords.exists() and _healthy(url), server, said)
    user, password = next(iter(json.loads(passwords.read_text()).items()))
    found = Airflow(url, home, user, password)
    wanted = {"train", "tiny", "tiny_sync", "tiny_consumer"}
    _until_up(lambda: wanted <= {dag["dag_id"] for dag in found.api("GET", "dags")["dags"]}, server, said)
    return found


def _until_up(
    condition: Callable[[], object], server: "subprocess.Popen[bytes]", said: Callable[[], str]
) -> None:
    deadline = time.monotonic() + _START
    while not condition():
        assert server.poll() is None, f"Airflow ended with exit code {server.returncode}: {said()}"
        assert time.monotonic() < deadline, f"Airflow is not up after {_START} s: {said()}"
        time.sleep(0.5)


def _healthy(url: str) -> bool:
    try:
        health = _ask(f"{url}/api/v2/monitor/health", "GET")
    except OSError:
        return False
    return all(health[part]["status"] == "healthy" for part in ("scheduler", "triggerer", "dag_processor"))


def _ask(url: str, method: str, body: object = None, token: str | None = None) -> Any:
    request = urllib.request.Request(  # noqa: S310 - loopback
        url,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Accept": "application/json"}
        | ({"Authorization": f"Bearer {token}"} if token else {}),
    )
    with _DIRECT.open(request, timeout=30) as answer:
        return json.load(answer)
