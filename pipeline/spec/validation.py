"""Validate plain dictionaries as runs and targets, with errors that name the field and what to do."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from manycpu.pipeline.spec.errors import BadInputError, Finding, as_error
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local, Target
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["read_run", "read_target"]

_TARGETS: TypeAdapter[Target] = TypeAdapter(Target)
_KINDS: dict[str, type[BaseModel]] = {"local": Local, "baremetal": BareMetal, "kubernetes": Kubernetes}


def read_run(fields: Mapping[str, Any] | TrainingRun) -> TrainingRun:
    """Validate the fields of a run.

    Raises:
        BadInputError: Every field that is wrong, with what to do.
    """
    if isinstance(fields, TrainingRun):
        return fields
    try:
        return TrainingRun.model_validate(dict(fields))
    except ValidationError as error:
        findings = _findings(error, "run", TrainingRun)
    # Not where it was caught: a traceback would show that error too, with credentials that were given.
    raise as_error(findings)


def read_target(fields: Mapping[str, Any] | Target | None) -> Target:
    """Validate the fields of a target; none at all is this machine.

    Raises:
        BadInputError: Every field that is wrong, with what to do.
    """
    if isinstance(fields, (Local, BareMetal, Kubernetes)):
        return fields
    fields = {"kind": "local", **(fields or {})}
    kind = fields["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        fix = _choose(_KINDS, like=str(kind))
        raise BadInputError(f"there is no target {kind!r}", field="target.kind", fix=fix)
    try:
        return _TARGETS.validate_python(fields)
    except ValidationError as error:
        findings = _findings(error, "target", _KINDS[kind])
    raise as_error(findings)


def _findings(error: ValidationError, prefix: str, model: type[BaseModel]) -> list[Finding]:
    return [_finding(dict(problem), prefix, model) for problem in error.errors(include_url=False)]


def _finding(problem: dict[str, Any], prefix: str, model: type[BaseModel]) -> Finding:
    # The union's discriminator stands first in a target's locations, and is no field.
    path = [str(part) for part in problem["loc"] if part not in _KINDS]
    field = ".".join([prefix, *path])
    if problem["type"] == "extra_forbidden":
        choices = _fields_beside(path, model)
        return Finding(field, "there is no such field", _choose(choices, like=path[-1]))
    if problem["type"] == "missing":
        return Finding(field, "this field is needed", _example(path, model))
    message = str(problem["msg"]).removeprefix("Value error, ")
    return Finding(field, f"{message}; given was {_shown(problem['input'])}", _example(path, model))


def _shown(value: object) -> str:
    """Show a value; of a mapping only the names: an environment's values may be secret."""
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(repr, value)) or 'nothing'}"
    return repr(value)


def _fields_beside(path: list[str], model: type[BaseModel]) -> list[str]:
    if len(path) == 1:
        return list(model.model_fields)
    inner = model.model_fields[path[0]].annotation
    return list(inner.model_fields) if isinstance(inner, type) and issubclass(inner, BaseModel) else []


def _choose(choices: Mapping[str, object] | list[str], like: str = "") -> str:
    near = difflib.get_close_matches(like, list(choices), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(choices)}"


def _example(path: list[str], model: type[BaseModel]) -> str:
    field = model.model_fields.get(path[0]) if path else None
    if field is None:
        return "See the reference of fields."
    examples = f" For example: {field.examples[0]!r}." if field.examples else ""
    return f"{field.description}{examples}"
