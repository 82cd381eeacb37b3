"""The steps of DAG ``champion`` between its trainings, and the texts that describe its decision to people.

Airflow itself passes arguments that have the name of a variable of its context, such as ``params``, and
``ti`` for the task instance.
"""

import json
import logging
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from manycpu.operators.airflow_versions import AirflowFailException, conf
from manycpu.operators.base import failing_without_retry, tab_of
from manycpu.operators.champion.promotions import Candidate, champion, discard
from manycpu.operators.champion.promotions import promote as make_champion
from manycpu.operators.champion.versions import PARTS, newest, read_version, write_version
from manycpu.operators.following import place_of, state_of
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError

_LOG: Final = logging.getLogger(__name__)
_MAX_DECIMALS: Final = 4  # of a percentage
_LEAD_DIGITS: Final = 9  # decimals: finer than one row of any data set, coarser than the error of floats
Fields = dict[str, Any]
"""The result of a task by name, or that of one candidate: JSON that Airflow passes to later tasks."""


def new_version(params: Any = None, task: Any = None, outlet_events: Any = None) -> Fields:
    """Write the next version of the data set, and put its number and path into the asset's event."""
    version = write_version(_champion_folder(params) / "data", params["more"])._asdict()
    outlet_events[task.outlets[0]].extra = version
    return version


def begin(
    params: Any = None, dag_run: Any = None, triggering_asset_events: Mapping[Any, Any] | None = None
) -> Fields:
    """Choose the version of the data set to train on, and check the parameter ``target``.

    The last asset event names the version. If there is no event, or it comes from the web UI and names none,
    the newest version is taken.
    Returns the paths of that version's parts, the DAG run's name and folders, and two of its parameters.

    Raises:
        AirflowFailException: ``target`` is wrong, there is no version, or the version lacks a part.
    """
    from manycpu.pipeline.spec.naming import run_key, run_name
    from manycpu.pipeline.spec.validation import read_target

    folder = _champion_folder(params)
    path = _path_of_event(triggering_asset_events or {})
    with failing_without_retry():
        read_target(params["target"])  # raises if it is wrong
        if not path:
            newest_version = newest(folder / "data")
            if newest_version is None:
                fix = "Trigger DAG digits_dataset, which writes one, and starts this DAG itself"
                raise BadInputError(f"there is no version of the data set in {folder / 'data'}", fix=fix)
            path = newest_version.path
        version = read_version(str(path))
    _LOG.info("version %d of the data set: %s", version.number, version.path)
    run = run_name(dag_run.run_id, run_key(dag_run.dag_id, dag_run.run_id))
    return {
        **{part: f"{version.path}/{part}" for part in PARTS},
        "version": version.path,
        "run": run,
        "models": str(folder / "runs" / run),
        "predictions": str(folder / "predictions" / run),
        **{name: params[name] for name in ("nproc_per_node", "target")},
    }


def _path_of_event(triggering_asset_events: Mapping[Any, Any]) -> Any:
    """Return the path that the last asset event names; None: there is no event, or it names none."""
    events: list[Any] = []
    for events_of_asset in triggering_asset_events.values():
        events += events_of_asset
    extra = events[-1].extra if events else None  # what `new_version` or a person put into the event
    if isinstance(extra, str):
        extra = json.loads(extra)
    return (extra or {}).get("path")


def rates(params: Any = None) -> list[float]:
    """Return the learning rates of the sweep: Airflow maps tasks over the result of a task."""
    return list(params["rates"])


