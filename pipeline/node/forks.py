"""Warn where a script forks processes although threads run: their locks are held in the fork for ever."""

from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from manycpu.pipeline.node.emit import warn

__all__ = ["watch"]


def watch() -> None:
    """Warn, once, of the first process that is forked when there are more threads than there are now.

    Workers of torch's data loaders are left out: they are forked at any time, and compute by one thread.
    """
    before, forked = _threads(), ForkProcess._Popen  # noqa: SLF001 - no hook knows the process
    said: list[int] = []

    def popen(process: Any) -> Any:
        more = _threads() - before
        if more > 0 and not said and not _is_of_loader(process):
            said.append(more)
            warn(
                f"the script forks {process.name} while {more} thread(s) that it started run: a lock that "
                "one of them holds is held in the fork for ever, and OpenMP may hang there; start processes "
                "before the first computation, or by spawn"
            )
        return forked(process)

    ForkProcess._Popen = staticmethod(popen)  # type: ignore[assignment, method-assign] # noqa: SLF001


def _threads() -> int:
    """Count the threads that have the process' name: Python's and OpenMP's; services name theirs."""
    names = [_name(task) for task in Path("/proc/self/task").glob("*")]
    return names.count(_name(Path("/proc/self")))


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it has ended
        return ""


def _is_of_loader(process: Any) -> bool:
    return str(getattr(getattr(process, "_target", None), "__module__", "")).startswith("torch.utils.data")
