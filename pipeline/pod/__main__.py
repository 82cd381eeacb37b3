"""``python -m manycpu.pipeline.pod COMMAND``: answer a request on stdin and stdout, or idle in a pod.

With ``direct`` after the command, the worker may connect to the pod instead. Its exit codes: as of
:func:`answer`; EX_UNAVAILABLE where nothing was heard of the worker.
"""

import os
import signal
import sys

from manycpu.pipeline.pod import direct
from manycpu.pipeline.pod.channel import Channel
from manycpu.pipeline.pod.commands import answer

_LOOK = 15  # seconds


def main(command: str) -> int:
    """Answer one request, or idle."""
    if command == "idle":
        return idle(float(sys.argv[2]))
    stdin, stdout = open(0, "rb", buffering=1 << 20), open(os.dup(1), "wb")  # noqa: PTH123, SIM115 - for ever
    os.dup2(2, 1)  # what libraries print is no frame
    try:
        streams = direct.accept(stdin, stdout) if sys.argv[2:] == ["direct"] else None
    except ConnectionError:
        return os.EX_UNAVAILABLE
    with Channel(streams or stdin, streams or stdout, lambda: os._exit(os.EX_UNAVAILABLE)) as channel:
        code = answer(channel, command)
        stdout.flush()
        # At once: a thread waits for stdin, and Python would wait for it.
        os._exit(code)


def idle(seconds: float) -> int:
    """Run as a pod's first process: end on a signal, or when no other process has run for so long."""
    import psutil

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    remaining = seconds
    while remaining > 0 and signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, _LOOK) is None:
        remaining = seconds if len(psutil.pids()) > 1 else remaining - _LOOK
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
