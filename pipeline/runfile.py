"""Read run files: YAML with ``run`` and ``target``, as ``manycpu run`` takes them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.targets import KINDS
from manycpu.pipeline.spec.training_run import TrainingRun

_PARTS = ("run", "target")
_ACCELERATE_KEYS = ("compute_environment", "distributed_type")
_SUFFIXES = (".yaml", ".yml")
_MAX_BYTES = 64 << 10  # of a file that may be a run file


class _Written:
    """A number whose ``str`` is the text in the file, such as 012: text fields of a run get this text."""

    written: str

    def __str__(self) -> str:
        return self.written


class _WrittenInt(_Written, int):
    pass


class _WrittenFloat(_Written, float):
    pass


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.1, but keeps how numbers are written. A number in base 60 is text: 1:4 is a range.

    A key that is written twice is an error: of two values the reader would not know which one counts.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        composed: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in composed.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":  # of which a mapping may have several
                if key.value in seen:
                    problem = f"the key {key.value!r} is written twice"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return composed


_Construct = Callable[[yaml.SafeLoader, yaml.ScalarNode], float]


def _number(construct: _Construct, loader: _Loader, node: yaml.ScalarNode) -> object:
    """Construct a number that keeps its written form.

    Returns the text if it is no valid number, or is in base 60. ``construct``: makes the number from a node.
    """
    if ":" in node.value:  # in base 60
        return node.value
    try:
        number = construct(loader, node)
    except (ValueError, OverflowError):
        return node.value
    if str(number) == node.value:
        return number
    written = _WrittenInt(number) if isinstance(number, int) else _WrittenFloat(number)
    written.written = node.value
    return written


_Loader.add_constructor("tag:yaml.org,2002:int", partial(_number, yaml.SafeLoader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", partial(_number, yaml.SafeLoader.construct_yaml_float))


def parse_yaml(text: str) -> Any:
    """Parse YAML; ``str`` of a number is as it is written, and one with colons, such as 1:4, stays text.

    >>> parsed = parse_yaml("{nnodes: 1:4, nproc_per_node: 0x2, args: [012, 1.10, 0.5, 12:30:15.5]}")
    >>> parsed
    {'nnodes': '1:4', 'nproc_per_node': 2, 'args': [10, 1.1, 0.5, '12:30:15.5']}
    >>> [str(word) for word in parsed["args"]]
    ['012', '1.10', '0.5', '12:30:15.5']

    Raises:
        YAMLError: It is not YAML.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    # A date that no calendar has, too many levels, or a tag that does not fit its text.
    except (ValueError, RecursionError, LookupError, AttributeError) as error:
        raise yaml.YAMLError(str(error)) from error


def read_run_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the fields of a run and of a target from a run file.

    Raises:
        BadInputError: The file cannot be read, is not YAML, or has other parts than ``run`` and ``target``.
    """
    # A user may give the script in the place of the run file.
    script_fix = f"Give a script as --program {path}, with --output" if path.suffix == ".py" else None
    shape_fix = "Begin it with `run:` and, below, `program: ...`"
    content = read_mapping(path, "a run file", shape_fix, script_fix)
    if script_fix and content.keys() - {*_PARTS}:
        raise _wrong_file(path, "a run file", script_fix)  # some Python is also YAML
    for name in content:
        if name not in _PARTS:
            fix = "A run file has the parts `run` and `target`"
            if name in _ACCELERATE_KEYS:
                fix = f"Give a config of Accelerate as --accelerate-config {path}, before the script"
            elif name in TrainingRun.model_fields:
                fix = f"Indent `{name}` below `run:`"
            raise BadInputError(f"{path} has a part {name!r}", field=str(name), fix=fix)
    return _part(path, content, "run"), _part(path, content, "target")


def is_run_file(path: Path) -> bool:
    """Whether a file is certainly a run file, not the settings of a program.

    It must have a ``program`` in ``run`` or a ``kind`` in ``target``, and nothing but fields of these parts.
    """
    if path.suffix not in _SUFFIXES or path.stat().st_size > _MAX_BYTES:
        return False
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    if not isinstance(content, Mapping) or not content or content.keys() - {*_PARTS}:  # it has another part
        return False
    run, target = (content.get(part) or {} for part in _PARTS)
    if not isinstance(run, Mapping) or not isinstance(target, Mapping):
        return False
    kind = KINDS.get(str(target.get("kind", "local")))
    target_fields = kind.model_fields if kind else {}
    if run.keys() - TrainingRun.model_fields or target.keys() - target_fields:  # it has another field
        return False
    return "program" in run or "kind" in target


def read_mapping(path: Path, what: str, shape_fix: str, script_fix: str | None = None) -> Mapping[str, Any]:
    """Read a YAML file whose content is a mapping.

    Args:
        path: The file.
        what: Words for the expected file, such as "a run file", for messages.
        shape_fix: The advice if the content is no mapping.
        script_fix: The advice if the path is that of a script: it replaces other advice. None: it is not.

    Raises:
        BadInputError: The file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        fix = ". ".join(filter(None, [f"Give the path of {what}", script_fix]))
        raise BadInputError(f"{path} cannot be read: {error.strerror}", fix=fix) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The line that YAML names is no help in a script, and a binary file has none.
        if script_fix or isinstance(error, UnicodeDecodeError):
            raise _wrong_file(path, what, script_fix) from error
        raise BadInputError(f"{path} is not YAML: {error}", fix="Mend it at the line above") from error
    if not isinstance(content, Mapping):
        raise BadInputError(f"{path} holds no fields", fix=script_fix or shape_fix)
    return content


def _wrong_file(path: Path, what: str, script_fix: str | None) -> BadInputError:
    return BadInputError(f"{path} is not {what}", fix=script_fix or f"Give the path of {what}")


def _part(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of ``run`` or ``target`` in a run file; empty if the part is missing.

    Raises:
        BadInputError: The part is no mapping.
    """
    part = content.get(name) or {}
    if not isinstance(part, Mapping):
        example = "run: {program: ...}" if name == "run" else f"target: {{kind: {part}}}"
        fix = f"Indent its fields below it, as in `{example}`"
        raise BadInputError(f"{path}: {name!r} is {part!r}, not fields", field=name, fix=fix)
    return dict(part)
