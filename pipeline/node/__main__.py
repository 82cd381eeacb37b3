"""Start a rank, or all ranks of this machine: a process forwards the rank's logs, its child is the rank."""

import contextlib
import os
import socket
import sys
from typing import Final

from manycpu.pipeline.node import cpus, emit, local_world, world
from manycpu.pipeline.node.log_forwarder import die_with_parent, forward_logs
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.exit_records import EXIT_PROOF

USAGE = "usage: python -m manycpu.pipeline.node [--nproc-per-node=COUNT] [-m MODULE | SCRIPT] ARGS..."
_COUNT_OPTION: Final = "--nproc-per-node="  # with it, all ranks of this machine are started


def main(argv: list[str]) -> int:
    """Fork this process: the child is the rank and runs its program, the parent forwards the rank's logs.

    With ``--nproc-per-node`` it first forks a process for each rank of this machine, and then each of these
    forks in the same way. Only the child returns, with the rank's exit code; the parent ends as the rank did.
    Before the fork, main returns 2 for wrong usage, and 87, with an event, if the launcher's variables
    contradict each other.
    """
    count = None  # of the ranks to start; None: this process is one of a launcher's ranks
    if argv and argv[0].startswith(_COUNT_OPTION):
        count = argv.pop(0).removeprefix(_COUNT_OPTION)
    has_program = bool(argv) and argv != ["-m"]
    is_valid_count = count is None or (count.isdecimal() and int(count) > 0)
    if not has_program or not is_valid_count:
        sys.stderr.write(USAGE + "\n")
        return 2
    listener = None
    if count is None:
        launcher = os.getppid()
    else:
        # This process is the launcher: it waits for its ranks in fork_ranks, and exits there.
        launcher = os.getpid()
        listener = local_world.fork_ranks(int(count))  # returns in the ranks only
    # The log forwarder and the rank have to name the host alike.
    host = os.environ.setdefault("MANYCPU_HOST", socket.gethostname())
    try:
        rank = world.read_rank(os.environ)
    except world.RankError as error:
        message = f"proof of scale failed on {host}: {error}"
        sys.stdout.write(events.encode("error", kind="RankError", message=message) + "\n")
        return EXIT_PROOF
    if count is None:  # else fork_ranks has done it for all ranks
        cpus.preload(rank)
    read_end, write_end = os.pipe()  # for all that the rank prints
    forwarder, signature = os.getpid(), events.new_signature()
    if child := os.fork():  # in the parent, which ends in forward_logs
        _lead_group(child)
        os.close(write_end)
        if listener is not None:
            listener.close()  # the rank serves on it, and has a descriptor of its own
        forward_logs(child, launcher, read_end, signature, rank)
    die_with_parent(forwarder)  # in the child, the rank, from here on
    os.close(read_end)
    emit.keep(write_end, signature)
    _lead_group(0)
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Late: without it the forwarding process stays small.
    from manycpu.pipeline.node.run_rank import run

    return run(rank, argv, listener)


def _lead_group(process: int) -> None:
    """Make a process the leader of its own process group; 0: this process."""
    # A signal sent to the launcher's group then reaches the rank once, through the log forwarder.
    # Parent and child both do this, as shells do, because either may run first.
    with contextlib.suppress(OSError):
        os.setpgid(process, process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
