"""Talk to a helper pod: over a direct connection if it works, else through the API server."""

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from manycpu.pipeline.adapters import cluster_exec
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_exec import Exec
from manycpu.pipeline.pod import direct
from manycpu.pipeline.pod.channel import Channel, LostError, RemoteError, SilentError
from manycpu.pipeline.pod.direct import Streams
from manycpu.pipeline.transfer import Progress

Answer = TypeVar("Answer")
CONTAINER: Final = "helper"
PROGRAM: Final = ("python3", "-m", "manycpu.pipeline.pod")
MEMORY: Final = "2Gi"
_KILLED_CODE: Final = 137  # exit code of a program that SIGKILL ended
_SIGNAL_BASE: Final = 128  # a higher exit code: a signal ended the program
_RETRY_CODE: Final = 75  # exit code EX_TEMPFAIL: the connection broke, or another process makes the same copy
_SILENCE_CODE: Final = 69  # exit code EX_UNAVAILABLE: the pod received nothing from the worker
_END_TIMEOUT_S: Final = 15.0  # for the pod's program to end after a direct connection broke, on a busy node
_LOG: Final = logging.getLogger(__name__)


class WayToPod:
    """Runs commands in one helper pod, and remembers whether a direct connection works.

    Args:
        cluster: The client for the pod's namespace.
        pod: The pod's name.
        direct: Whether to try a direct connection first.
    """

    def __init__(self, cluster: Cluster, pod: str, *, direct: bool) -> None:
        self._cluster, self._pod, self._direct = cluster, pod, direct
        self._logged_way = ""
        """The way that was logged last; empty: nothing was logged yet."""
        self._fell_silent = False
        """Whether the last direct connection broke because one end received nothing more over it."""

    def talk(self, command: str, talk: Callable[[Channel], Answer], progress: Progress) -> Answer:
        """Start a command in the pod, call ``talk`` with a channel to the command, and return its result.

        Raises:
            LostError: The connection broke, or the pod's program was killed.
            RemoteError: The pod's program failed.
            ClusterError: The cluster refuses the exec.
        """
        if not self._direct and not self._logged_way:  # the first command, and never tried directly
            self._log_way("through the API server, since target.direct is false")
        words = [*PROGRAM, command]
        address = ""
        if self._direct:
            words.append("direct")
            # Read it before the command starts, which does not wait long for a connection.
            address = self._address()
        running = cluster_exec.start(self._cluster, self._pod, CONTAINER, words)
        try:
            streams = self._connect(running, address) if self._direct else None
            if streams is None:
                return _talk_over(running, talk, progress)
            return self._talk_over_tls(streams, running, talk, progress)
        except LostError as error:
            if running.exit_code is not None:  # the program ended: its exit code says more
                raise _error_of_ended_program(running, error) from error
            raise
        finally:
            running.close()  # ends the reads and writes of other threads
            running.release()

    def leave_silent_connection(self) -> None:
        """Use the API server from now on if the last direct connection broke because it was silent.

        A network may let the handshake pass, and then drop large packets, or all packets after some time.
        """
        if self._direct and self._fell_silent:
            self._direct = False
            self._log_way("through the API server, since nothing comes through straight any more")

    def _talk_over_tls(
        self, streams: Streams, running: Exec, talk: Callable[[Channel], Answer], progress: Progress
    ) -> Answer:
        """Call ``talk`` with a direct connection; the exec ``running`` only shows how the program ends."""
        # Read the output of the pod's program: else the program would wait when the pipe is full.
        reading = threading.Thread(target=_drop_output, args=(running,), daemon=True)
        reading.start()
        try:
            return _talk_over(streams, talk, progress)
        except LostError as error:
            reading.join(_END_TIMEOUT_S)  # the pod's program may be about to end, with an exit code
            self._fell_silent = isinstance(error, SilentError) or running.exit_code == _SILENCE_CODE
            raise
        finally:
            streams.release()
            running.close()  # this ends the read of the thread
            reading.join()

    def _address(self) -> str:
        """Read the IP address of the pod; empty: it has none yet, or the pod is gone."""
        pod = self._cluster.get("Pod", self._pod) or {"status": {}}
        return str(pod["status"].get("podIP", ""))

    def _connect(self, running: Exec, address: str) -> Streams | None:
        """Try to connect to the pod directly, and send the pod the result over the exec.

        None: the pod cannot be reached, so that both ends use the exec. Raises LostError if the exec breaks.
        """
        identity = direct.make_identity(self._pod)
        # No channel watches the exec yet: this limit ends the wait for a pod that does not answer.
        running.limit(direct.ANSWER_TIMEOUT_S)
        try:
            port = direct.offer(running, identity)
            running.limit(None)
            streams = self._reach(address, port, identity)
            direct.choose(running, direct=streams is not None)
        except OSError as error:
            raise LostError(str(error)) from error
        return streams

    def _reach(self, address: str, port: int, identity: bytes) -> Streams | None:
        """Connect to the pod; None: it cannot be reached directly, and later commands do not try again."""
        try:
            streams = direct.connect(address, port, identity)
        except OSError as error:
            self._direct = False
            self._log_way(f"through the API server, since {address}:{port} cannot be reached: {error}")
            return None
        self._log_way("straight to it, over TLS")
        return streams

    def _log_way(self, way: str) -> None:
        """Log over which way data goes, if that differs from what was logged last."""
        if way != self._logged_way:
            self._logged_way = way
            _LOG.info("data for pod %s goes %s", self._pod, way)


def _talk_over(streams: Exec | Streams, talk: Callable[[Channel], Answer], progress: Progress) -> Answer:
    """Call ``talk`` with a channel that reads from and writes to ``streams``; return its result."""
    with Channel(streams, streams, streams.close, progress) as channel:
        return talk(channel)


def _drop_output(running: Exec) -> None:
    """Read and drop the output of the pod's program, until it ends."""
    while running.read(1):
        pass


def _error_of_ended_program(running: Exec, error: LostError) -> Exception:
    """Return the error to raise after a broken connection, by the exit code of the pod's program.

    LostError: a retry may succeed. RemoteError: the program failed.
    """
    code = running.exit_code
    if code == _KILLED_CODE:  # only the program was killed: its memory ran out, or an admin ended it
        return LostError(f"its program was killed (signal 9), as when its memory of {MEMORY} runs out")
    # The program still runs, a signal ended it, or it ended because the connection broke.
    if code is None or code > _SIGNAL_BASE or code in (0, _RETRY_CODE, _SILENCE_CODE):
        return error
    return RemoteError(f"the helper pod's program ended with code {code}: {running.last_words}", "image")