def describe(rate: float, output: str, training: str, ti: Any = None) -> Fields:
    """Describe the result of one candidate's training, or why it failed: other candidates may succeed.

    Args:
        rate: Learning rate of the candidate.
        output: Folder of its model and its report.
        training: Id of its training task.
        ti: The task instance of this task; the training has the same map index.

    Returns:
        ``rate``, ``training`` and ``map_index``; and either ``error``, or ``path``, ``sha256``, ``key``,
        ``accuracy`` and ``metrics``.
    """
    from manycpu.pipeline.adapters.storage import Location
    from manycpu.pipeline.run_report import parse
    from manycpu.pipeline.spec.output import REPORT

    identity = {"rate": rate, "training": training, "map_index": ti.map_index}
    report = parse(Location.of(output, "run.output").read_text(REPORT))
    state = state_of(place_of({"ti": ti}) | {"task_id": training})
    # The task must be a success too: if a person has cleared it, the report may be of an earlier try.
    if state != "success" or report is None or report.state != "succeeded" or not report.export:
        error = (report and report.error) or "it ended without a report; the log of its task says why"
        return {**identity, "error": error}
    returned = report.returned if isinstance(report.returned, dict) else {}
    exported = {"path": output, "sha256": report.export["sha256"], "metrics": report.metrics}
    described = {**identity, "accuracy": returned.get("accuracy"), "key": report.key, **exported}
    reason = _why_failed(described)
    return {**identity, "error": reason} if reason else described


def choose(candidates: Iterable[Fields] | Fields, run: str, version: str, params: Any = None) -> list[Fields]:
    """Choose the candidate that succeeded with the best accuracy on the rows for choosing.

    Args:
        candidates: What ``describe`` returned for each candidate.
        run: Name of the DAG run.
        version: Path of the version of the data set that they were trained on.
        params: Parameters of the DAG run.

    Returns:
        The contenders: that candidate, then the present champion if there is one.

    Raises:
        AirflowFailException: No candidate succeeded.
    """
    succeeded = []
    for result in _as_list(candidates):
        if error := _why_failed(result):
            _LOG.warning("the candidate of rate %g failed: %s", result["rate"], error)
        else:
            succeeded.append(result)
    if not succeeded:
        raise AirflowFailException("no candidate succeeded; their tasks say why")
    best = max(succeeded, key=lambda result: result["accuracy"])
    # Candidate ignores the fields of `best` that describe its task.
    contenders = [Candidate(name=f"{run}-{best['sha256'][:8]}", data=version, **best)]
    present_champion = champion(_champion_folder(params))
    if present_champion is not None:
        contenders.append(present_champion)
    return [contender.model_dump(mode="json") for contender in contenders]


def path_of(contender: Fields) -> str:
    """Return the path of a contender's model."""
    return str(contender["path"])


def compare(
    contenders: Sequence[Fields],
    judged: Iterable[Fields],
    candidates: Iterable[Fields] | Fields,
    params: Any = None,
    dag_run: Any = None,
) -> Fields:
    """Compare the accuracy of candidate and champion on the rows that neither has seen.

    ``contenders`` is what ``choose`` returned; ``judged`` has the result of ``evaluate`` for each of them;
    ``candidates`` is what ``describe`` returned for each candidate.

    Returns whether the candidate is ``better`` by more than the threshold, its ``accuracy``, and the
    comparison as text: ``says`` as sentences, ``body`` as Markdown with tables and links.
    """
    base = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
    tried = []
    for candidate in _as_list(candidates):
        tab = tab_of(dag_run.dag_id, dag_run.run_id, candidate["training"], candidate["map_index"])
        tried.append(
            {
                "rate": candidate["rate"],
                "accuracy": None if _why_failed(candidate) else candidate["accuracy"],
                "page": f"{base}/{tab}",
                "chosen": candidate.get("path") == contenders[0]["path"],
            }
        )
    scores = [result["accuracy"] for result in judged]
    says = _comparison_as_text(contenders[0]["rate"], scores, tried, params["threshold"])
    _LOG.info(says)
    # scores[1:] holds the champion's accuracy. Without a champion it is empty: then its sum is 0.
    lead = round(scores[0] - sum(scores[1:]), _LEAD_DIGITS)
    return {
        "better": lead > params["threshold"],
        "accuracy": scores[0],
        "says": says,
        "body": _comparison_as_markdown(says, contenders, scores, tried),
    }


