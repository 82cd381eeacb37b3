"""Run notebooks with a real Jupyter kernel."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
_EMPTY: Final = {"metadata": {}, "nbformat": 4, "nbformat_minor": 4}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Cell:
    """An executed cell: its output, displays, value and error."""

    def __init__(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        self._outputs = outputs

    @property
    def printed(self) -> str:
        """Its output on stdout and stderr."""
        return "".join(each["text"] for each in self._outputs if each["output_type"] == "stream")

    @property
    def value(self) -> str:
        """The text of its last expression; empty if that is None."""
        return "".join(self._data("execute_result", "text/plain"))

    @property
    def shown(self) -> str:
        """The HTML of its displays, in their last state."""
        return "".join(self._data("display_data", "text/html"))

    @property
    def error(self) -> str:
        """Class and message of its exception; empty if it raised none."""
        raised = (each for each in self._outputs if each["output_type"] == "error")
        return "".join(f"{each['ename']}: {each['evalue']}" for each in raised)

    @property
    def traceback(self) -> str:
        """The traceback that Jupyter shows."""
        raised = (each for each in self._outputs if each["output_type"] == "error")
        return _COLOURS.sub("", "\n".join(line for each in raised for line in each["traceback"]))

    def _data(self, kind: str, form: str) -> Iterator[str]:
        yield from (each["data"].get(form, "") for each in self._outputs if each["output_type"] == kind)


def executed(
    notebook: Path | Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> list[Cell]:
    """Execute a whole notebook, or cells of code; execution continues after a cell that raises.

    Args:
        notebook: A notebook's path, or the sources of its cells.
        folder: The kernel's working directory.
        env: Environment variables in addition to this process's.
    """
    if isinstance(notebook, Path):
        content = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    else:
        content = nbformat.from_dict({"cells": [_cell(text) for text in notebook], **_EMPTY})  # type: ignore[no-untyped-call]
    client = NotebookClient(
        content,
        timeout=None,  # only pytest's limit: one cell may take long
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    with _kernel_s_environment(env or {}):
        client.execute(env=dict(os.environ))
    return [Cell(cell.outputs) for cell in content.cells if cell.cell_type == "code"]


def executed_by_name(begin: str, cells: Mapping[str, str], folder: Path) -> dict[str, Cell]:
    """Execute the cell ``begin``, which must not fail, and then named cells, in one kernel."""
    first, *others = executed([begin, *cells.values()], folder, {"MANYCPU_HOME": str(folder / "home")})
    assert not first.error, first.error
    return dict(zip(cells, others, strict=True))


def _cell(text: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None}


@contextmanager
def _kernel_s_environment(env: Mapping[str, str]) -> Iterator[None]:
    """Add variables to this process's environment while the block runs: the kernel inherits them."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
