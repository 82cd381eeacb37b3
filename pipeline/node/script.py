"""Run a script or a module as Python itself would, and record how it failed as torchelastic does.

Options of older Hugging Face Trainers are translated to those of the installed one:

>>> words, notes = translate(["--no_cuda", "--use_ipex", "True", "--ddp_backend=ccl", "--bf16"], "gloo")
>>> words
['--use_cpu', '--bf16']
>>> [note.partition(":")[0] for note in notes]
['--no_cuda', '--use_ipex', '--ddp_backend']
"""

import builtins
import importlib.util
import os
import re
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, NamedTuple

from manycpu.pipeline.node.emit import NodeExit, say, warn

_OWN_FOLDER: Final = str(Path(__file__).parent)
_NO_SUCH_FILE: Final = 2  # as Python exits
# The script's globals are kept until the process ends, as Python does: threads may still use them.
_KEPT_GLOBALS: Final[list[dict[str, Any]]] = []
_OPTION: Final = re.compile(r"--(ddp[_-]backend|no[_-]cuda|use[_-]ipex)(=.*)?", re.DOTALL)
_BOOLEANS: Final = {"true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"}  # of HfArgumentParser
_TRAINER: Final = re.compile(r"\b(HfArgumentParser|TrainingArguments)\b")
_RECIPES: Final = "manycpu.pipeline.recipes."  # these translate old options by themselves
_DROPPED_IN: Final = 5  # the first major version of transformers without these options


class Program(NamedTuple):
    """What to run: a module's dotted name or a script's path, and its arguments."""

    name: str
    module: bool
    args: tuple[str, ...]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> "Program":
        """Read ``SCRIPT ARGS...`` or ``-m MODULE ARGS...``."""
        if argv[0] == "-m":
            return cls(argv[1], module=True, args=tuple(argv[2:]))
        return cls(argv[0], module=False, args=tuple(argv[1:]))

    def source(self) -> str:
        """Read the program's source, or that of all modules of a package; empty: there is no source."""
        files: list[Path] = []
        if not self.module:
            files = [Path(self.name)]
        elif spec := importlib.util.find_spec(self.name):
            if spec.submodule_search_locations:  # a package
                files = [
                    file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py")
                ]
            elif spec.origin:
                files = [Path(spec.origin)]
        return "\n".join(path.read_text(errors="replace") for path in files if path.is_file())

    def run(self) -> None:
        """Run the program as ``__main__`` of this process; returns when its last line has run."""
        sys.argv[:] = [self.name, *self.args]
        path = Path(self.name)
        if self.module:
            _KEPT_GLOBALS.append(runpy.run_module(self.name, run_name="__main__", alter_sys=True))
            return
        if path.is_dir():
            _KEPT_GLOBALS.append(runpy.run_path(self.name, run_name="__main__"))
            return
        if not sys.flags.safe_path:
            # The script's folder, as Python does, in place of the one that `python -m` put there.
            sys.path[0] = os.path.dirname(os.path.realpath(self.name))  # noqa: PTH120 - "" stays ""
            # A script in a folder of the run's code also finds the modules at the root of the code.
            if not path.is_absolute() and len(path.parts) > 1:
                sys.path.insert(1, str(Path.cwd()))
        # Not by runpy: it changes the script's sys.argv[0], and removes its module while threads still run.
        file = path.absolute()
        main = ModuleType("__main__")
        vars(main).update(__file__=str(file), __builtins__=builtins, __cached__=None)
        sys.modules["__main__"] = main
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), vars(main))  # noqa: S102


def translated(program: Program, backend: str | None) -> Program:
    """Translate a program's old options, with a warning for each; returns the program with the new options.

    The program is unchanged if it has no such options, if its source names no Trainer, or if the installed
    Trainer still has these options. Recipes stay unchanged too: they translate old options themselves.
    """
    if program.name.startswith(_RECIPES) or not any(_OPTION.fullmatch(word) for word in program.args):
        return program
    try:
        trainer_has_dropped_them = int(version("transformers").partition(".")[0]) >= _DROPPED_IN
    except (PackageNotFoundError, ValueError):
        trainer_has_dropped_them = False
    if not trainer_has_dropped_them or not _TRAINER.search(program.source()):
        return program
    words, notes = translate(program.args, backend)
    for note in notes:
        warn(note)
    return program._replace(args=tuple(words))


