"""The door to MLflow: its own client, with the credentials of MLflow's environment variables."""

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from manycpu.pipeline.adapters.storage import is_remote
from manycpu.pipeline.spec.credentials import HIDDEN, redacted
from manycpu.pipeline.spec.tracking import Ending, Place, Point, Tracked

__all__ = ["MlflowTracker", "name_champion", "silence"]

_PATIENCE: Final = 5.0  # seconds to answer
_PORTS: Final = {"http": 80, "https": 443}
_QUIET: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nobody is told that somebody trains
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # which is the ranks'
}
"""How MLflow's client behaves, unless its user says otherwise."""
_UNNAMEABLE: Final = re.compile(r"[^\w\-. /]")
_LONGEST_NAME, _LONGEST_PARAM, _LONGEST_TAG = 250, 6000, 5000  # characters
_DIGEST: Final = 8  # characters of one
_STATUS: Final = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_EXISTS: Final = "RESOURCE_ALREADY_EXISTS"
_CHAMPION: Final = "champion"  # alias of the model in use
_EXPORT: Final = "manycpu.export"  # tag: sha256 of what was exported; earlier versions gave none
_MODEL: Final = "model"  # folder among a run's artifacts


def silence(address: str) -> str | None:
    """Say why a server does not answer; None where it does, or cannot be asked so simply.

    MLflow's client tries for minutes before it says so.
    """
    parts = urlsplit(address)
    if parts.scheme not in _PORTS or parts.hostname is None:
        return None  # such as databricks
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return None
    try:
        where = (parts.hostname, parts.port or _PORTS[parts.scheme])
    except ValueError:  # which would quote what may be a password
        return "MLFLOW_TRACKING_URI is no address"
    try:
        socket.create_connection(where, _PATIENCE).close()
    except OSError as error:
        return f"{where[0]}:{where[1]} does not answer: {error}"
    return None


def name_champion(key: str, sha256: str) -> str | None:
    """Give the alias ``champion`` to the version that a run has registered in the model registry.

    Args:
        key: The run's.
        sha256: Of the model that it exported.

    Returns:
        Name and version; None where nothing is tracked, or the run has not registered that model.

    Raises:
        ConnectionError: The server does not answer.
        MlflowException: It refuses.
    """
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if not address or find_spec("mlflow") is None:
        return None
    if why := silence(address):
        raise ConnectionError(why)
    return MlflowTracker(address).give_alias(_CHAMPION, key, sha256)


class _Run(NamedTuple):
    """What MLflow calls an attempt."""

    id: str
    experiment: str
    """Its experiment's id."""


