"""Call a function that a notebook has pickled by value: the program of a run that a notebook launches."""

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
from typing import Any, Final, NoReturn

from manycpu.pipeline.node import accelerate_world
from manycpu.pipeline.node.emit import say, warn
from manycpu.pipeline.spec.events import is_plain, is_shallow
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.spec.words import first_of, public

NOTES: Final = "function.json"
FUNCTION: Final = "function.pkl"
LARGEST: Final = 64 << 20
"""Bytes of a pickled return value, at most."""
_COMPARED_PACKAGES: Final = ("torch", "accelerate")  # packages whose objects are pickled
_BAD_INPUT: Final = 2


def call(folder: Path) -> None:
    """Call the function, in a folder where its relative paths lead to the same files as in the notebook.

    ``folder`` has the function and the notes on it, as :mod:`manycpu.pipeline.functions.pickled` writes them.
    Rank 0 reports what the function returns. The rank ends with exit code 2 if the version of Python, torch
    or accelerate is not the notebook's, or if the function needs a module that this node lacks.
    """
    notes = json.loads((folder / NOTES).read_text())
    own_versions = versions()
    # A package that is missing here is no difference: `_load` refuses the function if it needs the package.
    differences = [
        f"{name} {own_versions[name]} where the notebook has {of_notebook}"
        for name, of_notebook in notes["versions"].items()
        if own_versions.get(name, of_notebook) != of_notebook
    ]
    if differences:
        differences_text = " and ".join(differences)
        _refuse(f"this node has {differences_text}: a function travels between the same versions only")
    # A cell is no file: put its lines where tracebacks look for them. None: they belong to no file on a disk.
    for name, lines in notes["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    with _working_folder(notes):
        function, args = _load(folder / FUNCTION)
        if notes["accelerate"]:
            accelerate_world.widen_fp16()
        # Before the call: the function may change these variables, or fork.
        rank, process = os.environ.get("RANK", "0"), os.getpid()
        results_folder = Path(os.environ["MANYCPU_OUTPUT"]).parent / RETURNED
        returned = function(*args)
        if rank == "0" and os.getpid() == process:  # not a child that the function forked
            _report(returned, results_folder)


def define(folder: Path) -> None:
    """Define in ``__main__`` what the notebook defines, for a spawned process that looks it up by name."""
    _load(folder / FUNCTION)


def meet() -> dict[str, Any]:
    """Initialise a process group and add up the ranks' numbers: the check of Accelerate's debug mode.

    Returns ``world``, the number of ranks; ``hosts``, their names; and ``backend``.

    Raises:
        RuntimeError: The sum is wrong.
    """
    # Late: the notebook imports this function, and needs no torch.
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    numbers = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(numbers)
    world = dist.get_world_size()
    if int(numbers.item()) != world * (world - 1) // 2:  # the sum of 0 to world - 1
        raise RuntimeError(f"the sum of the numbers of {world} ranks came out as {numbers.item()}")
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, os.environ.get("MANYCPU_HOST", ""))
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"world": world, "hosts": sorted(set(hosts)), "backend": backend}


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and accelerate: notebook and node must have the same.

    What is not installed is left out.
    """
    installed = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for name in _COMPARED_PACKAGES:
        try:
            installed[name] = public(version(name))  # the build, such as +cpu, makes no difference
        except PackageNotFoundError:
            continue
    return installed


def _load(file: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Load the function and its arguments, and define in ``__main__`` what came with them."""
    import cloudpickle

    try:
        function, args = cloudpickle.loads(file.read_bytes())
    except ImportError as error:
        _refuse(f"the function needs what this node lacks: {error}. Install it there, or in the image")
    # Put what came with the function where it was defined: pickles of its classes name that place.
    main = vars(sys.modules["__main__"])
    if getattr(function, "__module__", None) == "__main__":
        own_globals = getattr(function, "__globals__", {})
        main.update({name: value for name, value in own_globals.items() if not name.startswith("__")})
    # The classes that cloudpickle has made here from their pickles.
    classes = [*getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})]
    main.update({kind.__name__: kind for kind in classes if kind.__module__ == "__main__"})
    return function, args


