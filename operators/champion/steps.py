"""The steps of DAG ``champion`` between its trainings.

Parameters that have a name of Airflow's context, such as ``params``, are given by Airflow.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk.exceptions import AirflowFailException

from manycpu.operators.base import explained
from manycpu.operators.champion import words
from manycpu.operators.champion.promotions import Candidate, champion, discard
from manycpu.operators.champion.promotions import promote as make_champion
from manycpu.operators.champion.versions import (
    HOLDOUT,
    TRAIN,
    UNLABELLED,
    newest,
    read_version,
    write_version,
)
from manycpu.operators.link import tab_of, url_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "begin",
    "choose",
    "compare",
    "conclude",
    "describe",
    "new_version",
    "path_of",
    "promote",
    "rates",
    "road",
    "tidy",
]

_LOG: Final = logging.getLogger(__name__)
Fields = dict[str, Any]


def new_version(params: Any = None, task: Any = None, outlet_events: Any = None) -> Fields:
    """Write the next version of the data set, and tell of it with the asset's event."""
    version = write_version(_folder(params) / "data", params["more"])._asdict()
    outlet_events[task.outlets[0]].extra = version
    return version


def begin(
    params: Any = None, dag_run: Any = None, triggering_asset_events: Mapping[Any, Any] | None = None
) -> Fields:
    """Find the version of the data set that is meant, and check what the DAG run was given.

    Returns:
        Parts of that version, the DAG run's folder, and parameters as JSON has them.

    Raises:
        AirflowFailException: There is no such version, or a parameter is wrong.
    """
    from manycpu.pipeline.spec.validation import read_target

    folder = _folder(params)
    events = [event for of_asset in (triggering_asset_events or {}).values() for event in of_asset]
    with explained():
        read_target(params["target"])
        path = _path(events) or _newest(folder)
        version = read_version(path)
    _LOG.info("version %d of the data set: %s", version.number, version.path)
    run = _run(dag_run)
    return {
        **{part: f"{version.path}/{part}" for part in (TRAIN, HOLDOUT, UNLABELLED)},
        "version": version.path,
        "run": run,
        "models": str(folder / "runs" / run),
        "predictions": str(folder / "predictions" / run),
        **{name: params[name] for name in ("nproc_per_node", "target")},
    }


def rates(params: Any = None) -> list[float]:
    """Return the rates of the sweep: tasks are mapped over what a task returns."""
    return list(params["rates"])


def describe(rate: float, output: str, training: str, ti: Any = None) -> Fields:
    """Tell what became of a candidate, also of one that failed: the others may be good.

    Args:
        rate: Its learning rate.
        output: Where its model and report are.
        training: The task that trained it, with the map index of this one.
        ti: This task's instance.

    Returns:
        Its rate and training, and either ``error``, or ``path``, ``sha256``, ``accuracy`` and ``metrics``.
    """
    from manycpu.pipeline.adapters.storage import Location
    from manycpu.pipeline.run_report import REPORT, parse

    about = {"rate": rate, "training": training, "map_index": ti.map_index}
    report = parse(Location.of(output, "run.output").read_text(REPORT))
    if report is None or report.state != "succeeded" or not report.export:
        error = (report and report.error) or "it ended without a report; the log of its task says why"
        return {**about, "error": error}
    returned = report.returned if isinstance(report.returned, dict) else {}
    exported = {"path": output, "sha256": report.export["sha256"], "metrics": report.metrics}
    described = {**about, "accuracy": returned.get("accuracy"), "key": report.key, **exported}
    fault = _fault(described)
    return {**about, "error": fault} if fault else described


def choose(candidates: Iterable[Fields] | Fields, run: str, version: str, params: Any = None) -> list[Fields]:
    """Take the best candidate of those that succeeded, by the rows that are there to choose by.

    Returns:
        What is to be compared: that candidate, and the present champion where there is one.

    Raises:
        AirflowFailException: All of them failed.
    """
    good = []
    for one in _several(candidates):
        if error := _fault(one):
            _LOG.warning("the candidate of rate %g failed: %s", one["rate"], error)
        else:
            good.append(one)
    if not good:
        raise AirflowFailException("no candidate succeeded; their tasks say why")
    best = max(good, key=lambda one: one["accuracy"])
    candidate = Candidate(name=f"{run}-{best['sha256'][:8]}", data=version, **best)
    return [one.model_dump(mode="json") for one in (candidate, champion(_folder(params))) if one]


def path_of(contender: Fields) -> str:
    """Return where the model of a contender is."""
    return str(contender["path"])


def compare(
    contenders: Sequence[Fields],
    judged: Iterable[Fields],
    candidates: Iterable[Fields] | Fields,
    params: Any = None,
    dag_run: Any = None,
) -> Fields:
    """Compare what both reached on the rows that neither saw.

    Returns:
        Whether the candidate is ``better`` by more than the threshold, its ``accuracy``, and the comparison
        in words: ``says`` as a sentence, ``body`` as Markdown with tables and links.
    """
    comparison = words.Comparison(
        contenders=contenders,
        scores=[one["accuracy"] for one in judged],
        candidates=[_tried(one, contenders[0]["path"], dag_run) for one in _several(candidates)],
        threshold=params["threshold"],
    )
    _LOG.info(comparison.text)
    return {
        "better": comparison.gain > params["threshold"],
        "accuracy": comparison.scores[0],
        "says": comparison.text,
        "body": comparison.body,
    }


