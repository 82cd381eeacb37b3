"""Fields of every shape: what is read can be kept and launched, and all else is refused by name."""

import json
from typing import Any

import yaml
from hypothesis import given
from support.drawn import drawn, json_values
from support.drawn_runs import KUBERNETES, MACHINES, RUN, Fields, fields, junk
from support.job_manifests import place

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import JOB_LAUNCHERS, device_refusals, refusals
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.targets import KINDS, Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.validation import read_run, read_target

NEEDED = ("program", "output", "hostfile", "kind")


def refused(error: BadInputError, part: str, given: Fields) -> None:
    """Check that every line of an error names a field that was given, or one that is needed."""
    text = str(error)
    lines = [line.removeprefix("- ") for line in text.split("\n- ")[1:]] or [text]
    for line in lines:
        named = [name for name in (*given, *NEEDED) if line.startswith(f"{part}.{name}")]
        assert named or "\\ud800" in line, text  # a name that is no UTF-8 is quoted


def test_every_field_is_drawn() -> None:
    assert set(RUN) == set(TrainingRun.model_fields)
    assert set(KUBERNETES) == set(Kubernetes.model_fields)
    machines = {name for kind, model in KINDS.items() if kind != "kubernetes" for name in model.model_fields}
    assert set(MACHINES) == machines


@drawn(300)
@given(fields(RUN, "program", "output") | junk(RUN))
def test_a_run_is_read_and_kept_or_refused_by_name(given: Fields) -> None:
    try:
        run = read_run(given)
    except BadInputError as error:
        refused(error, "run", given)
        return
    kept = json.loads(json.dumps(run.model_dump(mode="json", exclude_defaults=True)))
    assert read_run(kept) == run
    assert TrainingRun.model_validate_json(run.model_dump_json()) == run
    assert run.nodes.least <= run.nodes.most


@drawn(300)
@given(
    fields(KUBERNETES, "kind") | junk(KUBERNETES) | fields(MACHINES, "kind") | junk(MACHINES) | json_values
)
def test_a_target_is_read_and_kept_or_refused_by_name(given: Any) -> None:
    try:
        target = read_target(given)
    except BadInputError as error:
        refused(error, "target", given) if isinstance(given, dict) else None
        return
    kept = json.loads(json.dumps(target.model_dump(mode="json", exclude_none=True)))
    assert read_target(kept) == target


@drawn(200)
@given(fields(RUN, "program", "output"), fields(KUBERNETES, "kind"))
def test_what_is_read_and_not_refused_makes_manifests(run_fields: Fields, target_fields: Fields) -> None:
    try:
        run, target = read_run(run_fields), read_target(target_fields)
    except BadInputError:
        return
    assert isinstance(target, Kubernetes)
    if [*refusals(run, target), *device_refusals(run, target)]:
        return
    written = JOB_LAUNCHERS[target.launch].objects(run, target, place(target.mount_path))
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert [*yaml.safe_load_all(as_yaml(*written))] == written
