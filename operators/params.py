"""The fields of runs and targets as parameters of a DAG: make the trigger form, and read it back.

The form is flat: a nested field is named after its path (``resources_cpu``), a field of a target after the
target's kind (``baremetal_hostfile``), and ``target_kind`` chooses.
"""

from __future__ import annotations

import difflib
import shlex
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from airflow.sdk import Param
    from pydantic import BaseModel

__all__ = ["read_params", "training_params"]

_KIND = "target_kind"
# What JSON schema and Airflow's form call the same.
_KEPT = ("enum", "minimum", "maximum", "exclusiveMinimum", "pattern", "minLength", "maxLength", "format")
_FILLED_IN = {"output": "Left empty: a folder of the DAG run's own among the models of $MANYCPU_HOME."}
_LEAVE_OUT: tuple[object, ...] = (None, "", [], {}, ())


def training_params(defaults: Mapping[str, Any] | None = None) -> dict[str, Param]:
    """Make the parameters of a DAG whose runs say what to train, with sections, help texts and bounds.

    Args:
        defaults: What the form holds at first, by the names of the parameters.
    """
    from airflow.sdk import Param

    defaults = defaults or {}
    kinds = _kinds()
    choice = {
        "type": "string",
        "enum": list(kinds),
        "values_display": {kind: f"{kind}: {_first_line(model)}" for kind, model in kinds.items()},
        "section": "Target",
        "description": "Where to train.",
    }
    specs = {**_run_specs(), _KIND: {"default": next(iter(kinds)), **choice}}
    for kind, model in kinds.items():
        specs |= {f"{kind}_{name}": spec for name, spec in _target_specs(kind, model)}
    fields = {
        name: spec | ({"default": defaults[name]} if name in defaults else {}) for name, spec in specs.items()
    }
    return {name: Param(**spec) for name, spec in fields.items()}


def read_params(
    params: Mapping[str, Any], declared: Collection[str], run_id: str, key: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build the fields of a run and of a target from a DAG run's parameters.

    Args:
        params: The parameters, flat.
        declared: Names that the DAG declares, of its own ones as well.
        run_id: Names the output where none is given.
        key: Tells that output from those of other trainings.

    Raises:
        BadInputError: The configuration names a parameter that there is not.
    """
    _refuse_unknown(params, declared)
    run: dict[str, Any] = {}
    for name in _run_names():
        value = params.get("_".join(name))
        if value not in _LEAVE_OUT:
            _put(run, name, value)
    run.setdefault("output", _default_output(run_id, key))
    kind = params.get(_KIND) or next(iter(_kinds()))
    # A field that was left as it was is one that was left out: others may decide it.
    target = {
        name: params[f"{kind}_{name}"]
        for name, field in _kinds()[kind].model_fields.items()
        if params.get(f"{kind}_{name}") not in (*_LEAVE_OUT, field.default)
    }
    return run, {"kind": kind, **target}


def _kinds() -> dict[str, type[BaseModel]]:
    from manycpu.pipeline.spec.targets import Target

    union = get_args(get_args(Target)[0])
    return {model.model_fields["kind"].default: model for model in union}


def _run_schema() -> dict[str, Any]:
    from manycpu.pipeline.spec.training_run import TrainingRun

    return _schema(TrainingRun)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """Mark in a model's schema which of its lists can be given as text, as in a shell."""
    from pydantic import BeforeValidator

    schema = model.model_json_schema()
    for name, field in schema["properties"].items():
        validators = model.model_fields[name].metadata
        field["text"] = any(isinstance(validator, BeforeValidator) for validator in validators)
    return schema


def _run_specs() -> dict[str, dict[str, Any]]:
    schema = _run_schema()
    specs: dict[str, dict[str, Any]] = {}
    for name, field in schema["properties"].items():
        inner = _inner(field, schema)
        if name in _FILLED_IN:
            field["description"] += f" {_FILLED_IN[name]}"
        if inner is None:
            specs[name] = _spec(field, required=name in schema.get("required", ()) and name not in _FILLED_IN)
            continue
        for part, inner_field in inner["properties"].items():
            specs[f"{name}_{part}"] = _spec({"section": field.get("section"), **inner_field})
    return specs


def _run_names() -> Iterator[tuple[str, ...]]:
    schema = _run_schema()
    for name, field in schema["properties"].items():
        inner = _inner(field, schema)
        yield from ((name, part) for part in inner["properties"]) if inner else [(name,)]


def _inner(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """Find the schema of a field that is a model itself."""
    reference = field.get("$ref")
    return schema["$defs"][reference.rsplit("/", 1)[-1]] if reference else None


def _target_specs(kind: str, model: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in _schema(model)["properties"].items():
        if name != "kind":
            # Nullable, also where this target needs it: the run may go to another.
            section = str(field["section"])
            part = "" if section == "Target" else f", {section.lower()}"
            yield name, _spec(field | {"section": f"Target: {kind}{part}"})


def _spec(field: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    """Translate the pydantic schema of a field to Airflow's."""
    choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
    types = [str(choice.get("type", "string")) for choice in choices]
    facets = {name: value for choice in choices for name, value in choice.items() if name in _KEPT}
    if "const" in field:
        facets["enum"] = [field["const"]]
    default = field.get("default")
    if field.get("text") and types == ["array"]:
        types, default = ["string", "array"], shlex.join(default or ())
        facets["format"] = "multiline"
    if types == ["integer", "string"]:
        types, default = ["string"], str(default)  # of several types the form makes a text area
    if "array" in types and (items := choices[0].get("items", {})).get("type") != "string":
        facets["items"] = items  # the form takes them as JSON, strings a line each
    nullable = ["null"] if default in _LEAVE_OUT and not required else []
    if nullable and "enum" in facets:
        facets["enum"] = [*facets["enum"], None]
    spec = {
        "type": [*nullable, *types],
        "section": field.get("section"),
        "description": _help(field),
        **facets,
    }
    return spec if required else spec | {"default": default}


def _help(field: dict[str, Any]) -> str:
    examples = [example for example in field.get("examples", ()) if isinstance(example, (str, int))]
    shown = ", ".join(str(example) for example in examples)
    text = str(field.get("description", "")) + (f" For example: {shown}" if shown else "")
    return text.replace("`", "")  # the form's lines are too close for code


def _first_line(model: type[BaseModel]) -> str:
    return str(model.__doc__).strip().splitlines()[0].rstrip(".").lower()


def _put(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *outer, last = path
    for name in outer:
        fields = fields.setdefault(name, {})
    fields[last] = value


def _default_output(run_id: str, key: str) -> str:
    from manycpu.pipeline.spec.naming import run_name
    from manycpu.pipeline.targets.context import home

    return str(home() / "models" / run_name(run_id, key))


def _refuse_unknown(params: Mapping[str, Any], declared: Collection[str]) -> None:
    from manycpu.pipeline.spec.errors import Finding, raise_findings

    unknown = [name for name in params if name not in declared]
    raise_findings(
        Finding(f"params.{name}", "there is no such parameter", _nearest(name, declared)) for name in unknown
    )


def _nearest(name: str, declared: Collection[str]) -> str:
    near = difflib.get_close_matches(name, declared, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Choose among: {', '.join(declared)}"
