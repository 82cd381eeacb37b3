"""Validate plain dictionaries as runs and targets, with errors that name the field and what to do."""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from manycpu.pipeline.spec.credentials import HIDDEN, is_secret, redacted_options
from manycpu.pipeline.spec.errors import Finding, as_error
from manycpu.pipeline.spec.targets import FOLDER_PATTERN, KINDS, NAME_PATTERN, TargetFields
from manycpu.pipeline.spec.training_run import LABEL_PATTERN, TrainingRun
from manycpu.pipeline.spec.words import AMOUNT_PATTERN, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
PATTERN_HINTS: Final = {
    AMOUNT_PATTERN: "an amount is needed, such as 8Gi or 500M",
    FOLDER_PATTERN: "an absolute path is needed, with no slash at its end",
    LABEL_PATTERN: "small letters, digits and hyphens are needed, with a letter first and no hyphen last",
    NAME_PATTERN: "small letters, digits, dots and hyphens are needed, with a letter or digit first and last",
}
_IN_YAML: Final = {
    "tuple_type": "a list is needed",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping is needed",
    "string_type": "a text is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
}
"""Type of pydantic's error, which uses Python's words -> a message in the words of a run file."""
_THOUSANDTHS: Final = re.compile(r"(\d{1,9})m")
"""Matches an amount of cores as Kubernetes writes it: ``500m``."""
_OF_TEXTS: Final = {"string_pattern_mismatch", "string_too_short", "string_too_long", "value_error"}
"""Types of pydantic's errors about the content of a text."""


def read_run(fields: Mapping[str, Any] | TrainingRun) -> TrainingRun:
    """Validate the fields of a run.

    Raises:
        BadInputError: A field is wrong; the message names each one, and what to do.
    """
    return _valid(_run_or_findings(fields))


def read_target(fields: Mapping[str, Any] | TargetFields | None) -> TargetFields:
    """Validate the fields of a target; None: this machine.

    Raises:
        BadInputError: A field is wrong; the message names each one, and what to do.
    """
    return _valid(_target_or_findings(fields))


def read_both(
    run: Mapping[str, Any] | TrainingRun, target: Mapping[str, Any] | TargetFields | None
) -> tuple[TrainingRun, TargetFields]:
    """Validate the fields of a run and of its target, as :func:`read_run` and :func:`read_target` do.

    Raises:
        BadInputError: A field is wrong; the message names each one of both, and what to do.
    """
    read = _run_or_findings(run), _target_or_findings(target)
    wrong = [finding for part in read if isinstance(part, list) for finding in part]
    if wrong:
        raise as_error(wrong)
    return _valid(read[0]), _valid(read[1])  # neither raises: none of them is a list of findings


