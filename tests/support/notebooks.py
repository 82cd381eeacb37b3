"""Notebooks, executed by a real kernel of Jupyter."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

__all__ = ["Cell", "executed", "executed_by_name"]

EXAMPLES = Path(__file__).parents[2] / "examples"
_EMPTY: Final = {"metadata": {}, "nbformat": 4, "nbformat_minor": 4}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Cell:
    """A cell that was executed: what it printed, showed, returned and raised."""

    def __init__(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        self._outputs = outputs

    @property
    def printed(self) -> str:
        """What it printed, on stdout and on stderr."""
        return "".join(each["text"] for each in self._outputs if each["output_type"] == "stream")

    @property
    def value(self) -> str:
        """How its last expression is shown; empty where it is None."""
        return "".join(self._data("execute_result", "text/plain"))

    @property
    def shown(self) -> str:
        """The HTML of its displays, as they were at the end."""
        return "".join(self._data("display_data", "text/html"))

    @property
    def error(self) -> str:
        """Class and message of what it raised; empty where it raised nothing."""
        raised = (each for each in self._outputs if each["output_type"] == "error")
        return "".join(f"{each['ename']}: {each['evalue']}" for each in raised)

    @property
    def traceback(self) -> str:
        """What Jupyter shows of an error."""
        raised = (each for each in self._outputs if each["output_type"] == "error")
        return _COLOURS.sub("", "\n".join(line for each in raised for line in each["traceback"]))

    def _data(self, kind: str, form: str) -> Iterator[str]:
        yield from (each["data"].get(form, "") for each in self._outputs if each["output_type"] == kind)


def executed(
    notebook: Path | Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> list[Cell]:
    """Execute a notebook, or cells of code, whole: also what comes after a cell that raises.

    Args:
        notebook: A notebook's path, or the sources of its cells.
        folder: Where the kernel works.
        env: What its environment has besides this process's.
    """
    if isinstance(notebook, Path):
        content = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    else:
        content = nbformat.from_dict({"cells": [_cell(text) for text in notebook], **_EMPTY})  # type: ignore[no-untyped-call]
    client = NotebookClient(
        content,
        timeout=None,  # pytest's alone: how long a cell takes says nothing of it
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    with _kernel_s_environment(env or {}):
        client.execute(env=dict(os.environ))
    return [Cell(cell.outputs) for cell in content.cells if cell.cell_type == "code"]


def executed_by_name(begin: str, cells: Mapping[str, str], folder: Path) -> dict[str, Cell]:
    """Execute named cells behind one that must not fail, in one kernel whose runs are below the folder."""
    first, *others = executed([begin, *cells.values()], folder, {"MANYCPU_HOME": str(folder / "home")})
    assert not first.error, first.error
    return dict(zip(cells, others, strict=True))


def _cell(text: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None}


@contextmanager
def _kernel_s_environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
