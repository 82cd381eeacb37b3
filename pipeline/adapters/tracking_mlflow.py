"""Record trainings in MLflow, by its own client and the credentials of its environment variables."""

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

_CONNECT_TIMEOUT_S: Final = 5.0
_PORTS: Final = {"http": 80, "https": 443}
_QUIET: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # trainings are private
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for the ranks' lines
}
"""How MLflow's client behaves, unless its user says otherwise."""
_UNNAMEABLE: Final = re.compile(r"[^\w\-. /]")
_LONGEST_NAME, _LONGEST_PARAM, _LONGEST_TAG = 250, 6000, 5000  # characters
_DIGEST_CHARACTERS: Final = 8  # of a digest in a name
_STATUS: Final = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_EXISTS: Final = "RESOURCE_ALREADY_EXISTS"
_CHAMPION: Final = "champion"  # alias of the model in use
_EXPORT: Final = "manycpu.export"  # tag: sha256 of what was exported; earlier versions did not set it
_MODEL: Final = "model"  # folder among a run's artifacts


def silence(address: str) -> str | None:
    """Return why a server does not answer; None: it answers, or a TCP connection to it cannot be tested.

    Call this before a call of MLflow's client, which would retry for minutes.
    """
    parts = urlsplit(address)
    if parts.scheme not in _PORTS or parts.hostname is None:
        return None  # such as databricks
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return None  # only the proxy connects to the server
    try:
        where = (parts.hostname, parts.port or _PORTS[parts.scheme])
    except ValueError:  # without its message, which may quote a password
        return "MLFLOW_TRACKING_URI is no address"
    try:
        socket.create_connection(where, _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"{where[0]}:{where[1]} does not answer: {error}"
    return None


def name_champion(key: str, sha256: str) -> str | None:
    """Give the alias ``champion`` to the version that a run has registered in the model registry.

    Args:
        key: The run's key, a tag of its MLflow runs.
        sha256: Digest of the model that the run exported.

    Returns:
        Name and version; None: nothing is tracked, or the run has not registered that model.

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
    """The run of MLflow that records an attempt."""

    id: str
    experiment: str
    """Its experiment's id."""


class MlflowTracker:
    """Records each attempt as a run of MLflow, which every process finds by its tags."""

    def __init__(self, address: str) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=address)
        self._address = address
        self._found: dict[tuple[str, ...], _Run] = {}  # tags of an attempt -> its run

    def send(self, tracked: Tracked, points: Sequence[Point]) -> None:
        """Log points; MLflow ignores points that it has already.

        Raises:
            ConnectionError: The server does not answer.
            MlflowException: It refuses.
        """
        from mlflow.entities import Metric

        if why := silence(self._address):
            raise ConnectionError(why)
        metrics = [
            Metric(_named(name), value, _milliseconds(time), step) for name, step, time, value in points
        ]
        self._client.log_batch(self._run_of(tracked), metrics=metrics)

    def end(self, tracked: Tracked, ending: Ending) -> None:
        """Log the missed points, the last tags and the status, and register the model.

        Raises:
            ConnectionError: The server does not answer.
            MlflowException: It refuses.
        """
        from mlflow.entities import RunTag

        self.send(tracked, ending.points)
        run_id = self._found[_identity(tracked)].id  # `send` has found or created it
        tags = [RunTag(name, value[:_LONGEST_TAG]) for name, value in ending.tags.items()]
        self._client.log_batch(run_id, tags=tags)
        self._client.set_terminated(run_id, _STATUS[ending.state], _milliseconds(ending.time))
        self._end_others(tracked, own=run_id)
        if ending.model and ending.path:
            self._register(ending.model, ending.path, run_id)

    def place_of(self, tracked: Tracked) -> Place:
        """Return the server and the experiment; once the run of MLflow is known, also its id and its page."""
        address = redacted(self._address).replace(f"{HIDDEN}@", "").rstrip("/")
        place = {"address": address, "experiment": _experiment_name(tracked.group)}
        if (run := self._found.get(_identity(tracked))) is None:
            return place
        place["run"] = run.id
        if urlsplit(address).scheme in _PORTS:  # others, such as a database, have no pages
            place["link"] = f"{address}/#/experiments/{run.experiment}/runs/{run.id}"
        return place

    def give_alias(self, alias: str, key: str, sha256: str) -> str | None:
        """Give an alias to the newest version of a model that a run has registered.

        A run that is cleared and repeated has the same key: the export's digest distinguishes its models.

        Returns:
            Name and version of the model; None: the run has registered none.
        """
        experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
        runs = self._client.search_runs(experiments, f"tags.`manycpu.key` = '{key}'")
        # Runs that an earlier version of manycpu recorded have no digest: they count as well.
        run_ids = [run.info.run_id for run in runs if run.data.tags.get(_EXPORT, sha256) == sha256]
        versions = [
            version
            for run_id in run_ids
            for version in self._client.search_model_versions(f"run_id = '{run_id}'")
        ]
        if not versions:
            return None
        newest = max(versions, key=lambda each: (each.creation_timestamp, int(each.version)))
        self._client.set_registered_model_alias(newest.name, alias, str(newest.version))
        return f"{newest.name} {newest.version}"

    def _run_of(self, tracked: Tracked) -> str:
        """Return the id of the MLflow run that records an attempt; create the run if there is none."""
        identity = _identity(tracked)
        if identity not in self._found:
            if not (runs := self._search(tracked)):
                tags = {**tracked.tags, **_identifying_tags(tracked)}
                short_tags = {name: value[:_LONGEST_TAG] for name, value in tags.items()}
                name = f"{tracked.name}, attempt {tracked.attempt}" if tracked.attempt > 1 else tracked.name
                started = _milliseconds(tracked.started)
                self._client.create_run(self._experiment_id(tracked.group), started, short_tags, name)
                # Another process may have created one at the same time: all processes use the first by id.
                runs = self._search(tracked)
            if not runs[0].data.params:  # the process that created it may have died before this step
                self._log_params(runs[0].info.run_id, tracked.params)
            self._found[identity] = _Run(str(runs[0].info.run_id), str(runs[0].info.experiment_id))
        return self._found[identity].id

    def _log_params(self, run: str, params: Mapping[str, str]) -> None:
        """Log the parameters of a run, unless another process has logged them."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        try:
            short_params = [Param(_named(name), value[:_LONGEST_PARAM]) for name, value in params.items()]
            self._client.log_batch(run, params=short_params)
        except MlflowException:
            if not self._client.get_run(run).data.params:  # else another process has logged them
                raise

    def _search(self, tracked: Tracked, *, any_attempt: bool = False) -> list[Any]:
        """Find the MLflow runs of an attempt, or of all attempts of its run; sorted by their ids."""
        tags = _identifying_tags(tracked)
        if any_attempt:
            del tags["manycpu.attempt"]
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        runs = self._client.search_runs([self._experiment_id(tracked.group)], query)
        return sorted(runs, key=lambda run: str(run.info.run_id))

    def _experiment_id(self, group: str) -> str:
        """Return the id of an experiment; create the experiment if there is none."""
        name = _experiment_name(group)
        if self._client.get_experiment_by_name(name) is None:
            _create_if_missing(self._client.create_experiment, name)
        return str(self._client.get_experiment_by_name(name).experiment_id)  # type: ignore[union-attr]

    def _end_others(self, tracked: Tracked, own: str) -> None:
        """End MLflow runs of other attempts that still run, as failed; delete a second one of this attempt.

        There is a second one if two processes created theirs at the same time. ``own`` is the one that stays.
        """
        for run in self._search(tracked, any_attempt=True):
            if run.info.run_id == own:
                continue
            if run.data.tags["manycpu.attempt"] == str(tracked.attempt):
                self._client.delete_run(run.info.run_id)
            elif run.info.status == "RUNNING":
                self._client.set_terminated(run.info.run_id, _STATUS["failed"])

    def _register(self, name: str, path: str, run: str) -> None:
        """Register a model once for each MLflow run; files on a local disk become artifacts of that run."""
        _create_if_missing(self._client.create_registered_model, name)
        if self._client.search_model_versions(f"name = '{name}' and run_id = '{run}'"):
            return
        source = path
        if not is_remote(path):  # MLflow registers no path of a local disk
            self._client.log_artifacts(run, str(Path(path)), _MODEL)
            source = f"runs:/{run}/{_MODEL}"
        self._client.create_model_version(name, source, run, await_creation_for=0)  # 0: do not wait


def _create_if_missing(create: Callable[[str], object], name: str) -> None:
    """Call ``create`` with a name; it is no error if MLflow has an object of that name."""
    from mlflow.exceptions import MlflowException

    try:
        create(name)
    except MlflowException as error:
        if error.error_code != _EXISTS:
            raise


def _milliseconds(seconds: float) -> int:
    """Convert a time since the epoch to MLflow's unit."""
    return round(seconds * 1000)


