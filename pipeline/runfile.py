"""Run files: YAML with ``run`` and ``target``, as ``manycpu run`` takes them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.targets import KINDS
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["is_run_file", "parse_yaml", "read_mapping", "read_run_file"]

_PARTS = ("run", "target")
_OF_ACCELERATE = ("compute_environment", "distributed_type")
_SUFFIXES = (".yaml", ".yml")
_LARGEST = 64 << 10  # bytes of a file that may be a run file
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its numbers in base 60, as in YAML 1.2: 1:4 is a range of nodes, and 12:30 a time."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(rf"(?!.*:){pattern.pattern}", re.VERBOSE) if tag in _NUMBERS else pattern)
        for tag, pattern in resolvers
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Any:
    """Parse YAML; of numbers with colons, such as 1:4, nothing is computed.

    >>> parse_yaml("{nnodes: 1:4, nproc_per_node: 2, at: 12:30:15.5}")
    {'nnodes': '1:4', 'nproc_per_node': 2, 'at': '12:30:15.5'}
    """
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def read_run_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the fields of a run and of a target from a run file.

    Raises:
        BadInputError: There is no such file, it is not YAML, or it has other parts than these two.
    """
    is_script = f"Give a script as --program {path}, with --output" if path.suffix == ".py" else None
    content = read_mapping(path, "a run file", "Begin it with `run:` and, below, `program: ...`", is_script)
    if is_script and content.keys() - {*_PARTS}:
        raise _no_fields(path, "a run file", is_script)  # though some Python is YAML
    _refuse_other_parts(path, content)
    return _part(path, content, "run"), _part(path, content, "target")


def is_run_file(path: Path) -> bool:
    """Whether a file is surely a run file, and no settings of a program.

    It is YAML with `run`, which has a program, or with `target`, which has a kind, or with both; and with no
    other part and no field that is not ours.
    """
    if path.suffix not in _SUFFIXES or path.stat().st_size > _LARGEST:
        return False
    try:
        content = parse_yaml(path.read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    if not isinstance(content, Mapping) or not content or content.keys() - {*_PARTS}:
        return False
    run, target = (content.get(part) or {} for part in _PARTS)
    if not isinstance(run, Mapping) or not isinstance(target, Mapping):
        return False
    kind = KINDS.get(str(target.get("kind", "local")))
    known = not run.keys() - TrainingRun.model_fields and not target.keys() - (
        kind.model_fields if kind else {}
    )
    return known and ("program" in run or "kind" in target)


def read_mapping(path: Path, what: str, shape: str, mistaken: str | None = None) -> Mapping[str, Any]:
    """Read a YAML file that holds names and values.

    Args:
        path: The file.
        what: What kind of file it is to be, for who has none.
        shape: What to do where it holds something else.
        mistaken: What to do instead, where the path shows that another kind of file was given.

    Raises:
        BadInputError: There is no such file, it is not YAML, or it holds something else.
    """
    try:
        content = parse_yaml(path.read_text())
    except OSError as error:
        fix = ". ".join(filter(None, [f"Give the path of {what}", mistaken]))
        raise BadInputError(f"{path} cannot be read: {error.strerror}", fix=fix) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if mistaken or isinstance(error, UnicodeDecodeError):  # where in it helps nobody
            raise _no_fields(path, what, mistaken) from error
        raise BadInputError(f"{path} is not YAML: {error}", fix="Mend it at the line above") from error
    if not isinstance(content, Mapping):
        raise BadInputError(f"{path} holds no fields", fix=mistaken or shape)
    return content


def _no_fields(path: Path, what: str, mistaken: str | None) -> BadInputError:
    return BadInputError(f"{path} is not {what}", fix=mistaken or f"Give the path of {what}")


def _refuse_other_parts(path: Path, content: Mapping[str, Any]) -> None:
    for name in content:
        if name not in _PARTS:
            raise BadInputError(
                f"{path} has a part {name!r}",
                field=str(name),
                fix=_fix_of_part(path, str(name)),
            )


def _fix_of_part(path: Path, name: str) -> str:
    if name in _OF_ACCELERATE:
        return f"Give a config of Accelerate as --accelerate-config {path}, before the script"
    if name in TrainingRun.model_fields:
        return f"Indent `{name}` below `run:`"
    return "A run file has the parts `run` and `target`"


def _part(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = content.get(name) or {}
    if not isinstance(part, Mapping):
        example = "run: {program: ...}" if name == "run" else f"target: {{kind: {part}}}"
        fix = f"Indent its fields below it, as in `{example}`"
        raise BadInputError(f"{path}: {name!r} is {part!r}, not fields", field=name, fix=fix)
    return dict(part)
