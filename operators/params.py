"""The fields of runs and targets as parameters of a DAG: make the trigger form, and read it back.

The form is flat. A nested field is named after its path (``resources_cpu``). The name of a target's field
begins with the target's kind (``baremetal_hostfile``). The parameter ``target_kind`` chooses the target.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from airflow.sdk import Param
from pydantic import BaseModel, BeforeValidator

from manycpu.pipeline.spec.errors import Finding, raise_findings
from manycpu.pipeline.spec.naming import run_name
from manycpu.pipeline.spec.targets import Target
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import did_you_mean

_KIND = "target_kind"
# Keywords with the same meaning in JSON schema and in Airflow's form.
_SHARED_KEYWORDS = (
    *("enum", "minimum", "maximum", "exclusiveMinimum", "pattern", "minLength", "maxLength", "format"),
)
# Required field that the form may leave empty -> the value that it then gets, in words.
_FILLED_IN = {"output": "Left empty: a folder of the DAG run's own among the models of $MANYCPU_HOME."}
_EMPTY_VALUES: tuple[object, ...] = (None, "", [], {}, ())  # a parameter with one of these was left empty


def training_params(defaults: Mapping[str, Any] | None = None) -> dict[str, Param]:
    """Make the parameters of a DAG for all fields of a run and its target: they become its trigger form.

    Args:
        defaults: Initial values of the form, by the names of the parameters.

    Raises:
        BadInputError: There is no parameter of such a name.
    """
    specs = {
        "_".join(path): _param_arguments(field, required=required)
        for path, field, required in _fields_of_run()
    }
    kinds = _models_by_kind()
    specs[_KIND] = {
        "default": next(iter(kinds)),
        "type": "string",
        "enum": list(kinds),
        "values_display": {
            kind: f"{kind}: {str(model.__doc__).strip().splitlines()[0].rstrip('.').lower()}"
            for kind, model in kinds.items()
        },
        "section": "Target",
        "description": "Where to train.",
    }
    for kind, model in kinds.items():
        for name, field in _schema(model)["properties"].items():
            if name == "kind":  # `target_kind` chooses it
                continue
            section = str(field["section"])
            subsection = "" if section == "Target" else f", {section.lower()}"
            # Not required, even if this target requires the field: the run may choose another target.
            specs[f"{kind}_{name}"] = _param_arguments(field | {"section": f"Target: {kind}{subsection}"})
    _refuse_unknown(defaults or {}, specs)
    for name, default in (defaults or {}).items():
        specs[name]["default"] = default
    return {name: Param(**spec) for name, spec in specs.items()}


def read_params(
    params: Mapping[str, Any], declared: Collection[str], run_id: str, key: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a run, and those of its target, from a DAG run's parameters.

    Parameters that were left empty are left out of the fields.

    Args:
        params: The parameters of the DAG run.
        declared: Names of the parameters that the DAG has.
        run_id: Id of the DAG run. If no output is given, its path is made from this and ``key``.
        key: The run's key.

    Raises:
        BadInputError: A parameter is not declared.
    """
    from manycpu.pipeline.targets.context import home

    _refuse_unknown(params, declared)
    run: dict[str, Any] = {}
    for (*outer, last), _, _ in _fields_of_run():  # outer: the field that holds this one, if any
        value = params.get("_".join((*outer, last)))
        if value not in _EMPTY_VALUES:
            holder = run  # the mapping that holds this field
            for name in outer:
                holder = holder.setdefault(name, {})
            holder[last] = value
    if "output" not in run:
        run["output"] = str(home() / "models" / run_name(run_id, key))
    kinds = _models_by_kind()
    kind = params.get(_KIND) or next(iter(kinds))
    # A field with its default counts as left out, so that the model can choose its value.
    target = {
        name: params[f"{kind}_{name}"]
        for name, field in kinds[kind].model_fields.items()
        if params.get(f"{kind}_{name}") not in (*_EMPTY_VALUES, field.default)
    }
    return run, {"kind": kind, **target}


