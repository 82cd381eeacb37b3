"""Watch a job on Kubernetes: its state, as its operator reports it, and the lines in its pods' logs."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from manycpu.pipeline.adapters.cluster_watch import FAILURES, ClusterWatch
from manycpu.pipeline.spec.errors import ClusterError, InvalidError, NotFoundError
from manycpu.pipeline.spec.events import RankLine, split
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder, Cursor
from manycpu.pipeline.targets.kubernetes.following.follower import Follower, batches, selections
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot, role
from manycpu.pipeline.targets.kubernetes.following.logs import with_container_name
from manycpu.pipeline.targets.kubernetes.launch import observe
from manycpu.pipeline.targets.kubernetes.pod_status import containers

_LOG = logging.getLogger(__name__)
_RECORDING_TIMEOUT_S = 10.0  # for the last write to the ledger
_CLOSING_S = 0.1  # time for TLS connections to close: the transport does not report when they are closed


def lines_so_far(ctx: ClusterContext, handle: JobHandle) -> Iterator[RankLine]:
    """Read the logs of an attempt's present pods, one after another; change nothing of the run.

    A log that cannot be read is left out, with a warning if the cluster is at fault.
    """
    snapshot = JobSnapshot(handle)
    snapshot.replace(*observe(ctx, handle))
    speakers = [pod for pod in snapshot.pods if role(pod) == snapshot.speaker]  # they print the ranks' lines
    for container in (one for pod in speakers for one in containers(pod)):
        if container.init or container.is_sidecar:
            continue
        pod_name = container.pod["metadata"]["name"]
        full_name = f"{pod_name}/{container.name}"
        try:
            for line in cluster_of(ctx).log(pod_name, container.name).splitlines():
                yield with_container_name(split(line), full_name)
        except (InvalidError, NotFoundError):  # the container has not started, or is gone
            continue
        except ClusterError as error:  # such as a kubelet that does not answer: read the other logs
            _LOG.warning("the log of %s cannot be read: %s", full_name, error)


class JobWatch:
    """Watches a job: a thread follows it in the background, and :meth:`look` returns what has arrived.

    Args:
        ctx: The run.
        handle: The job.
        cursor: The position up to which its logs were delivered; None: deliver them from the beginning.
    """

    behind = False
    """Whether another look would return more lines at once; always false, as one look returns all."""

    def __init__(self, ctx: ClusterContext, handle: JobHandle, cursor: Cursor | None) -> None:
        self.ctx, self.handle = ctx, handle
        self._batches: deque[list[RankLine]] = deque()
        self._status = Status(state=RunState.PENDING)
        self._recorder = AttemptRecorder(ctx, handle, cursor, reader="")  # no reader: `cursor` counts
        self._following = _Following(ctx, handle, self._recorder, self._batches)

    @property
    def cursor(self) -> Cursor:
        """The position up to which logs were delivered and recorded; final after :meth:`close`.

        A watch that resumes from here delivers each line at least once: lines whose position could not be
        recorded are delivered again.
        """
        return self._recorder.recorded_cursor

    @property
    def observed(self) -> Observed:
        """What the ranks have reported so far, also what the ledger has not recorded yet."""
        return self._recorder.state.observed

    def look(self) -> tuple[list[RankLine], Status]:
        """Return the lines since the last look, and the status; no lines come after a terminal state.

        Raises:
            ClusterError: The cluster refuses the calls that record the end.
        """
        status = self._following.status()  # read it first: when it is terminal, all lines have arrived
        lines: list[RankLine] = []
        while self._batches:
            lines += self._batches.popleft()
        return lines, status

    def close(self) -> None:
        """Stop following; a last look may still return lines that arrived earlier.

        What the ranks have reported is recorded if the cluster answers within 10 s. ``cursor`` shows how far.
        """
        self._following.stop()
        # Write on a thread: the caller must not wait longer for a cluster that does not answer.
        writing = threading.Thread(target=self._record, name=f"record {self.handle.name}", daemon=True)
        writing.start()
        writing.join(_RECORDING_TIMEOUT_S)

    def _record(self) -> None:
        """Write the last position and reports to the ledger, if the cluster allows it and the run exists."""
        with suppress(FileNotFoundError, *FAILURES):  # the run is deleted, or the cluster does not answer
            self._recorder.write(self._recorder.fields())


class _Following:
    """A thread whose event loop follows a job, and appends the job's lines to ``batches_read``."""

    def __init__(
        self,
        ctx: ClusterContext,
        handle: JobHandle,
        recorder: AttemptRecorder,
        batches_read: deque[list[RankLine]],
    ) -> None:
        self._ctx, self._handle, self._recorder, self._batches = ctx, handle, recorder, batches_read
        self._follower: Follower | None = None
        self._error: BaseException | None = None
        self._end: Status | None = None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._follow())
        self._thread = threading.Thread(target=self._run, name=f"follow {handle.name}", daemon=True)
        self._thread.start()

    def status(self) -> Status:
        """Return the job's status; it is terminal only after all lines of the job were delivered.

        If an error ended the thread, raise that error.
        """
        if self._error is not None:
            raise self._error
        if self._end is not None:
            return self._end
        present_status = self._follower.status if self._follower else Status(state=RunState.PENDING)
        # The job has ended, and its last lines are still being read.
        return Status(state=RunState.RUNNING) if present_status.state.terminal else present_status

    def stop(self) -> None:
        """Stop following, and wait until the thread has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        """Run the event loop on the thread, until the job ends, ``stop`` is called, or an error occurs.

        Store the job's final status or the error, which ``status`` returns or raises.
        """
        try:
            self._end = self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:  # `stop` was called
            pass
        except BaseException as error:  # noqa: BLE001 - `status` raises it in the thread that calls `look`
            self._error = error
        finally:
            self._loop.run_until_complete(_end_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _follow(self) -> Status:
        """Follow the job to its end; return its final status."""
        cluster = cluster_of(self._ctx)
        watch = ClusterWatch(cluster.connect, self._handle.namespace)
        self._follower = Follower(self._ctx, self._handle, watch, self._recorder)
        try:
            selected = selections(self._handle.launch, labels(self._ctx.name))
            changes = batches(watch.follow(selected))
            return await self._follower.run(changes, self._deliver)
        finally:
            await watch.aclose()

    async def _deliver(self, lines: list[RankLine]) -> None:
        self._batches.append(lines)


async def _end_tasks() -> None:
    """Cancel the other tasks of this event loop, and give its connections time to close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(_CLOSING_S)
