"""Read a Dockerfile: which images it starts from, and whether it needs BuildKit."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["bases", "needs_buildkit"]

_ARGUMENT: Final = re.compile(r"(?i)^\s*ARG\s+(\w+)(?:=(.*))?$")
_FROM: Final = re.compile(r"(?i)^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*$")
_NEWER: Final = re.compile(r"(?i)^\s*(?:RUN|COPY|ADD)\s+(?:--\S+\s+)*--(?:mount|chmod|link)\b")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


def bases(text: str, arguments: Mapping[str, str]) -> list[str]:
    r"""List the images that the stages of a Dockerfile start from, without `scratch` and other stages.

    Args:
        text: The Dockerfile.
        arguments: The build's arguments, which win over the file's defaults.

    >>> bases("ARG BASE=python\nFROM ${BASE}:3.12 AS a\nFROM a\nFROM debian", {"BASE": "intel/python"})
    ['intel/python:3.12', 'debian']
    """
    values: dict[str, str] = {}
    images: list[str] = []
    stages = {"scratch"}
    for line in _lines(text):
        if stage := _FROM.match(line):
            name = _replaced(stage[1], values)
            if name not in stages and name not in images:
                images.append(name)
            stages.add(stage[2] or "")
        elif (argument := _ARGUMENT.match(line)) and not images:  # later ones are a stage's own
            default = _replaced((argument[2] or "").strip().strip("\"'"), values)
            values[argument[1]] = arguments.get(argument[1], default)
    return images


def needs_buildkit(text: str) -> bool:
    r"""Whether a Dockerfile has an option that docker's classic builder does not know.

    >>> needs_buildkit("FROM a\nRUN --mount=type=cache,target=/c make"), needs_buildkit("FROM a\nRUN make")
    (True, False)
    """
    return any(_NEWER.match(line) for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
    yield from (line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))


def _replaced(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[3]) or match[2] or "", text)
