"""A real Airflow for e2e/, ui/ and kubernetes/: `airflow standalone` with its own folder and port."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.rank_launches import free_port
from support.waiting import processes_of, until

from manycpu.operators import local_airflow

_START = 600  # seconds: ten times as long as on a busy machine of two cores
_TESTS = Path(__file__).parents[1]
_DAGS = {"manycpu": local_airflow.DAGS, "tiny": _TESTS / "e2e" / "dags", "shown": _TESTS / "ui" / "dags"}
_USERS = {"viewer": "viewer", "outsider": "viewer", "admin": "admin"}
"""User of the guarded web server -> role; each user's password is the name."""
_RUNNING = pytest.StashKey[ExitStack]()
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Airflow:
    """A running Airflow, used through its REST API."""

    def __init__(self, url: str, home: Path, user: str, password: str) -> None:
        self.url, self.home, self.user, self.password = url, home, user, password
        body = {"username": user, "password": password}
        self.token = _ask(f"{url}/auth/token", "POST", body)["access_token"]

    def as_user(self, name: str) -> "Airflow":
        """Log in as another user of the guarded web server."""
        return Airflow(self.url, self.home, name, name)

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Call the REST API; return the decoded answer."""
        return _ask(f"{self.url}/api/v2/{path}", method, body, self.token)

    def trigger(self, dag: str, conf: dict[str, Any] | None = None) -> str:
        """Start a DAG run; return its path in the API."""
        body = {"logical_date": None, "conf": conf or {}}
        run = self.api("POST", f"dags/{dag}/dagRuns", body)
        return f"dags/{dag}/dagRuns/{run['dag_run_id']}"

    def runs(self, dag: str, query: str = "") -> list[str]:
        """Return the paths in the API of a DAG's runs that match a query; empty query: all runs."""
        runs = self.api("GET", f"dags/{dag}/dagRuns?{query}")["dag_runs"]
        return [f"dags/{dag}/dagRuns/{quote(run['dag_run_id'])}" for run in runs]

    def state(self, run: str) -> str:
        """Return the state of a DAG run."""
        return str(self.api("GET", run)["state"])

    def end(self, run: str, timeout: float = 300) -> str:
        """Wait for the end of a DAG run; return its state: ``success`` or ``failed``."""
        until(lambda: self.state(run) in ("success", "failed"), timeout)
        return self.state(run)

    def task(self, run: str, task: str = "training.train") -> dict[str, Any]:
        """Return a task instance."""
        found: dict[str, Any] = self.api("GET", f"{run}/taskInstances/{task}")
        return found

    def mark(self, run: str, state: str, task: str = "training.train") -> None:
        """Mark a task with a state, as a person does in the web UI."""
        self.api("PATCH", f"{run}/taskInstances/{task}", {"new_state": state})

    def clear(self, run: str, task: str = "training.train") -> None:
        """Clear a task as a person does in the web UI."""
        dag, _, run_id = run.partition("/dagRuns/")
        body = {"dry_run": False, "only_failed": False, "task_ids": [task], "dag_run_id": run_id}
        self.api("POST", f"{dag}/clearTaskInstances", body)

    def log(self, run: str, task: str = "training.train", attempt: int = 1) -> list[str]:
        """Return the lines of the log of one try of a task, as the web UI shows them."""
        content = self.api("GET", f"{run}/taskInstances/{task}/logs/{attempt}?full_content=true")["content"]
        lines = [line if isinstance(line, dict) else {"event": line} for line in content]
        raised = "{exc_type}: {exc_value}".format_map
        return [
            " ".join([str(line["event"]), *map(raised, line.get("error_detail") or [])]) for line in lines
        ]


@pytest.fixture(scope="session")
def airflow(
    request: pytest.FixtureRequest, new_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Airflow]:
    """Yield the only Airflow of the session, with the DAGs of the package, of tests/e2e and of tests/ui."""
    home = tmp_path_factory.mktemp("airflow")
    shutil.copy(new_database, home)
    with ExitStack() as stack:
        request.config.stash[_RUNNING] = stack
        yield stack.enter_context(_running(home))


