"""A real MLflow server on loopback, with a SQLite store in a folder; tests read its content over REST."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import requests
from support.rank_launches import free_port
from support.waiting import until

_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONPATH": ""}


class MlflowServer:
    """A server that does not run until it is started.

    Args:
        folder: The folder for its store, its artifacts and its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._env = os.environ | _QUIET
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server if it does not run, and wait until it answers."""
        if self._process is not None:
            return
        command = [f"{sys.prefix}/bin/mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--backend-store-uri", f"sqlite:///{self._folder}/store.db", "--workers", "1"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("ab") as log:
            # No Program: the server keeps running for the next test.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )
        until(self._answers)

    def stop(self) -> None:
        """Kill the server if it runs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(300)
            self._process = None

    def runs(self, **tags: str) -> list[dict[str, Any]]:
        """Return the runs that have these tags of manycpu."""
        filters = " and ".join(f"tags.`manycpu.{name}` = '{value}'" for name, value in tags.items())
        experiments = self._post("experiments/search", max_results=100)["experiments"]
        ids = [experiment["experiment_id"] for experiment in experiments]
        found = self._post("runs/search", experiment_ids=ids, filter=filters)
        return [_readable(run) for run in found.get("runs", [])]

    def experiment_of(self, run: dict[str, Any]) -> str:
        """Return the name of a run's experiment."""
        found = self._get("experiments/get", experiment_id=run["info"]["experiment_id"])
        return str(found["experiment"]["name"])

    def history(self, run: dict[str, Any], metric: str) -> list[tuple[int, float]]:
        """Return the values of a metric as pairs of step and value, by step."""
        found = self._get("metrics/get-history", run_id=run["info"]["run_id"], metric_key=metric)
        return sorted((int(each.get("step", 0)), each["value"]) for each in found.get("metrics", []))

    def versions(self, model: str) -> list[dict[str, Any]]:
        """Return the versions of a registered model."""
        found = self._get("model-versions/search", filter=f"name = '{model}'")
        return list(found.get("model_versions", []))

    def artifacts(self, run: dict[str, Any], path: str) -> list[str]:
        """Return the paths of the files in a folder of a run's artifacts."""
        found = self._get("artifacts/list", run_id=run["info"]["run_id"], path=path)
        return [each["path"] for each in found.get("files", [])]

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        try:
            return requests.get(f"{self.address}/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    def _get(self, what: str, **params: Any) -> dict[str, Any]:
        return _json(requests.get(self._url(what), params=params, timeout=300))

    def _post(self, what: str, **fields: Any) -> dict[str, Any]:
        return _json(requests.post(self._url(what), json=fields, timeout=300))

    def _url(self, what: str) -> str:
        return f"{self.address}/api/2.0/mlflow/{what}"


def _json(response: requests.Response) -> dict[str, Any]:
    assert response.ok, response.text
    return dict(response.json())


def _readable(run: dict[str, Any]) -> dict[str, Any]:
    """Turn lists of keys and values into mappings; a metric has its last value."""
    parts = {part: {each["key"]: each["value"] for each in run["data"].get(part, [])} for part in _PARTS}
    return {"info": run["info"], **parts}


_PARTS = ("params", "tags", "metrics")