def _comparison_as_text(
    rate: float, scores: Sequence[float], tried: Sequence[Fields], threshold: float
) -> str:
    """Describe the accuracy reached, the accuracy needed, and the candidates that failed.

    ``scores``: the accuracy of the candidate, and of the champion if there is one; ``rate``: the candidate's
    learning rate; ``tried``: the rate and accuracy of each candidate, which is None if it failed.
    """
    percentages = _as_percentages(scores)
    if len(percentages) == 1:
        champion_part = "there is no champion yet"
        needed = f"more than {100 * threshold:g} %"
    else:
        champion_part = f"the champion {percentages[1]}"
        needed = f"a lead of more than {100 * threshold:g} points" if threshold else "any lead"
    text = (
        f"The candidate of learning rate {rate:g} reached accuracy {percentages[0]} on digits that neither "
        f"saw, {champion_part}; needed was {needed}."
    )
    failed_rates = ", ".join(f"{trial['rate']:g}" for trial in tried if trial["accuracy"] is None)
    if failed_rates:
        text += f" Candidates that failed: those of learning rate {failed_rates}."
    return text


def _comparison_as_markdown(
    says: str, contenders: Sequence[Fields], scores: Sequence[float], tried: Sequence[Fields]
) -> str:
    """Return the comparison as Markdown: ``says``, a table of the contenders, and one of all candidates."""
    model_rows = [
        ["accuracy on digits that neither saw", *_as_percentages(scores)],
        ["learning rate", *(f"{contender['rate']:g}" for contender in contenders)],
        ["trained on version", *(Path(contender["data"]).name for contender in contenders)],
        ["sha256", *(f"`{contender['sha256'][:12]}`" for contender in contenders)],
    ]
    if len(contenders) == 1:
        model_rows = [[*row, "none yet"] for row in model_rows]  # in the champion's column
    models_table = _markdown_table(["", "candidate", "champion"], model_rows)
    links = [f"[The candidate's training]({trial['page']})" for trial in tried if trial["chosen"]][:1]

    succeeded = [trial for trial in tried if trial["accuracy"] is not None]
    succeeded.sort(key=lambda trial: trial["accuracy"], reverse=True)
    failed = [trial for trial in tried if trial["accuracy"] is None]
    results = [*_as_percentages([trial["accuracy"] for trial in succeeded]), *(["failed"] * len(failed))]
    candidate_rows = []
    for trial, result in zip([*succeeded, *failed], results, strict=True):
        role = "the candidate" if trial["chosen"] else ""
        candidate_rows.append([f"[{trial['rate']:g}]({trial['page']})", result, role])
    candidates_table = _markdown_table(
        ["learning rate", "accuracy on digits to choose by", ""], candidate_rows
    )
    return "\n\n".join([says, models_table, *links, candidates_table]) + "\n"


def _as_percentages(shares: Sequence[float]) -> list[str]:
    """Format shares as percentages, all with the fewest decimals by which different shares look different.

    There are at most four decimals: shares that differ by less look equal.
    """
    for digits in range(1, _MAX_DECIMALS + 1):
        texts = [f"{100 * share:.{digits}f} %" for share in shares]
        if len(set(texts)) == len(set(shares)):
            break
    return texts


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def road(better: bool, params: Any = None) -> str | None:
    """Choose the next task: ``approve`` asks a person, ``promote`` does not; None: neither runs."""
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
    """Promote the best candidate, and record it in the asset's event and in the model registry.

    ``contenders`` is what ``choose`` returned. ``accuracy`` is the candidate's on the holdout rows. If the
    registry does not answer, that is only a warning in the log. Returns the fields of the new champion.

    Raises:
        AirflowFailException: An accuracy is no finite number, another candidate was promoted meanwhile, or
            the model is gone.
    """
    from manycpu.pipeline.tracking.ending import tell_champion

    best = contenders[0]
    # `best` has its accuracy on the rows for choosing; `accuracy` is that on the holdout rows.
    if reason := _why_failed(best) or _why_failed({"accuracy": accuracy}):
        raise AirflowFailException(f"nothing was promoted: {reason}")
    metrics = {**best["metrics"], "holdout_accuracy": accuracy}
    candidate = Candidate(**{**best, "metrics": metrics})
    compared_with = contenders[1]["number"] if len(contenders) > 1 else 0  # 0: there was no champion
    try:
        promoted = make_champion(_champion_folder(params), candidate, instead_of=compared_with)
    except ManycpuError as error:  # a retry would fail too
        raise AirflowFailException(str(error)) from error
    _LOG.info("promotion %d: %s", promoted.number, promoted.path)
    fields = promoted.model_dump(mode="json")
    outlet_events[task.outlets[0]].extra = {name: fields[name] for name in ("path", "sha256", "metrics")}
    tell_champion(promoted.key, promoted.sha256)
    return fields


