"""Say why XLA's first steps are slow, and which later ones are: each new shape of a batch is compiled."""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from manycpu.pipeline.node.emit import say, warn

__all__ = ["Compiled", "Steps"]

Shapes = tuple[tuple[int, ...], ...]
_WARNED: Final = 5  # shapes that are warned of


class Compiled(NamedTuple):
    """What XLA has compiled so far."""

    number: int
    seconds: float

    def since(self, earlier: "Compiled") -> "Compiled":
        """Count what came after."""
        return Compiled(self.number - earlier.number, self.seconds - earlier.seconds)

    def __str__(self) -> str:
        return f"{self.number} compilation{'' if self.number == 1 else 's'}, {self.seconds:.1f} s"


class Steps:
    """Times the steps of a training: each is what a program does from one batch to the next.

    Args:
        compiled: Reads what XLA has compiled so far.
        clock: Seconds.
    """

    def __init__(self, compiled: Callable[[], Compiled], clock: Callable[[], float] = time.monotonic) -> None:
        self._compiled, self._clock = compiled, clock
        self._usual: Shapes = ()
        self._present: tuple[Shapes, float, Compiled] | None = None
        self._slow: list[Compiled] = []  # of the first steps, until one compiles nothing
        self._first = self._later = 0.0
        self._later_steps = 0
        self._told: set[Shapes] = set()

    def begins(self, shapes: Sequence[Sequence[int]]) -> None:
        """A batch with tensors of these shapes has come: the step before it has ended."""
        self.ends()
        present = tuple(dict.fromkeys(tuple(shape) for shape in shapes))
        self._usual = self._usual or present
        self._present = present, self._clock(), self._compiled()

    def ends(self) -> None:
        """There is no batch after this one, or not now."""
        if self._present is None:
            return
        (shapes, since, before), self._present = self._present, None
        seconds, compiled = self._clock() - since, self._compiled().since(before)
        self._first = self._first or seconds
        if compiled.number:
            self._note_compilation(shapes, compiled)
            return
        if not self._later_steps:
            self._explain(seconds)
        self._later_steps, self._later = self._later_steps + 1, self._later + seconds

    def metrics(self) -> dict[str, float | int]:
        """Give what ``report.json`` keeps: seconds, and numbers of compilations."""
        self.ends()
        total = self._compiled()
        values: dict[str, float | int] = {
            "xla_compilations": total.number,
            "xla_compile_seconds": round(total.seconds, 3),
        }
        if self._first:
            values["xla_first_step_seconds"] = round(self._first, 4)
        if self._later_steps:
            values["xla_later_step_seconds"] = round(self._later / self._later_steps, 4)
        return values

    def _note_compilation(self, shapes: Shapes, compiled: Compiled) -> None:
        if not self._later_steps:
            self._slow.append(compiled)
        if shapes == self._usual or shapes in self._told or len(self._told) == _WARNED:
            return
        self._told.add(shapes)
        warn(
            f"a batch of another size had XLA compile again ({compiled}): its tensors are {_shown(shapes)}, "
            f"and those of the first batch {_shown(self._usual)}. Give all batches one size, also the "
            "evaluation's: drop_last=True for the last one, and padding to one length"
        )

    def _explain(self, seconds: float) -> None:
        if not self._slow:
            return
        total = Compiled(sum(one.number for one in self._slow), sum(one.seconds for one in self._slow))
        count = len(self._slow)
        steps = "the first step was" if count == 1 else f"the first {count} steps were"
        say("start", message=f"{steps} slow: XLA compiled ({total}); a step takes {seconds:.3f} s now")


def _shown(shapes: Shapes) -> str:
    return " and ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
