"""Start all ranks of this machine, and end them together: torchrun's part, for a world that cannot change.

Nothing is restarted and no node comes or goes, so that this process needs no torch: the ranks are the first
to import it.
"""

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from manycpu.pipeline.node import cpus, meeting_point
from manycpu.pipeline.node.rank_environment import LAUNCHER, Rank

__all__ = ["fork_ranks"]

GRACE = 30.0  # seconds that the other ranks have to end by themselves, as under torchrun
_ENDING: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_SIGNALS: Final = _ENDING | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"


def fork_ranks(count: int) -> socket.socket | None:
    """Fork a process for each of ``count`` ranks; this one waits for them, and ends as the first that failed.

    Returns:
        In each of the ranks; in rank 0 what its store is to listen on.
    """
    cpus.preload(Rank(0, count, 0, count, "none"))  # before the fork: one new beginning is enough for all
    listener = meeting_point.listen()
    os.environ |= _common_variables(count)
    error_file = os.environ.get(_ERROR_FILE)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns how a child ended
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    ranks: dict[int, int] = {}
    for rank in range(count):
        if (pid := os.fork()) == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            return _become(rank, listener)
        ranks[pid] = rank
    listener.close()
    code, first = _wait(ranks)
    if error_file is not None:
        _keep_error_of(first, error_file, count)
    sys.exit(code)


def _become(rank: int, listener: socket.socket) -> socket.socket | None:
    os.setpgid(0, 0)  # a terminal's signal reaches a rank once, through the process that started it
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    if _ERROR_FILE in os.environ:
        os.environ[_ERROR_FILE] = _own_error_file(os.environ[_ERROR_FILE], rank)
    if rank == 0:
        return listener
    listener.close()
    return None


def _common_variables(count: int) -> dict[str, str]:
    """Build what torchrun tells all ranks of a machine; the store is rank 0's own."""
    return {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        LAUNCHER: "processes",
        "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _wait(ranks: dict[int, int]) -> tuple[int, int | None]:
    """Wait for all ranks; once one has failed, or this process is told to end, the others are ended.

    Returns:
        The exit code, as a shell writes it, and the rank that failed first; None where none did.
    """
    first: tuple[int, int | None] | None = None
    deadline = None
    while ranks:
        number = _next_signal(deadline)
        if number is None:  # the grace is over
            deadline = None
            _send(ranks, signal.SIGKILL)
            continue
        failed = _reap(ranks) if number == signal.SIGCHLD else None
        if number != signal.SIGCHLD:
            _send(ranks, number)
        elif failed and first is None:
            _send(ranks, signal.SIGTERM)
        if first is None and (failed or number in _ENDING):
            first, deadline = failed or (128 + number, None), time.monotonic() + GRACE
    return first or (0, None)


def _next_signal(deadline: float | None) -> int | None:
    """Wait for a signal; None when the deadline comes first."""
    if deadline is None:
        return signal.sigwaitinfo(_SIGNALS).si_signo
    received = signal.sigtimedwait(_SIGNALS, max(0.0, deadline - time.monotonic()))
    return received.si_signo if received else None


def _reap(ranks: dict[int, int]) -> tuple[int, int] | None:
    """Forget the ranks that have ended; the exit code and the number of one that failed."""
    failed = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        rank, code = ranks.pop(pid, None), os.waitstatus_to_exitcode(status)
        if rank is None:  # a child of whoever this process was before it became the parent of ranks
            continue
        if code and failed is None:
            failed = (code if code > 0 else 128 - code, rank)
    return failed


def _send(ranks: Iterable[int], number: int) -> None:
    for pid in ranks:
        os.kill(pid, number)  # of a child that was not reaped yet: it is there


def _own_error_file(path: str, rank: int) -> str:
    return f"{path}.{rank}"


def _keep_error_of(first: int | None, path: str, count: int) -> None:
    """Leave what the first rank that failed recorded where the whole run was to record it."""
    for rank in range(count):
        own = Path(_own_error_file(path, rank))
        with suppress(OSError):
            own.replace(path) if rank == first else own.unlink()