def read_recorded(run: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[TrainingRun, TargetFields]:
    """Read the fields of a run and of its target from a ledger, which an older version may have written.

    That version may have accepted a text that this one refuses. Such a text stays as it is, so that the run
    can be followed, cancelled and deleted.

    Raises:
        BadInputError: A field is unknown, or its value has another form.
    """
    model = KINDS.get(str(target.get("kind", "local")))
    valid_target = _recorded(model, target, "target") if model else read_target(target)
    return _recorded(TrainingRun, run, "run"), valid_target


def _recorded(model: type[Model], fields: Mapping[str, Any], prefix: str) -> Model:
    """Validate recorded fields; a text whose content is refused is returned as it is.

    Raises:
        BadInputError: A field is wrong in another way.
    """
    refused = {}
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            text = problem["input"]
            is_own_field = len(problem["loc"]) == 1  # else it is within a list or a mapping
            if problem["type"] in _OF_TEXTS and is_own_field and isinstance(text, str):
                refused[str(problem["loc"][0])] = text
    others = {name: value for name, value in fields.items() if name not in refused}
    # A field without a default needs a value that is valid, until it gets its own.
    others |= {name: "x" for name in refused if model.model_fields[name].is_required()}
    # _valid() raises if another field is wrong; model_copy() validates nothing.
    return _valid(_model_or_findings(model, others, prefix)).model_copy(update=refused)


def _valid(read: Model | list[Finding]) -> Model:
    """Return the model; if there are findings instead, raise them as one BadInputError."""
    if isinstance(read, list):
        raise as_error(read)
    return read


def _run_or_findings(fields: Mapping[str, Any] | TrainingRun) -> TrainingRun | list[Finding]:
    """Validate the fields of a run; return a finding for each wrong one."""
    if isinstance(fields, TrainingRun):
        return fields
    if not isinstance(fields, Mapping):
        return [_no_mapping("run", fields)]
    return _model_or_findings(TrainingRun, fields, "run")


def _target_or_findings(fields: Mapping[str, Any] | TargetFields | None) -> TargetFields | list[Finding]:
    """Validate the fields of a target; return a finding for each wrong one."""
    if isinstance(fields, TargetFields):
        return fields
    if not isinstance(fields, Mapping | None):
        return [_no_mapping("target", fields)]
    fields = {"kind": "local", **(fields or {})}
    kind = fields["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        return [Finding("target.kind", f"there is no target {kind!r}", _suggest(KINDS, like=str(kind)))]
    return _model_or_findings(KINDS[kind], fields, "target")


def _model_or_findings(model: type[Model], fields: Mapping[str, Any], prefix: str) -> Model | list[Finding]:
    """Validate fields by a model; return a finding for each wrong one. ``prefix``: ``run`` or ``target``."""
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # After `except`: the traceback of an error that is raised within it shows pydantic's error, with its
    # input, which may have credentials.
    return [_finding(dict(problem), prefix, model) for problem in problems]


def _no_mapping(name: str, given: object) -> Finding:
    """Make the finding for a run or a target (``name``) that is given as something else than a mapping."""
    fix = f"Give the fields of `{name}` as a dictionary; `manycpu run FILE` reads them from a run file"
    return Finding(name, f"a mapping is needed; given was a {type(given).__name__}", fix)


def _finding(problem: dict[str, Any], prefix: str, model: type[BaseModel]) -> Finding:
    """Translate an error of pydantic to a finding: what is wrong with which field, and the fix.

    Args:
        problem: One of the errors that ``ValidationError.errors()`` lists.
        prefix: ``run`` or ``target``.
        model: The model that the error is of.
    """
    path = [str(part) for part in problem["loc"]]
    field = ".".join([prefix, *path])
    if problem["type"] == "extra_forbidden":  # of the model itself, or of a field that is a model (resources)
        parent_model = model if len(path) == 1 else _model_of_field(model.model_fields[path[0]])
        names = list(parent_model.model_fields) if parent_model else []
        fix = _suggest_other_kind(prefix, path) or _suggest(names, like=path[-1])
        return Finding(field, "there is no such field", fix)
    if problem["type"] == "missing":
        return Finding(field, "this field is needed", _example(path, model))
    is_hidden = len(path) > 1 and is_secret(path[-1])  # a variable, such as run.env.HF_TOKEN
    given = HIDDEN if is_hidden else _given_in_message(problem["input"])
    if problem["type"] == "string_pattern_mismatch":
        wanted = PATTERN_HINTS[problem["ctx"]["pattern"]]
    else:
        wanted = _IN_YAML.get(problem["type"]) or str(problem["msg"]).removeprefix("Value error, ")
    message = f"{wanted}; given was {given}"
    if problem["type"] == "string_type" and isinstance(problem["input"], bool):
        return Finding(field, message, "YAML reads no, off, yes and on as truth values: put it in quotes")
    if problem["type"] == "float_parsing" and (match := _THOUSANDTHS.fullmatch(str(problem["input"]))):
        return Finding(field, message, f"Write it in cores: {int(match[1]) / 1000:g}")
    return Finding(field, message, _suggest_choice(problem, prefix, path) or _example(path, model))


def _suggest_choice(problem: Mapping[str, Any], prefix: str, path: list[str]) -> str | None:
    """Suggest a choice that is like the given value; None: the field has no choices, or none is like it."""
    given = problem["input"]
    if problem["type"] != "literal_error" or not isinstance(given, str):
        return None
    if path == ["launch"] and (fix := _suggest_other_kind(prefix, path, given)):
        return fix  # the launch kind exists, and is one of another kind of target
    choices = re.findall("'([^']+)'", problem["ctx"]["expected"])  # pydantic has them as text, in quotes
    return did_you_mean(given, choices)


def _suggest_other_kind(prefix: str, path: list[str], value: str | None = None) -> str | None:
    """Write a fix that names the kinds of target that have a field, or accept its value; None: none does.

    None also for fields of the run, and for a name within a field.
    """
    if prefix != "target" or len(path) > 1:
        return None
    kinds = [kind for kind, model in KINDS.items() if _accepts(model, path[0], value)]
    return f"Set target.kind to {' or '.join(map(repr, kinds))} to have it" if kinds else None


def _accepts(model: type[BaseModel], name: str, value: str | None) -> bool:
    """Whether a model has a field and, unless ``value`` is None, accepts the value for it."""
    if name not in model.model_fields:
        return False
    if value is None:
        return True
    try:
        model.model_validate({name: value})
    except ValidationError as error:
        # Other fields are missing: only an error of this field counts.
        return all(problem["loc"][0] != name for problem in error.errors(include_input=False))
    return True


def _given_in_message(value: object) -> str:
    """Write a value for a message; of a mapping only the names, since an environment may hold secrets."""
    if isinstance(value, Mapping):
        names = redacted_options(map(str, value))  # of NAME=value
        return f"a mapping of {', '.join(map(repr, names)) or 'nothing'}"
    if isinstance(value, (list, tuple)):
        return repr(redacted_options(map(str, value)))
    if isinstance(value, str):
        return repr(redacted_options([value])[0])
    return repr(value)


def _suggest(choices: Mapping[str, object] | list[str], like: str = "") -> str:
    """Suggest the choice that is most like a text; if none is like it, list all choices."""
    return did_you_mean(like, choices) or f"Choose one of: {', '.join(choices)}"


def _example(path: list[str], model: type[BaseModel]) -> str:
    """Return what to do about a field: its description, with an example if it has one."""
    field = _innermost_field(path, model)
    if field is None:
        return "See the reference of fields."
    examples = f" For example: {field.examples[0]!r}." if field.examples else ""
    return f"{field.description}{examples}"


def _innermost_field(path: list[str], model: type[BaseModel]) -> FieldInfo | None:
    """Return the deepest field that a path of pydantic leads to; None: it begins with no field.

    The end of a path may be a key of a mapping or an index of a list, which are no fields.
    """
    field = model.model_fields.get(path[0]) if path else None
    inner_model = _model_of_field(field) if field else None
    if inner_model is None:
        return field
    return _innermost_field(path[1:], inner_model) or field


def _model_of_field(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model that a field's value is; None: the value is no model, so it has no fields."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
