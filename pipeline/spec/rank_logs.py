"""Rank logs: the last lines of each rank in pods, as files on the volume, which outlive pods and kubelets.

The parent of a rank writes ``RANK.log``. When that is full, it becomes ``RANK.log.1``, in place of an earlier
one. A line is the time, a space, and the line as the pod's own log has it.
"""

import heapq
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

FOLDER: Final = "logs"
"""Name of their folder in an attempt's."""
LIMIT: Final = 8 << 20
"""Bytes that all ranks of an attempt keep together."""
_LEAST_BYTES: Final = 64 << 10  # that each rank may keep, however many ranks there are
_WAITING_LINES_LIMIT: Final = 10_000  # that wait for the volume
_END_TIMEOUT_S: Final = 5.0  # to write the last lines


class RankLog:
    """Writes the log of a rank in a thread: a volume that hangs or is full costs lines, and delays nothing.

    Args:
        folder: The folder of an attempt's logs.
        rank: The number of the rank.
        ranks: How many ranks share ``LIMIT``.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._path = folder / f"{rank}.log"
        self._limit = max(_LEAST_BYTES, LIMIT // ranks) // 2  # of each of the rank's two files
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING_LINES_LIMIT)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def add(self, line: bytes) -> None:
        """Add a line, which is written later; it is dropped if too many lines wait already."""
        with suppress(queue.Full):
            self._lines.put_nowait(b"%.3f %s\n" % (time.time(), line))

    def close(self) -> None:
        """Wait until the lines are written, for five seconds at most."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=_END_TIMEOUT_S)
        self._thread.join(_END_TIMEOUT_S)

    def _write(self) -> None:
        """Write the waiting lines, block by block, until None comes, which :meth:`close` adds."""
        is_open = True
        while is_open:
            lines = [self._lines.get()]  # waits for one
            with suppress(queue.Empty):  # all that wait, in one write
                while lines[-1] is not None:
                    lines.append(self._lines.get_nowait())
            is_open = lines[-1] is not None
            with suppress(OSError):  # a full volume costs these lines
                self._append(b"".join(line for line in lines if line))

    def _append(self, block: bytes) -> None:
        """Append lines to the log; if they do not fit, the log first becomes ``RANK.log.1``."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size + len(block) > self._limit:
            self._path.replace(f"{self._path}.1")
        with self._path.open("ab") as file:
            file.write(block[-self._limit :])  # of a block above the limit, only the end


def merged(folder: Path) -> list[str]:
    """Return the lines of all ranks' logs in the order of time, without their times; empty: there are none.

    Raises:
        OSError: They cannot be read.
    """
    if not folder.is_dir():
        return []
    ranks = {path.name.partition(".")[0] for path in folder.glob("*.log*")}  # of RANK.log and RANK.log.1
    lines_by_rank = [_read(folder, rank) for rank in sorted(ranks)]
    return [line for _, line in heapq.merge(*lines_by_rank)]


def _read(folder: Path, rank: str) -> Iterator[tuple[float, str]]:
    """Yield the lines of a rank, each with its time in seconds since the epoch.

    A full volume may have cut a line. A line that was cut within its time is left out; any other is yielded
    as it is.
    """
    last = 0.0
    for name in (f"{rank}.log.1", f"{rank}.log"):
        text = (folder / name).read_bytes() if (folder / name).exists() else b""
        for line in text.split(b"\n"):
            written, space, rest = line.partition(b" ")
            with suppress(ValueError):
                last = max(last, float(written))  # the order of lines stays, even if a clock is set back
                if space:  # else the line was cut within its time
                    yield last, rest.decode(errors="replace")
