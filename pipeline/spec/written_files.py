"""Where a program writes by what it says: files of its working folder, which goes with the run."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

__all__ = ["Written", "relative_writes"]

_OPTIONS: Final = {"output_dir", "output", "out", "save_dir", "save_path", "logging_dir", "checkpoint_dir"}
_SAVE: Final = {"save", "save_model", "save_pretrained", "save_state", "savefig", "to_csv", "write_text"}
_WRITES: Final = set("wax")


class Written(NamedTuple):
    """A path below the working folder, and where the program says so."""

    path: str
    where: str


def relative_writes(source: str, args: Sequence[str] = ()) -> Iterator[Written]:
    """Find relative paths that a program is told to write to, by its arguments, or that its source names.

    >>> list(relative_writes("torch.save(model, 'model.pt')", ["--output_dir", "out"]))
    [Written(path='out', where='--output_dir'), Written(path='model.pt', where='line 1')]
    """
    given = {_name(option): Written(value, option) for option, value in _given(args)}
    yield from (written for written in given.values() if _is_relative(written.path))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (Written(path, f"line {node.lineno}") for path in _written(node, {*given}))


def _given(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for option, following in zip(args, [*args[1:], ""], strict=False):
        name, given, value = option.partition("=")
        if name.startswith("--") and _name(name) in _OPTIONS:
            yield name, value if given else following


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _written(call: ast.Call, named: set[str]) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    texts = [_text(argument) for argument in call.args]
    keywords = {keyword.arg: _text(keyword.value) for keyword in call.keywords}
    if name == "open":
        mode = keywords.get("mode") or (texts[1] if len(texts) > 1 else None) or "r"
        found = texts[:1] if _WRITES & {*mode} else []
    elif name == "write_text":
        inner = getattr(call.func, "value", None)
        found = [*map(_text, inner.args[:1])] if isinstance(inner, ast.Call) else []
    elif name == "add_argument":
        of_output = _name((texts[0] if texts else None) or "") in _OPTIONS - named
        found = [keywords.get("default")] if of_output else []
    else:
        found = [
            *(texts[:2] if name in _SAVE else []),
            *(keywords.get(option) for option in _OPTIONS - named),
        ]
    yield from (text for text in found if text and _is_relative(text))


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_relative(text: str) -> bool:
    is_other = text.startswith(("-", "{", "$")) or "://" in text or PurePath(text).is_absolute()
    return bool(text) and not is_other