def road(better: bool, params: Any = None) -> str | None:
    """Choose the next task: a person is asked, or the threshold has decided, or nothing is promoted."""
    if not better:
        return None
    return "approve" if params["ask"] else "promote"


def promote(
    contenders: Sequence[Fields],
    accuracy: float,
    params: Any = None,
    task: Any = None,
    outlet_events: Any = None,
) -> Fields:
    """Promote the best candidate, and tell of it with the asset's event and in the model registry.

    The registry may be away: that is a warning in the log.

    Raises:
        AirflowFailException: Another one was promoted since the comparison, the model is gone, or what it
            reached is no finite number.
    """
    from manycpu.pipeline.spec.errors import ManycpuError
    from manycpu.pipeline.tracking.ending import tell_champion

    best, *champions = contenders
    if fault := _fault(best) or _fault({"accuracy": accuracy}):
        raise AirflowFailException(f"nothing was promoted: {fault}")
    metrics = {**best["metrics"], "holdout_accuracy": accuracy}
    number = champions[0]["number"] if champions else 0
    try:
        promoted = make_champion(_folder(params), Candidate(**{**best, "metrics": metrics}), number)
    except ManycpuError as error:  # another try would meet the same
        raise AirflowFailException(str(error)) from error
    _LOG.info("promotion %d: %s", promoted.number, promoted.path)
    fields = promoted.model_dump(mode="json")
    outlet_events[task.outlets[0]].extra = {name: fields[name] for name in ("path", "sha256", "metrics")}
    tell_champion(promoted.key, promoted.sha256)
    return fields


def tidy(run: str, models: str, params: Any = None) -> list[str]:
    """Remove what the candidates of this DAG run left, but for the one that was promoted; returns what."""
    gone = discard(_folder(params), run)
    if Path(models).exists():
        gone += [path.name for path in sorted(Path(models).iterdir())]
        shutil.rmtree(models)
    _LOG.info("removed: %s", ", ".join(gone) or "nothing")
    return gone


def conclude(ti: Any = None) -> Fields:
    """Say in a few sentences what came of the DAG run, where nothing of it failed but candidates.

    Returns:
        Whether a model was ``promoted``, the ``model`` and its ``predictions`` (paths) where one was, and
        what it ``says``.
    """
    names = ("begin", "compare", "approve", "promote")
    begun, compared, approval, promoted = (ti.xcom_pull(task_ids=name) for name in names)
    decided = words.decision(better=compared["better"], promoted=promoted is not None, approval=approval)
    made = {"model": promoted["path"], "predictions": begun["predictions"]} if promoted else {}
    says = " ".join([compared["says"], decided, *([words.places(**made)] if made else [])])
    _LOG.info(says)
    return {"promoted": bool(made), **made, "says": says}


def _several(results: Iterable[Fields] | Fields) -> list[Fields]:
    """Make a list of what a mapped group returned: where it was mapped once, Airflow gives that by itself."""
    return [dict(results)] if isinstance(results, dict) else list(results)


def _tried(candidate: Fields, chosen: str, dag_run: Any) -> words.Tried:
    """Describe a candidate to people.

    Args:
        candidate: As :func:`describe` told of it.
        chosen: Path of the one that was chosen.
        dag_run: The DAG run.
    """
    tab = tab_of(dag_run.dag_id, dag_run.run_id, candidate["training"], candidate["map_index"])
    return words.Tried(
        rate=candidate["rate"],
        accuracy=None if _fault(candidate) else candidate["accuracy"],
        page=url_of(tab),
        chosen=candidate.get("path") == chosen,
    )


def _fault(candidate: Fields) -> str | None:
    """Say why a candidate failed; one that cannot be compared has, too."""
    accuracy = candidate.get("accuracy")
    if "error" in candidate:
        return str(candidate["error"])
    if isinstance(accuracy, int | float) and math.isfinite(accuracy):
        return None
    return f"its accuracy is no finite number: {accuracy!r}"


def _folder(params: Mapping[str, Any]) -> Path:
    """Find the folder of it all.

    Raises:
        AirflowFailException: It is no folder on a disk: promotions need what a file system promises.
    """
    from manycpu.pipeline.adapters.storage import is_remote
    from manycpu.pipeline.targets.context import home

    folder = params["folder"]
    if not folder:
        return home() / "champion"
    if is_remote(folder) or not Path(folder).expanduser().is_absolute():
        raise AirflowFailException(f"params.folder: {folder!r} is no absolute path. Give a folder on a disk")
    return Path(folder).expanduser()


def _run(dag_run: Any) -> str:
    from manycpu.pipeline.spec.naming import run_key, run_name

    return run_name(dag_run.run_id, run_key(dag_run.dag_id, dag_run.run_id))


def _path(events: Sequence[Any]) -> str | None:
    """Read the path that the newest event of the data set carries; one from the web UI may carry none."""
    extra = events[-1].extra if events else None
    found = (json.loads(extra) if isinstance(extra, str) else extra or {}).get("path")
    return str(found) if found else None


def _newest(folder: Path) -> str:
    from manycpu.pipeline.spec.errors import BadInputError

    version = newest(folder / "data")
    if version is None:
        fix = "Trigger DAG digits_dataset, which writes one, and starts this DAG itself"
        raise BadInputError(f"there is no version of the data set in {folder / 'data'}", fix=fix)
    return version.path