def _refuse_unknown(names: Collection[str], declared: Collection[str]) -> None:
    """Raise one BadInputError for all parameters that are not declared; it suggests similar names."""
    findings = []
    for name in names:
        if name not in declared:
            fix = did_you_mean(name, declared) or f"Choose among: {', '.join(declared)}"
            findings.append(Finding(f"params.{name}", "there is no such parameter", fix))
    raise_findings(findings)


def _models_by_kind() -> dict[str, type[BaseModel]]:
    """Return the models of targets by their kind."""
    union = get_args(get_args(Target)[0])  # Target is Annotated[one model | another, ...]
    return {model.model_fields["kind"].default: model for model in union}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON schema, with the key ``text`` in each field.

    For a list, it says whether the list may also be given as one string, which is split as in a shell.
    """
    schema = model.model_json_schema()
    for name, field in schema["properties"].items():
        validators = model.model_fields[name].metadata
        # The BeforeValidator of a list splits a string.
        field["text"] = any(isinstance(validator, BeforeValidator) for validator in validators)
    return schema


def _fields_of_run() -> Iterator[tuple[tuple[str, ...], dict[str, Any], bool]]:
    """Yield each field of a run as a tuple: its path, its JSON schema, and whether the form must ask for it.

    The path of a nested field has two names, such as ``("resources", "cpu")``; others have one.
    """
    schema = _schema(TrainingRun)
    for name, field in schema["properties"].items():
        if name in _FILLED_IN:
            field["description"] += f" {_FILLED_IN[name]}"
        reference = field.get("$ref")
        if reference is None:
            is_required = name in schema.get("required", ()) and name not in _FILLED_IN
            yield (name,), field, is_required
            continue
        # The field has fields of its own: each is a parameter.
        for part, inner in schema["$defs"][reference.rsplit("/", 1)[-1]]["properties"].items():
            yield (name, part), {"section": field.get("section"), **inner}, False


def _param_arguments(field: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    """Translate the JSON schema of a field to arguments of Airflow's Param, for the trigger form.

    A required field gets no default, so that the form asks for a value.
    """
    # A field of type `X | None` has two variants; `_nullable` adds null.
    variants = [variant for variant in field.get("anyOf", [field]) if variant.get("type") != "null"]
    types = [str(variant.get("type", "string")) for variant in variants]
    keywords = {
        name: value for variant in variants for name, value in variant.items() if name in _SHARED_KEYWORDS
    }
    if "const" in field:
        keywords["enum"] = [field["const"]]
    default = field.get("default")
    if field.get("text") and types == ["array"]:  # the form shows one text, as in a shell
        types = ["string", "array"]
        default = shlex.join(default or ())
        keywords["format"] = "multiline"
    if types == ["integer", "string"]:  # the form makes a text area of a field with several types
        types = ["string"]
        default = str(default)
    if "array" in types:
        items = variants[0].get("items", {})
        if items.get("type") != "string":  # then the form takes the list as JSON, not line by line
            keywords["items"] = items
    examples = [str(example) for example in field.get("examples", ()) if isinstance(example, (str, int))]
    description = str(field.get("description", ""))
    if examples:
        description += f" For example: {', '.join(examples)}"
    spec = {
        "type": types,
        "section": field.get("section"),
        "description": description.replace("`", ""),  # the lines of the form are too close for code
        **keywords,
    }
    if required:
        return spec
    if default in _EMPTY_VALUES:
        spec = _nullable(spec)
    return spec | {"default": default}


def _nullable(spec: dict[str, Any]) -> dict[str, Any]:
    """Allow null in the arguments of a Param: the form sends null for a field that is left empty."""
    nullable = spec | {"type": ["null", *spec["type"]]}
    if "enum" in spec:  # an enum refuses null unless it lists it
        nullable["enum"] = [*spec["enum"], None]
    return nullable
