"""Running commands and waiting for conditions."""

import logging
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

log = logging.getLogger("cluster")
Answer = TypeVar("Answer")
PATIENCE = 10  # A machine may be ten times as slow as the one on which the limits were chosen.


class ClusterError(Exception):
    """An error of the test cluster. The message says what failed, and what to do."""


class MissingError(ClusterError):
    """This machine lacks something that the cluster needs."""


def run(
    command: Sequence[str | Path],
    *,
    seconds: float = 60,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command to its end and return what it printed on stdout.

    Raises:
        ClusterError: the command failed (with its last lines), or took more than ten times `seconds`.
    """
    words = [str(word) for word in command]
    log.debug("%s", shlex.join(words))
    try:
        done = subprocess.run(
            words,
            input=stdin,
            env=env,
            cwd=cwd,
            timeout=PATIENCE * seconds,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]}: no such program: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"not done after {PATIENCE * seconds:.0f} s: {shlex.join(words)}") from error
    if done.returncode:
        raise ClusterError(
            f"exit code {done.returncode}: {shlex.join(words)}\n{tail(done.stdout + done.stderr)}"
        )
    return done.stdout


def tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def wait_for(what: str, probe: Callable[[], Answer], *, seconds: float, every: float = 0.1) -> Answer:
    """Call `probe` until it returns a true value, and return that value.

    Args:
        what: a description of the condition, for the error message.
        probe: the function to call.
        seconds: the expected time on a busy machine; the limit is ten times as long.
        every: seconds between two calls.

    Raises:
        ClusterError: `probe` returned no true value in time; the message has `what` and the last value.
    """
    seconds *= PATIENCE
    retrying = Retrying(
        retry=retry_if_result(lambda answer: not answer),
        stop=stop_after_delay(seconds),
        wait=wait_fixed(every),
    )
    try:
        return retrying(probe)
    except RetryError as error:
        seen = error.last_attempt.result()
        raise ClusterError(f"waited {seconds:.0f} s for {what}; the last answer was {seen!r}") from None
