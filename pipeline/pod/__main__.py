"""``python -m manycpu.pipeline.pod COMMAND``: answer a request on stdin and stdout, or idle in a pod.

With ``direct`` after the command, the worker may connect to the pod instead. The exit codes are those of
:func:`manycpu.pipeline.pod.commands.answer`, and EX_UNAVAILABLE if the worker is silent.
"""

import os
import signal
import sys

_POLL_INTERVAL_S = 15


def main(command: str) -> int:
    """Answer one request and end the process; with the command ``idle``, idle.

    Returns (the exit code) only after ``idle``, or if the worker is gone before its request.
    """
    if command == "idle":
        return idle(float(sys.argv[2]))
    # Imported here: a pod that idles needs none of this, starts sooner, and needs a third of the memory.
    from manycpu.pipeline.pod import direct
    from manycpu.pipeline.pod.channel import Channel
    from manycpu.pipeline.pod.commands import answer

    stdin = open(0, "rb", buffering=1 << 20)  # noqa: SIM115 - stays open
    stdout = open(os.dup(1), "wb")  # noqa: PTH123, SIM115 - stays open
    os.dup2(2, 1)  # what libraries print to stdout goes to stderr, and not between frames
    try:
        streams = direct.accept(stdin, stdout) if sys.argv[2:] == ["direct"] else None
    except ConnectionError:
        return os.EX_UNAVAILABLE

    def end_process() -> None:
        """Close both streams at once: the worker is silent, or this end's work stands still."""
        os._exit(os.EX_UNAVAILABLE)

    with Channel(streams or stdin, streams or stdout, end_process) as channel:
        code = answer(channel, command)
        stdout.flush()
        # Not sys.exit: Python would wait for the thread that reads stdin.
        os._exit(code)


def idle(seconds: float) -> int:
    """Run as a pod's first process until a signal comes, or no other process has run for ``seconds``."""
    import psutil

    # Blocked signals stay pending until sigtimedwait takes one; it returns None if none came in time.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    remaining = seconds
    while remaining > 0 and signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, _POLL_INTERVAL_S) is None:
        # Another process in the pod is a command of the worker: the time begins again after it.
        remaining = seconds if len(psutil.pids()) > 1 else remaining - _POLL_INTERVAL_S
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