class MlflowTracker:
    """Keeps each attempt as a run of MLflow, found again by its tags from every process.

    Args:
        address: The server's, as in MLFLOW_TRACKING_URI.
    """

    def __init__(self, address: str) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=address)
        self._address = address
        self._found: dict[tuple[str, ...], _Run] = {}

    def send(self, tracked: Tracked, points: Sequence[Point]) -> None:
        """Log points; MLflow keeps one that it has already once.

        Raises:
            ConnectionError: The server does not answer.
            MlflowException: It refuses.
        """
        from mlflow.entities import Metric

        if why := silence(self._address):
            raise ConnectionError(why)
        metrics = [
            Metric(_named(name), value, round(time * 1000), step) for name, step, time, value in points
        ]
        self._client.log_batch(self._run_of(tracked), metrics=metrics)

    def end(self, tracked: Tracked, ending: Ending) -> None:
        """Log what was missed, the last tags and the status, and register the model."""
        from mlflow.entities import RunTag

        self.send(tracked, ending.points)
        own = self._found[_identity(tracked)].id
        tags = [RunTag(name, value[:_LONGEST_TAG]) for name, value in ending.tags.items()]
        self._client.log_batch(own, tags=tags)
        self._client.set_terminated(own, _STATUS[ending.state], round(ending.time * 1000))
        self._tidy(tracked, own)
        if ending.model and ending.path:
            self._register(ending.model, ending.path, own)

    def place_of(self, tracked: Tracked) -> Place:
        """Name the server, the experiment and, once it is found, the run."""
        address = redacted(self._address).replace(f"{HIDDEN}@", "").rstrip("/")
        place = {"address": address, "experiment": _experiment_name(tracked.group)}
        if (run := self._found.get(_identity(tracked))) is None:
            return place
        place["run"] = run.id
        if urlsplit(address).scheme in _PORTS:  # else it is no server that has pages, such as a database
            place["link"] = f"{address}/#/experiments/{run.experiment}/runs/{run.id}"
        return place

    def give_alias(self, alias: str, key: str, sha256: str) -> str | None:
        """Give an alias to the newest version that a run has registered of a model; returns name and version.

        A run that was cleared and done anew has the same key: the digest of an export tells models apart.
        """
        experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
        runs = self._client.search_runs(experiments, f"tags.`manycpu.key` = '{key}'")
        own = [run.info.run_id for run in runs if run.data.tags.get(_EXPORT, sha256) == sha256]
        versions = [each for run in own for each in self._client.search_model_versions(f"run_id = '{run}'")]
        if not versions:
            return None
        newest = max(versions, key=lambda one: (one.creation_timestamp, int(one.version)))
        self._client.set_registered_model_alias(newest.name, alias, str(newest.version))
        return f"{newest.name} {newest.version}"

    def _run_of(self, tracked: Tracked) -> str:
        """Find the run of an attempt, or make it."""
        identity = _identity(tracked)
        if identity not in self._found:
            found = self._search(tracked) or self._made(tracked)
            if not found[0].data.params:  # whoever made it may have ended before
                self._describe(found[0].info.run_id, tracked.params)
            self._found[identity] = _Run(str(found[0].info.run_id), str(found[0].info.experiment_id))
        return self._found[identity].id

    def _describe(self, run: str, params: Mapping[str, str]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(run, params=_params(params))
        except MlflowException:
            if not self._client.get_run(run).data.params:  # else another process did, in the same moment
                raise

    def _made(self, tracked: Tracked) -> list[Any]:
        tags = {name: value[:_LONGEST_TAG] for name, value in {**tracked.tags, **_tags(tracked)}.items()}
        name = tracked.name if tracked.attempt == 1 else f"{tracked.name}, attempt {tracked.attempt}"
        started = round(tracked.started * 1000)
        self._client.create_run(self._experiment(tracked.group), started, tags, name)
        # Another process may have made one in the same moment: the first by id is the one, for all of them.
        return self._search(tracked)

    def _search(self, tracked: Tracked, *, any_attempt: bool = False) -> list[Any]:
        """Find the runs of an attempt, or of all attempts, in an order that is the same for everybody."""
        tags = _tags(tracked)
        if any_attempt:
            del tags["manycpu.attempt"]
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found = self._client.search_runs([self._experiment(tracked.group)], query)
        return sorted(found, key=lambda run: str(run.info.run_id))

    def _experiment(self, group: str) -> str:
        name = _experiment_name(group)
        if self._client.get_experiment_by_name(name) is None:
            _unless_there(self._client.create_experiment, name)
        return str(self._client.get_experiment_by_name(name).experiment_id)  # type: ignore[union-attr]

    def _tidy(self, tracked: Tracked, own: str) -> None:
        """End the runs of earlier attempts, and delete one that was made in the same moment as this one."""
        for run in self._search(tracked, any_attempt=True):
            if run.info.run_id == own:
                continue
            if run.data.tags["manycpu.attempt"] == str(tracked.attempt):
                self._client.delete_run(run.info.run_id)
            elif run.info.status == "RUNNING":
                self._client.set_terminated(run.info.run_id, _STATUS["failed"])

    def _register(self, name: str, path: str, run: str) -> None:
        """Register a model, once for a run; a folder's files become artifacts of the run."""
        _unless_there(self._client.create_registered_model, name)
        if self._client.search_model_versions(f"name = '{name}' and run_id = '{run}'"):
            return
        source = path
        if not is_remote(path):  # MLflow registers no path on a disk, which may be anywhere
            self._client.log_artifacts(run, str(Path(path)), _MODEL)
            source = f"runs:/{run}/{_MODEL}"
        self._client.create_model_version(name, source, run, await_creation_for=0)


def _unless_there(create: Callable[[str], object], name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        create(name)
    except MlflowException as error:
        if error.error_code != _EXISTS:
            raise


def _experiment_name(group: str) -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or group


def _identity(tracked: Tracked) -> tuple[str, ...]:
    return tuple(_tags(tracked).values())


def _tags(tracked: Tracked) -> dict[str, str]:
    """Return the tags that tell an attempt from every other."""
    return {
        "manycpu.key": tracked.key,
        "manycpu.began": f"{tracked.began:.3f}",
        "manycpu.attempt": str(tracked.attempt),
    }


def _params(params: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import Param

    return [Param(_named(name), value[:_LONGEST_PARAM]) for name, value in params.items()]


def _named(name: str) -> str:
    """Write a name in the characters that MLflow takes; a digest tells it from others that become the same.

    >>> _named("eval/f1"), _named("acc>0.5"), _named("acc<0.5")
    ('eval/f1', 'acc_0.5_3ad057cf', 'acc_0.5_8f69ed7f')
    """
    text = _UNNAMEABLE.sub("_", name)[:_LONGEST_NAME]
    parts = [part if part.strip(".") else part.replace(".", "_") or "_" for part in text.split("/")]
    if (named := "/".join(parts)) == name:
        return name
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
    return f"{named[: _LONGEST_NAME - _DIGEST - 1]}_{digest}"
