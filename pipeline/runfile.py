"""Run files: YAML with ``run`` and ``target``, as ``manycpu run`` takes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["read_run_file"]

_PARTS = ("run", "target")


def read_run_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the fields of a run and of a target from a run file.

    Raises:
        BadInputError: There is no such file, it is not YAML, or it has other parts than these two.
    """
    script = f"Give a script as --program {path}" if path.suffix == ".py" else None
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be read: {error.strerror}", fix="Give the path of a run file"
        ) from error
    except yaml.YAMLError as error:
        fix = script or "Mend it at the line above"
        raise BadInputError(f"{path} is not YAML: {error}", fix=fix) from error
    if not isinstance(content, Mapping):
        fix = script or "Begin it with `run:` and, below, `program: ...`"
        raise BadInputError(f"{path} holds no fields", fix=fix)
    _refuse_other_parts(path, content)
    return _part(path, content, "run"), _part(path, content, "target")


def _refuse_other_parts(path: Path, content: Mapping[str, Any]) -> None:
    for name in content:
        if name not in _PARTS:
            raise BadInputError(
                f"{path} has a part {name!r}",
                field=str(name),
                fix=_fix_of_part(str(name)),
            )


def _fix_of_part(name: str) -> str:
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
