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
_COUNT: Final = "--nproc-per-node="  # with it, all ranks of this machine are started


def main(argv: list[str]) -> int:
    """Fork the rank and run its program; only the rank returns, with its exit code."""
    count = argv.pop(0).removeprefix(_COUNT) if argv and argv[0].startswith(_COUNT) else None
    if not argv or argv == ["-m"] or (count is not None and (not count.isdecimal() or int(count) < 1)):
        sys.stderr.write(USAGE + "\n")
        return 2
    listener = local_world.fork_ranks(int(count)) if count else None
    host = os.environ.setdefault("MANYCPU_HOST", socket.gethostname())
    try:
        rank = world.read_rank(os.environ)
    except world.RankError as error:
        message = f"proof of scale failed on {host}: {error}"
        sys.stdout.write(events.encode("error", kind="RankError", message=message) + "\n")
        return EXIT_PROOF
    if count is None:  # else fork_ranks has done it for all ranks
        cpus.preload(rank)
    stream, output = os.pipe()
    forwarder, signature = os.getpid(), events.new_signature()
    if child := os.fork():
        _lead_group(child)
        os.close(output)
        if listener is not None:
            listener.close()
        forward_logs(child, stream, signature, rank, host)
    die_with_parent(forwarder)
    os.close(stream)
    emit.keep(output, signature)
    _lead_group(0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Late: without it the forwarding process stays small.
    from manycpu.pipeline.node.run_rank import run

    return run(rank, argv, listener)


def _lead_group(process: int) -> None:
    # A signal sent to the launcher's group then reaches the rank once, through the log forwarder.
    # Parent and child both do this, as shells do, because either may run first.
    with contextlib.suppress(OSError):
        os.setpgid(process, process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