def translate(words: Sequence[str], backend: str | None) -> tuple[list[str], list[str]]:
    """Replace the old options among arguments; returns the new arguments, and a note for each change.

    ``backend`` is the one that the run uses; None: the script chooses.
    """
    new_words: list[str] = []
    notes: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = _OPTION.fullmatch(word)
        if match is None:
            new_words.append(word)
            continue
        option = match[1].replace("-", "_")
        value = match[2] or ""  # with its "="
        # The value may be the next word: that of a boolean option may also be left out.
        if not value and rest and (option == "ddp_backend" or rest[0].lower() in _BOOLEANS):
            value = f"={rest.pop(0)}"
        if option == "no_cuda":
            new_words.append(f"--use_cpu{value}")
            notes.append("--no_cuda: is called --use_cpu now, which is used")
        elif option == "use_ipex":
            notes.append(
                "--use_ipex: dropped; --bf16 (autocast) and --optim adamw_torch_fused do what it did"
            )
        elif value.removeprefix("=") == "ccl":
            choice = f"{backend!r} is used" if backend else "torch's default is used"
            notes.append(f"--ddp_backend: ccl is no choice of today's Trainer; run.backend decides, {choice}")
        else:  # the Trainer still has the others; the backend is checked later
            new_words.append(f"--ddp_backend{value}")
    return new_words, notes


def execute(program: Program) -> int:
    """Run the program; returns its exit code: 0 at its end, 2 without such a script, or that of sys.exit().

    After an exception it is 1, and the exception is printed and reported. A refusal (:class:`NodeExit`) is
    recorded, and raised again.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()  # writes how the rank failed to a file that torchrun reads
    handler.initialize()
    if not program.module and not Path(program.name).exists():
        say("error", kind="FileNotFoundError", message=f"there is no script {program.name} in {Path.cwd()}")
        return _NO_SUCH_FILE
    try:
        program.run()
    except NodeExit as refusal:
        handler.record_exception(refusal)
        raise
    except SystemExit as end:
        return _exit_code(end)
    except Exception as error:  # noqa: BLE001 - a script may raise anything
        error.__traceback__ = _without_own_frames(error.__traceback__)
        handler.record_exception(error)
        _report(error)
        return 1
    return 0


def warn_of_forks() -> None:
    """From now on, warn once if the script forks a process while threads are running.

    Only threads started after this call count. Forks of torch's data loaders do not count: loaders fork at
    any time, and their workers compute with one thread.
    """
    threads_before = _count_threads()
    original = ForkProcess._Popen  # noqa: SLF001 - no hook gets the process
    has_warned = False

    def popen(process: Any) -> Any:
        """Fork the process as before; warn at the first fork beside the script's own threads."""
        nonlocal has_warned
        added = _count_threads() - threads_before
        target = getattr(process, "_target", None)
        of_loader = str(getattr(target, "__module__", "")).startswith("torch.utils.data")
        if added > 0 and not has_warned and not of_loader:
            has_warned = True
            warn(
                f"the script forks {process.name} while {added} thread(s) that it started run: a lock that "
                "one of them holds is held in the fork for ever, and OpenMP may hang there; start processes "
                "before the first computation, or by spawn"
            )
        return original(process)

    ForkProcess._Popen = staticmethod(popen)  # type: ignore[assignment, method-assign] # noqa: SLF001


def _count_threads() -> int:
    """Count the threads of Python, and other threads that have the process' name, such as OpenMP's.

    Service threads of libraries have other names, and do not count.
    """
    # Not by name alone: from Python 3.14 on, a thread of Python has a name of its own in the system too.
    of_python = {thread.native_id for thread in threading.enumerate()}
    process_name = _thread_name(Path("/proc/self"))
    tasks = Path("/proc/self/task").glob("*")  # a folder for each thread, named by its native id
    return sum(int(task.name) in of_python or _thread_name(task) == process_name for task in tasks)


def _thread_name(task: Path) -> str:
    """Read a thread's name in the system; empty: it has ended."""
    try:
        return (task / "comm").read_text()
    except OSError:  # it has ended
        return ""


def _exit_code(end: SystemExit) -> int:
    """Return the exit code that Python would have; a text instead of a number is printed and reported."""
    if isinstance(end.code, int):
        # The system keeps the low byte only, and would take 256 for a success.
        if end.code != 0 and end.code & 0xFF == 0:
            return 1
        return end.code
    if end.code is None:
        return 0
    sys.stderr.write(f"{end.code}\n")
    say("error", kind="SystemExit", message=str(end.code))
    return 1


def _report(error: Exception) -> None:
    """Print an exception as Python does, and report it as an event."""
    sys.stdout.flush()
    if sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith("torch."):
        traceback.print_exception(error)  # as these hooks do, but also with the lines of a notebook's cell
    else:  # the script's own
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    short = "".join(traceback.format_exception_only(error)).strip()
    say("error", kind=type(error).__name__, message=short)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames before the script's first frame; if no frame is the script's, keep all."""
    whole_trace = trace
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        hidden = "__tracebackhide__" in trace.tb_frame.f_globals  # the convention of pytest and IPython
        if not file.startswith(_OWN_FOLDER) and "runpy" not in file and not hidden:
            return trace
        trace = trace.tb_next
    return whole_trace
