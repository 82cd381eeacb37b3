"""The way of the bytes to a helper pod: straight to it where that works, else through the API server."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from manycpu.pipeline.adapters import cluster_exec
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_exec import Exec
from manycpu.pipeline.pod import direct
from manycpu.pipeline.pod.channel import Channel, LostError, RemoteError
from manycpu.pipeline.pod.direct import Streams
from manycpu.pipeline.transfer import Progress

__all__ = ["CONTAINER", "MEMORY", "PROGRAM", "WayToPod"]

Answer = TypeVar("Answer")
CONTAINER: Final = "helper"
PROGRAM: Final = ("python3", "-m", "manycpu.pipeline.pod")
MEMORY: Final = "2Gi"
_KILLED: Final = 137
_SIGNALS: Final = 128  # exit codes above: ended by a signal
_TRY_AGAIN: Final = 75  # EX_TEMPFAIL: the pod's end had not heard from the worker
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
        running = cluster_exec.start(self._cluster, self._pod, CONTAINER, words)
        streams: Exec | Streams = running
        try:
            streams = self._connect(running) if self._direct else running
            with Channel(streams, streams, streams.close, progress) as channel:
                return talk(channel)
        except LostError as error:
            if streams is not running:
                running.settle()
            if running.exit_code is not None:
                raise _ended(running, error) from error
            raise
        finally:
            if streams is not running:
                streams.release()
            running.close()
            running.release()

    def _connect(self, running: Exec) -> Exec | Streams:
        """Connect to the pod itself, or stay with the exec where it cannot be reached; tell which."""
        from manycpu.pipeline.pod.identity import make  # whose library only clusters need

        pod = self._cluster.get("Pod", self._pod) or {"status": {}}
        address, identity = str(pod["status"].get("podIP", "")), make(self._pod)
        running.limit(direct.PATIENCE)
        try:
            port = direct.offer(running, identity)
        except OSError as error:
            raise LostError(str(error)) from error
        running.limit(None)
        try:
            streams = direct.connect(running, address, port, identity)
        except OSError as error:
            self._direct = False
            self._tell(f"through the API server, since {address}:{port} cannot be reached: {error}")
            try:
                direct.decline(running)
            except OSError as gone:
                raise LostError(str(gone)) from gone
            return running
        self._tell("straight to it, over TLS")
        return streams

    def _tell(self, way: str) -> None:
        if way != self._told:
            self._told = way
            _LOG.info("data for pod %s goes %s", self._pod, way)


def _ended(running: Exec, error: LostError) -> Exception:
    code = running.exit_code
    # Alone, in a pod that lives: that is how a node takes back memory, or an admin ends it.
    if code == _KILLED:
        return LostError(f"its program was killed (signal 9), as when its memory of {MEMORY} runs out")
    if code is None or code > _SIGNALS or code in (0, _TRY_AGAIN):
        return error
    return RemoteError(f"the helper pod's program ended with code {code}: {running.last_words}", "image")
