"""Start a rank: this process becomes its pump, a child of it becomes the rank."""

import contextlib
import os
import socket
import sys

from manycpu.pipeline.node import cpus, ranks
from manycpu.pipeline.node.log_forwarder import die_with_parent, pump
from manycpu.pipeline.spec import events

USAGE = "usage: python -m manycpu.pipeline.node [-m MODULE | SCRIPT] ARGS..."


def main(argv: list[str]) -> int:
    """Fork: returns in the rank only, with the code to exit with."""
    if not argv or argv == ["-m"]:
        sys.stderr.write(USAGE + "\n")
        return 2
    host = os.environ.setdefault("MANYCPU_HOST", socket.gethostname())
    try:
        rank = ranks.of(os.environ)
    except ranks.RankError as error:
        message = f"proof of scale failed on {host}: {error}"
        sys.stdout.write(events.encode("error", kind="RankError", message=message) + "\n")
        return 87
    cpus.preload(rank)
    stream, spoken = os.pipe()
    pumping = os.getpid()
    if child := os.fork():
        _lead_group(child)
        os.close(spoken)
        pump(child, stream, rank.rank, host)
    die_with_parent(pumping)
    os.close(stream)
    _speak_into(spoken)
    # Late: the pump stays small without it.
    from manycpu.pipeline.node.rank import run

    return run(rank, argv)


def _lead_group(process: int) -> None:
    # A signal sent to the launcher's group then reaches the rank once, through the pump. Parent and child
    # both do this, as shells do: whoever comes first.
    with contextlib.suppress(OSError):
        os.setpgid(process, process)


def _speak_into(spoken: int) -> None:
    _lead_group(0)
    os.dup2(spoken, 1)
    os.dup2(spoken, 2)
    os.close(spoken)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