def _experiment_name(group: str) -> str:
    """Return the name of the experiment: $MLFLOW_EXPERIMENT_NAME, or else the attempt's group."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or group


def _identity(tracked: Tracked) -> tuple[str, ...]:
    """Return what identifies an attempt: its run's key, when the run began, and its number."""
    return tuple(_identifying_tags(tracked).values())


def _identifying_tags(tracked: Tracked) -> dict[str, str]:
    """Return the tags that identify an attempt."""
    return {
        "manycpu.key": tracked.key,
        "manycpu.began": f"{tracked.began:.3f}",
        "manycpu.attempt": str(tracked.attempt),
    }


def _named(name: str) -> str:
    """Replace characters that MLflow refuses in a name; a digest keeps different names different.

    >>> _named("eval/f1"), _named("acc>0.5"), _named("acc<0.5")
    ('eval/f1', 'acc_0.5_3ad057cf', 'acc_0.5_8f69ed7f')
    """
    text = _UNNAMEABLE.sub("_", name)[:_LONGEST_NAME]
    # MLflow takes names for paths: parts that are empty or only dots, such as "..", become underscores.
    parts = [part if part.strip(".") else part.replace(".", "_") or "_" for part in text.split("/")]
    if (named := "/".join(parts)) == name:
        return name
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{named[: _LONGEST_NAME - _DIGEST_CHARACTERS - 1]}_{digest}"
