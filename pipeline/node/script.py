"""Run a script or a module as Python itself would, and record how it failed as torchelastic does."""

import builtins
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from manycpu.pipeline.node.emit import say
from manycpu.pipeline.node.node_exit import NodeExit

__all__ = ["Program", "execute"]

_OURS = str(Path(__file__).parent)
_NO_SUCH_FILE = 2  # as Python exits
# The script's globals live as long as the process, as they do under Python: threads may still use them.
_KEPT: list[dict[str, Any]] = []


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
        """Read its source; of a package all of it, and nothing where there is none."""
        return "\n".join(path.read_text(errors="replace") for path in self._files() if path.is_file())

    def _files(self) -> list[Path]:
        if not self.module:
            return [Path(self.name)]
        spec = importlib.util.find_spec(self.name)
        if spec is None:
            return []
        if spec.submodule_search_locations:
            return [file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py")]
        return [Path(spec.origin)] if spec.origin else []

    def run(self) -> None:
        """Run it as ``__main__`` of this process."""
        sys.argv[:] = [self.name, *self.args]
        if self.module:
            _KEPT.append(runpy.run_module(self.name, run_name="__main__", alter_sys=True))
            return
        if Path(self.name).is_dir():
            _KEPT.append(runpy.run_path(self.name, run_name="__main__"))
            return
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(self.name))  # noqa: PTH120 - "" stays ""
            if (
                not Path(self.name).is_absolute() and len(Path(self.name).parts) > 1
            ):  # in a folder of its code
                sys.path.insert(1, str(Path.cwd()))
        _run_file(Path(self.name).absolute())


def execute(program: Program) -> int:
    """Run the program; its own exit code.

    Raises:
        NodeExit: It did not end by itself: its process group is not what was asked for.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
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
    except Exception as error:  # noqa: BLE001 - whatever a script may raise
        error.__traceback__ = _without_ours(error.__traceback__)
        handler.record_exception(error)
        _report(error)
        return 1
    return 0


def _run_file(path: Path) -> None:
    # runpy would show the script another sys.argv[0], and take its module away while threads still run.
    main = ModuleType("__main__")
    vars(main).update(__file__=str(path), __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))  # noqa: S102


def _exit_code(end: SystemExit) -> int:
    if isinstance(end.code, int):
        # The system keeps the low byte only, and would take 256 for a success.
        return end.code if end.code & 0xFF or not end.code else 1
    if end.code is None:
        return 0
    sys.stderr.write(f"{end.code}\n")
    say("error", kind="SystemExit", message=str(end.code))
    return 1


def _report(error: Exception) -> None:
    sys.stdout.flush()
    if sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith("torch."):
        traceback.print_exception(error)  # theirs shows no line of a notebook's cell
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    short = "".join(traceback.format_exception_only(error)).strip()
    say("error", kind=type(error).__name__, message=short)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames before the script's own first; all are kept where that would leave none."""
    start = trace
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        hidden = "__tracebackhide__" in trace.tb_frame.f_globals  # as pytest and IPython have it
        if not file.startswith(_OURS) and "runpy" not in file and not hidden:
            return trace
        trace = trace.tb_next
    return start