def tidy(run: str, models: str, params: Any = None, ti: Any = None) -> list[str]:
    """Delete the models of this DAG run's candidates except the promoted one; returns the deleted names.

    Then fail the DAG run if task ``conclude`` did not succeed. Airflow alone would show a success if a person
    marked the DAG run failed: it skips the tasks that have not begun, and a skipped task is no failure.

    Args:
        run: Name of the DAG run; the names of the copies for a promotion begin with it.
        models: Folder with the outputs of the trainings.
        params: Parameters of the DAG run.
        ti: The task instance of this task.

    Raises:
        AirflowFailException: ``conclude`` did not succeed.
    """
    deleted = discard(_champion_folder(params), run)
    if Path(models).exists():
        deleted += [path.name for path in sorted(Path(models).iterdir())]
        shutil.rmtree(models)
    _LOG.info("removed: %s", ", ".join(deleted) or "nothing")
    state = state_of(place_of({"ti": ti}) | {"task_id": "conclude"})
    if state != "success":
        raise AirflowFailException(f"the DAG run has no conclusion: task conclude is {state}")
    return deleted


def conclude(ti: Any = None) -> Fields:
    """Summarise the DAG run in a few sentences; this task runs only if no task but a training failed.

    Returns ``promoted`` (whether a model was promoted), if so the paths ``model`` and ``predictions``, and
    the summary ``says``.
    """
    names = ("begin", "compare", "approve", "promote")
    begun, compared, approval, promoted = (ti.xcom_pull(task_ids=name) for name in names)
    paths: Fields = {}
    if not compared["better"]:
        decision = "That is not enough: nothing was promoted."
    elif not promoted:
        decision = "It was not approved: nothing was promoted."
    else:
        paths = {"model": promoted["path"], "predictions": begun["predictions"]}
        decision = "The threshold decided: it was promoted."
        if approval is not None:
            name = approval.get("responded_by_user")
            if isinstance(name, dict):  # a user with id and name
                name = name.get("name") or name.get("id")
            decision = f"It was promoted: {name} approved."
        decision += f" The model is in {paths['model']}, its predictions are in {paths['predictions']}."
    says = f"{compared['says']} {decision}"
    _LOG.info(says)
    return {"promoted": bool(paths), **paths, "says": says}


def _as_list(results: Iterable[Fields] | Fields) -> list[Fields]:
    """Return the results of a mapped group as a list: Airflow gives a single result without a list."""
    return [dict(results)] if isinstance(results, dict) else list(results)


def _why_failed(candidate: Fields) -> str | None:
    """Return why a candidate failed or cannot be compared; None: it succeeded, and can be compared."""
    accuracy = candidate.get("accuracy")
    if "error" in candidate:
        return str(candidate["error"])
    if isinstance(accuracy, int | float) and math.isfinite(accuracy):
        return None
    return f"its accuracy is no finite number: {accuracy!r}"


def _champion_folder(params: Mapping[str, Any]) -> Path:
    """Return the folder of data sets and champions: parameter ``folder``, or else one in $MANYCPU_HOME.

    Raises:
        AirflowFailException: It is a URL or a relative path: promotions need a file system.
    """
    from manycpu.pipeline.adapters.storage import is_remote
    from manycpu.pipeline.targets.context import home

    folder = params["folder"]
    if not folder:
        return home() / "champion"
    if is_remote(folder) or not Path(folder).expanduser().is_absolute():
        raise AirflowFailException(f"params.folder: {folder!r} is no absolute path. Give a folder on a disk")
    return Path(folder).expanduser()