@pytest.fixture(scope="session")
def guarded_airflow(request: pytest.FixtureRequest, airflow: Airflow) -> Airflow:
    """Return the same Airflow behind another web server, whose URL has a path, and users different rights.

    ``support.denying_auth`` decides what they may see. `airflow standalone` itself accepts no auth manager.
    """
    return request.config.stash[_RUNNING].enter_context(_guarded(airflow.home))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End Airflow after the last test that uses it, because it uses CPU time."""
    result = yield
    if nextitem is not None and _uses(item) and not _uses(nextitem):
        item.config.stash.get(_RUNNING, ExitStack()).close()
    return result


def _uses(item: pytest.Item) -> bool:
    return "airflow" in getattr(item, "fixturenames", ())


@contextmanager
def _running(home: Path) -> Iterator[Airflow]:
    """Start Airflow as `make ui` does; end it as Ctrl-C does, and check that no process is left."""
    port = free_port()
    bundles = local_airflow.settings(home, port, _DAGS)
    env = _own_environment() | {
        name: value for name, value in bundles.items() if name.endswith("BUNDLE_CONFIG_LIST")
    }
    env |= {"AIRFLOW_HOME": str(home), "PORT": str(port), "MANYCPU_TEST_HOME": str(home)}
    env |= {"AIRFLOW__MANYCPU__LIVE_SECONDS": "1"}
    command = [sys.executable, "-m", "manycpu.operators.local_airflow", "ui"]
    with (home / "said").open("wb") as said:
        server = subprocess.Popen(command, env=env, stdout=said, stderr=said)
    try:
        yield _wait_for(server, f"http://127.0.0.1:{port}", home)
    finally:
        server.terminate()
        code = server.wait(300)
        left = list(processes_of(home))
        for process in left:
            process.kill()
    assert (code, left) == (0, []), "Airflow, or a training that a test started, was left behind"


@contextmanager
def _guarded(home: Path) -> Iterator[Airflow]:
    """Run a second web server of the Airflow in a folder, with the users ``_USERS``."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/behind/proxy"
    passwords = home / "passwords.json"
    passwords.write_text(json.dumps({name: name for name in _USERS}))
    env = _own_environment() | local_airflow.settings(home, port, _DAGS)
    env |= {
        "PYTHONPATH": str(_TESTS),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__CORE__AUTH_MANAGER": "support.denying_auth.DenyingAuthManager",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(
            f"{name}:{role}" for name, role in _USERS.items()
        ),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
    }
    log = home / "guarded.log"
    with log.open("wb") as said:
        command = [sys.executable, "-m", "airflow", "api-server"]
        server = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        _until_up(lambda: _answers(url), server, lambda: log.read_text(errors="replace")[-3000:])
        yield Airflow(url, home, "admin", "admin")
    finally:
        local_airflow.end_session(server.pid)
        server.wait()


def _own_environment() -> dict[str, str]:
    """Return this process's environment without variables that point Airflow to other folders."""
    return {name: value for name, value in os.environ.items() if not re.search("AIRFLOW|MANYCPU_HOME", name)}


def _answers(url: str) -> bool:
    try:
        return bool(_ask(f"{url}/api/v2/monitor/health", "GET"))
    except urllib.error.URLError:
        return False


def _wait_for(server: "subprocess.Popen[bytes]", url: str, home: Path) -> Airflow:
    """Wait until Airflow has printed a login and has loaded all DAGs; return it."""

    def said() -> str:
        logs = [path.read_text(errors="replace")[-3000:] for path in (home / "said", home / "standalone.log")]
        return "\n".join(logs)

    _until_up(lambda: "password: " in (home / "said").read_text(), server, said)
    words = (home / "said").read_text().split()
    login, password = words[words.index("login:") + 1], words[words.index("password:") + 1]
    found = Airflow(url, home, login, password)
    wanted = {"train", "tiny", "tiny_function", "tiny_sync", "tiny_hurried", "tiny_consumer", "form"}
    wanted |= {"shown", "hidden", "foreign", "growing", "asking", "waiting"}
    _until_up(
        lambda: wanted <= {dag["dag_id"] for dag in found.api("GET", "dags")["dags"]},
        server,
        lambda: f"{found.api('GET', 'importErrors')['import_errors']}\n{said()}",
    )
    return found


def _until_up(
    condition: Callable[[], object], server: "subprocess.Popen[bytes]", said: Callable[[], str]
) -> None:
    """Wait until a condition is true; fail with what the server has printed if it ends or takes too long."""
    deadline = time.monotonic() + _START
    while not condition():
        assert server.poll() is None, f"Airflow ended with exit code {server.returncode}: {said()}"
        assert time.monotonic() < deadline, f"Airflow is not up after {_START} s: {said()}"
        time.sleep(0.5)


def _ask(url: str, method: str, body: object = None, token: str | None = None) -> Any:
    request = urllib.request.Request(  # noqa: S310 - loopback
        url,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Accept": "application/json"}
        | ({"Authorization": f"Bearer {token}"} if token else {}),
    )
    with _DIRECT.open(request, timeout=300) as answer:
        return json.loads(answer.read() or "null")
