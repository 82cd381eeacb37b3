"""Start all ranks of this machine, and end them together, as torchrun does for a world of a fixed size.

No rank is restarted and no node joins or leaves. So this process needs no torch; only the ranks import it.
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

from manycpu.pipeline.node import cpus
from manycpu.pipeline.node.world import LAUNCHER, Rank

GRACE_S = 30.0  # seconds that the other ranks have to end by themselves, as under torchrun
_ENDING: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_SIGNALS: Final = _ENDING | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"


def open_meeting_point() -> socket.socket:
    """Listen on a free port of this machine, and set MASTER_ADDR and MASTER_PORT to it.

    Rank 0 serves its store on this very socket, so that no other program can take the port in between; ranks
    that connect earlier wait for it.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    return listener


def fork_ranks(count: int) -> socket.socket | None:
    """Fork a process for each of ``count`` ranks; the parent waits, and exits as the first rank that failed.

    Before the fork, this process may restart itself with the CPU plan's libraries preloaded.

    Returns:
        Only in the ranks: in rank 0 the socket on which it serves its store, in the others None.
    """
    # Before the fork: one restart is enough for all ranks, whose plan is the same.
    cpus.preload(Rank(rank=0, world_size=count, local_rank=0, local_world_size=count, launcher="none"))
    listener = open_meeting_point()
    # What torchrun sets on all ranks of a machine; the store is rank 0's own.
    os.environ |= {
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
    error_file = os.environ.get(_ERROR_FILE)  # where torchelastic records how a rank failed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, a child's exit code is lost
    # Blocked signals stay pending until `_wait` takes them; the ranks get the mask from before.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    ranks: dict[int, int] = {}
    for rank in range(count):
        if (pid := os.fork()) == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            return _become_rank(rank, listener)
        ranks[pid] = rank
    listener.close()
    code, first_failed = _wait(ranks)
    if error_file is not None:
        # What the first rank that failed recorded belongs where the whole run was to record it.
        for rank in range(count):
            record = Path(_error_file_of(rank, error_file))
            with suppress(OSError):  # it has recorded nothing
                if rank == first_failed:
                    record.replace(error_file)
                else:
                    record.unlink()
    sys.exit(code)


def _become_rank(rank: int, listener: socket.socket) -> socket.socket | None:
    """Make this forked process a rank; returns the listener on rank 0, and closes it on others."""
    os.setpgid(0, 0)  # a terminal's signal reaches a rank once, through the process that started it
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    if _ERROR_FILE in os.environ:
        os.environ[_ERROR_FILE] = _error_file_of(rank, os.environ[_ERROR_FILE])
    if rank == 0:
        return listener
    listener.close()
    return None


def _error_file_of(rank: int, path: str) -> str:
    return f"{path}.{rank}"


def _wait(ranks: dict[int, int]) -> tuple[int, int | None]:
    """Wait until all ranks have ended; ``ranks`` is process id -> rank, and is emptied.

    When a rank fails, the others get SIGTERM. When this process gets a signal, all ranks get it too. After a
    failure or a signal that ends processes, the ranks have a grace period of 30 s before SIGKILL.

    Returns:
        The exit code as a shell has it, and the rank that failed first; None: no rank failed, or a signal
        came first.
    """
    # The exit code, and the rank that failed first, or None if a signal came first; None: neither has come.
    outcome: tuple[int, int | None] | None = None
    deadline = None  # the end of the grace period; None: it has not begun, or is over
    while ranks:
        if deadline is None:
            received: signal.struct_siginfo | None = signal.sigwaitinfo(_SIGNALS)
        else:
            received = signal.sigtimedwait(_SIGNALS, max(0.0, deadline - time.monotonic()))
        if received is None:  # the grace period is over
            deadline = None
            _send(ranks, signal.SIGKILL)
            continue
        number = received.si_signo
        new_outcome: tuple[int, int | None] | None = None
        if number == signal.SIGCHLD:
            new_outcome = _reap(ranks)
            if new_outcome is not None and outcome is None:
                _send(ranks, signal.SIGTERM)
        else:
            _send(ranks, number)
            if number in _ENDING:
                new_outcome = (128 + number, None)
        if outcome is None and new_outcome is not None:
            outcome = new_outcome
            deadline = time.monotonic() + GRACE_S  # of the other ranks
    return outcome or (0, None)


def _reap(ranks: dict[int, int]) -> tuple[int, int] | None:
    """Reap the ranks that have ended, and remove them from ``ranks`` (process id -> rank).

    Returns the exit code and the number of a rank that failed; None: none of them failed.
    """
    failed = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:  # no other child has ended
            break
        rank = ranks.pop(pid, None)  # None: a child from before this program replaced another one (exec)
        code = os.waitstatus_to_exitcode(status)
        if rank is not None and code != 0 and failed is None:
            failed = (code if code > 0 else 128 - code, rank)  # for a signal, as shells report it
    return failed


def _send(ranks: Iterable[int], number: int) -> None:
    for pid in ranks:
        os.kill(pid, number)  # the process exists: it was not reaped yet
