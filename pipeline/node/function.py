"""Call a function that travelled by value: the program of a run that a notebook launches."""

import hashlib
import json
import linecache
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.node import accelerate_world
from manycpu.pipeline.node.emit import say, warn
from manycpu.pipeline.spec.events import is_plain, is_shallow
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.spec.words import first_of, public

__all__ = ["FUNCTION", "LARGEST", "NOTES", "call", "define", "versions"]

NOTES: Final = "function.json"
FUNCTION: Final = "function.pkl"
LARGEST: Final = 64 << 20
"""Bytes that what a function returns may take."""
_COMPARED: Final = ("torch", "accelerate")  # whose objects and records travel
_BAD_INPUT: Final = 2


def call(folder: Path) -> None:
    """Call the function, in a folder where its relative paths lead to what they led to in the notebook.

    Args:
        folder: Where the function and the notes on it are, as :mod:`manycpu.pipeline.notebook` writes them.

    Raises:
        SystemExit: The rank's Python, torch or accelerate is not the notebook's, or lacks a module.
    """
    notes = json.loads((folder / NOTES).read_text())
    _check_versions(notes["versions"])
    _show_sources(notes["sources"])
    with _working_folder(notes):
        function, args = _load(folder / FUNCTION)
        if notes["accelerate"]:
            accelerate_world.widen_fp16()
        rank, process = os.environ.get("RANK", "0"), os.getpid()  # the function may change or fork either
        place = Path(os.environ["MANYCPU_OUTPUT"]).parent / RETURNED
        returned = function(*args)
        if rank == "0" and os.getpid() == process:
            _tell(returned, place)


def define(folder: Path) -> None:
    """Have ``__main__`` define what the notebook does, for a process that finds things there by name."""
    _load(folder / FUNCTION)


def versions() -> dict[str, str]:
    """Read the versions that must be the same on both sides; of what is not installed none."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for name in _COMPARED:
        try:
            found[name] = public(version(name))  # the build, such as +cpu, makes no difference
        except PackageNotFoundError:
            continue
    return found


def _check_versions(expected: Mapping[str, str]) -> None:
    here = versions()
    other = [
        f"{name} {here[name]} where the notebook has {of_notebook}"
        for name, of_notebook in expected.items()
        if here.get(name, of_notebook) != of_notebook
    ]
    if other:
        _refuse(f"this node has {' and '.join(other)}: a function travels between the same versions only")


def _load(file: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import cloudpickle

    try:
        function, args = cloudpickle.loads(file.read_bytes())
    except ImportError as error:
        _refuse(f"the function needs what this node lacks: {error}. Install it there, or in the image")
    _define(function)
    return function, args


def _define(function: Callable[..., Any]) -> None:
    """Put what came with a function where it was defined: pickles of its classes name that place."""
    from cloudpickle import cloudpickle

    main = vars(sys.modules["__main__"])
    came = {name: value for name, value in getattr(function, "__globals__", {}).items() if name[:2] != "__"}
    if getattr(function, "__module__", None) == "__main__":
        main.update(came)
    classes = [*getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})]
    main.update({kind.__name__: kind for kind in classes if kind.__module__ == "__main__"})


def _refuse(message: str) -> None:
    say("error", kind="Refusal", message=message)
    raise SystemExit(_BAD_INPUT)


def _show_sources(sources: Mapping[str, list[str]]) -> None:
    """Have tracebacks show the lines of cells, whose files are nowhere."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


@contextmanager
def _working_folder(notes: Mapping[str, Any]) -> Iterator[None]:
    """Work in the notebook's folder; elsewhere in one of the same place, beside which the data lies."""
    here = Path(notes["folder"])
    if notes["same_machine"]:
        os.chdir(here)
        yield
        return
    root = Path(tempfile.mkdtemp(prefix="manycpu-"))
    folder = root / here.relative_to("/")
    folder.mkdir(parents=True)
    _lay_data(root, notes["data"])
    os.chdir(folder)
    try:
        yield
    finally:
        _warn_of_files(root)
        os.chdir("/")
        shutil.rmtree(root, ignore_errors=True)


def _lay_data(root: Path, data: str | None) -> None:
    """Link the staged data to where the notebook has it, below a root of our own."""
    staged = os.environ.get("MANYCPU_DATA")
    if data is None or staged is None:
        return
    place = root / Path(data).relative_to("/")
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(staged)


def _warn_of_files(root: Path) -> None:
    written = [path.name for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    if written:
        warn(
            f"{first_of(written)} was written to the working folder, which is gone with the run: "
            "write to os.environ['MANYCPU_OUTPUT'], and give the run an output"
        )


def _tell(returned: Any, place: Path) -> None:
    """Tell what was returned, or why that cannot travel: the training has succeeded all the same."""
    import cloudpickle

    if is_shallow(returned) and is_plain(returned):
        with suppress(ValueError):  # it is longer than a line may be
            say("result", value=returned)
            return
    what = f"what the function returned, of type {type(returned).__name__},"
    try:
        pickled = cloudpickle.dumps(returned)
    except Exception as error:  # noqa: BLE001 - whatever an object may raise
        fix = "Return numbers, tensors, or a model out of accelerator.unwrap_model"
        _tell_why_not(f"{what} cannot be pickled: {error}. {fix}")
        return
    if len(pickled) > LARGEST:
        fix = "Write it to os.environ['MANYCPU_OUTPUT'], and give the run an output"
        _tell_why_not(f"{what} takes {len(pickled):,} bytes, of which {LARGEST:,} can travel. {fix}")
        return
    try:
        say("result", sha256=_write(pickled, place))
    except OSError as error:
        _tell_why_not(f"{what} could not be written: {error}")


def _write(content: bytes, folder: Path) -> str:
    """Write a file that is named by its digest, and there whole or not at all; the digest."""
    digest = hashlib.sha256(content).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{digest}"
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / digest)
    return digest


def _tell_why_not(message: str) -> None:
    say("result", message=message)