def _refuse(message: str) -> NoReturn:
    """Report why the function cannot be called, and end the rank with exit code 2."""
    say("error", kind="Refusal", message=message)
    raise SystemExit(_BAD_INPUT)


@contextmanager
def _working_folder(notes: Mapping[str, Any]) -> Iterator[None]:
    """Change to the notebook's folder; on another machine, to a new folder that is deleted afterwards.

    The new folder has the same path below a temporary root. A link to the run's data is where the notebook
    has its data, so that relative paths to the data work.
    """
    notebook_folder = Path(notes["folder"])
    if notes["same_machine"]:
        os.chdir(notebook_folder)
        yield
        return
    # If the rank is killed, the clean-up of the run deletes this folder; a pod's own disk goes with the pod.
    attempt = Path(os.environ["MANYCPU_OUTPUT"]).parent.resolve()
    in_pod = not Path.cwd().is_relative_to(attempt)  # on machines, ranks start in their attempt's folder
    root = Path(tempfile.mkdtemp(prefix="manycpu-", dir=None if in_pod else attempt))
    folder = root / notebook_folder.relative_to("/")
    folder.mkdir(parents=True)
    staged = os.environ.get("MANYCPU_DATA")
    if notes["data"] is not None and staged is not None:
        _link(root / Path(notes["data"]).relative_to("/"), Path(staged))
    os.chdir(folder)
    began = root.stat().st_mtime  # not time.time(): it is compared with times by a file system's clock
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:  # else a child that the function forked: its parent still works here
            _delete(root, began)


def _delete(root: Path, began: float) -> None:
    """Delete the working folder; warn if anything was written there since ``began`` (seconds, epoch)."""
    files = [path for path in root.rglob("*") if path.is_file()]
    # A link leads to staged data, which the function may have overwritten.
    written = [path.name for path in files if not path.is_symlink() or path.stat().st_mtime >= began]
    if written:
        warn(
            f"{first_of(written)} was written to the working folder, which is gone with the run: "
            "write to os.environ['MANYCPU_OUTPUT'], and give the run an output"
        )
    os.chdir("/")
    shutil.rmtree(root, ignore_errors=True)


def _link(path: Path, staged: Path) -> None:
    """Make a path a link to staged data; if the path is a folder already, link each item of the data in it.

    It is one already if the notebook's data is its working folder or a folder around that.
    """
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(staged)
        return
    for item in staged.iterdir():
        _link(path / item.name, item)


def _report(returned: Any, folder: Path) -> None:
    """Report what the function returned, or why that cannot be sent, which does not fail the training.

    A plain value that fits into an event is sent in the event. Any other value is pickled into a file in
    ``folder``, and the event has the file's digest, which is its name.
    """
    import cloudpickle

    if is_shallow(returned) and is_plain(returned):
        with suppress(ValueError):  # it is longer than a line may be: it is pickled below
            say("result", value=returned)
            return
    what = f"what the function returned, of type {type(returned).__name__},"
    try:
        pickled = cloudpickle.dumps(returned)
    except Exception as error:  # noqa: BLE001 - an object's pickling may raise anything
        fix = "Return numbers, tensors, or a model out of accelerator.unwrap_model"
        say("result", message=f"{what} cannot be pickled: {error}. {fix}")
        return
    if len(pickled) > LARGEST:
        fix = "Write it to os.environ['MANYCPU_OUTPUT'], and give the run an output"
        say("result", message=f"{what} takes {len(pickled):,} bytes, of which {LARGEST:,} can travel. {fix}")
        return
    digest = hashlib.sha256(pickled).hexdigest()
    partial = folder.parent / f".{digest}"  # not in the folder, which a reader may copy as a whole
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(pickled)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / digest)  # atomic: no reader sees half of it
        say("result", sha256=digest)
    except OSError as error:
        say("result", message=f"{what} could not be written: {error}")
