"""The way of the bytes to a helper pod: straight to it where that works, else through the API server."""

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

__all__ = ["CONTAINER", "MEMORY", "PROGRAM", "WayToPod"]

Answer = TypeVar("Answer")
CONTAINER: Final = "helper"
PROGRAM: Final = ("python3", "-m", "manycpu.pipeline.pod")
MEMORY: Final = "2Gi"
_KILLED: Final = 137
_SIGNALS: Final = 128  # exit codes above: ended by a signal
_AGAIN: Final = 75  # EX_TEMPFAIL: the connection broke, or another is at it
_UNHEARD: Final = 69  # EX_UNAVAILABLE: nothing was heard there of the worker
_SETTLE: Final = 2.0  # seconds
_LOG: Final = logging.getLogger(__name__)


class WayToPod:
    """Runs commands in one helper pod, and remembers which way works.

    Args:
        cluster: Where the pod is.
        pod: Its name.
        direct: Whether to try to go straight to it.
    """

    def __init__(self, cluster: Cluster, pod: str, *, direct: bool) -> None:
        self._cluster, self._pod, self._direct = cluster, pod, direct
        self._told = ""
        self._fell_silent = False

    def talk(self, command: str, talk: Callable[[Channel], Answer], progress: Progress) -> Answer:
        """Run a command in the pod, and talk to it.

        Raises:
            LostError: The connection broke, or the pod's program was killed.
            RemoteError: The pod could not do it.
            ClusterError: The cluster refuses it.
        """
        if not (self._direct or self._told):
            self._tell("through the API server, since target.direct is false")
        words = [*PROGRAM, command, *(["direct"] if self._direct else [])]
        address = self._address() if self._direct else ""  # asked for before the pod waits for it
        running = cluster_exec.start(self._cluster, self._pod, CONTAINER, words)
        try:
            streams = self._connect(running, address) if self._direct else None
            if streams is None:
                return _over(running, talk, progress)
            return self._over_tls(streams, running, talk, progress)
        except LostError as error:
            if running.exit_code is not None:
                raise _ended(running, error) from error
            raise
        finally:
            running.close()
            running.release()

    def doubt(self) -> None:
        """Go through the API server from now on, where the last talk straight to the pod ended in silence.

        A path may greet, and then swallow what is large, or all after some time.
        """
        if self._direct and self._fell_silent:
            self._direct = False
            self._tell("through the API server, since nothing comes through straight any more")

    def _over_tls(
        self, streams: Streams, running: Exec, talk: Callable[[Channel], Answer], progress: Progress
    ) -> Answer:
        # What the pod's program prints has to be read: it would stand still.
        reading = threading.Thread(target=_read_all, args=(running,), daemon=True)
        reading.start()
        try:
            return _over(streams, talk, progress)
        except LostError as error:
            reading.join(_SETTLE)  # it may be about to end
            self._fell_silent = isinstance(error, SilentError) or running.exit_code == _UNHEARD
            raise
        finally:
            streams.release()
            running.close()
            reading.join()

    def _address(self) -> str:
        pod = self._cluster.get("Pod", self._pod) or {"status": {}}
        return str(pod["status"].get("podIP", ""))

    def _connect(self, running: Exec, address: str) -> Streams | None:
        """Connect to the pod itself; None where it cannot be reached, and is to use the exec."""
        identity = direct.make_identity(self._pod)
        running.limit(direct.ANSWER_TIMEOUT_S)
        try:
            port = direct.offer(running, identity)
            running.limit(None)
            streams = self._reach(address, port, identity)
            direct.choose(running, straight=streams is not None)
        except OSError as error:
            raise LostError(str(error)) from error
        return streams

    def _reach(self, address: str, port: int, identity: bytes) -> Streams | None:
        try:
            streams = direct.connect(address, port, identity)
        except OSError as error:
            self._direct = False
            self._tell(f"through the API server, since {address}:{port} cannot be reached: {error}")
            return None
        self._tell("straight to it, over TLS")
        return streams

    def _tell(self, way: str) -> None:
        if way != self._told:
            self._told = way
            _LOG.info("data for pod %s goes %s", self._pod, way)


def _over(streams: Exec | Streams, talk: Callable[[Channel], Answer], progress: Progress) -> Answer:
    with Channel(streams, streams, streams.close, progress) as channel:
        return talk(channel)


def _read_all(running: Exec) -> None:
    while running.read(1):
        pass


def _ended(running: Exec, error: LostError) -> Exception:
    code = running.exit_code
    # Alone, in a pod that lives: that is how a node takes back memory, or an admin ends it.
    if code == _KILLED:
        return LostError(f"its program was killed (signal 9), as when its memory of {MEMORY} runs out")
    if code is None or code > _SIGNALS or code in (0, _AGAIN, _UNHEARD):
        return error
    return RemoteError(f"the helper pod's program ended with code {code}: {running.last_words}", "image")
