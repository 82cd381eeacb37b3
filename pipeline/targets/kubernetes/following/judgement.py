"""Derive the status of an attempt from its job, its pods, its ranks and the time budgets. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import FAILED
from manycpu.pipeline.spec.kube_object import epoch
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RankFailure, RunState, Status
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following import diagnosis
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import (
    AttemptRecorder,
    AttemptState,
    RankActivity,
    attempt_state,
)
from manycpu.pipeline.targets.kubernetes.following.diagnosis import Ending
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.pod_status import ended, scheduled_at


class Budget(NamedTuple):
    """A time budget that counts in the present phase of the job."""

    field: str
    """The field of the run that sets the budget."""
    due: float
    """When the budget is used up, in seconds since the epoch."""
    message: str
    """Why the run fails when the budget is used up."""


def budgets(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> list[Budget]:
    """List the time budgets that count now, sorted by when they are due; the first may be used up already.

    Args:
        run: The run, with its timeouts in seconds.
        snapshot: The job, which has not ended.
        activity: What its ranks have done so far.
    """
    return sorted(_present_budgets(run, snapshot, activity), key=lambda budget: budget.due)


def _present_budgets(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> Iterator[Budget]:
    """Yield the time budgets that count in the present phase of the job, in no particular order."""
    present_phase = phase(run, snapshot, activity)
    if present_phase == "unacknowledged":
        message = (
            f"no operator acknowledged {snapshot.kind} {snapshot.name} within {run.acknowledge_timeout} s: "
            f"is the {snapshot.job_kind.operator} running, and does it watch this namespace?"
        )
        # While the job was suspended, the operator had nothing to do.
        since = max(_creation_time(snapshot), activity.last_placed_or_suspended)
        yield Budget("acknowledge_timeout", since + run.acknowledge_timeout, message)
        return
    # When the run got its nodes. ``activity.began`` leaves out the time of suspensions, so that it is later.
    began = activity.began or snapshot.placed_at(run.nodes.least)
    if began and not activity.paused:
        message = f"not done {run.run_timeout} s after its nodes were there"
        yield Budget("run_timeout", began + run.run_timeout, message)
    if present_phase == "queued":
        message = f"no capacity for it within {run.queue_timeout} s"
        yield Budget("queue_timeout", _queued_since(snapshot, activity) + run.queue_timeout, message)
        return
    placed_at = snapshot.placed_at(run.nodes.least) or 0.0  # not queued: it has its nodes
    # The next two begin only when the follower begins to watch: it may have missed earlier lines.
    if present_phase == "starting":
        message = f"its ranks have not met within {run.start_timeout} s of its nodes being there"
        yield Budget("start_timeout", max(placed_at, activity.watched_since) + run.start_timeout, message)
    if run.stall_timeout is not None:
        message = f"no line from any rank for {run.stall_timeout} s"
        silent_since = max(placed_at, activity.last, activity.watched_since)
        yield Budget("stall_timeout", silent_since + run.stall_timeout, message)


def phase(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> str:
    """Return the phase of a job that has not ended: unacknowledged, queued, starting or running.

    Unacknowledged: its operator has not noticed it. Queued: it lacks nodes or is suspended. Starting: it has
    its nodes, but its ranks have not met. Running: they have met.
    """
    if not snapshot.acknowledged and not snapshot.suspended:
        return "unacknowledged"
    if snapshot.suspended or snapshot.placed_at(run.nodes.least) is None or not snapshot.launchers_have_nodes:
        return "queued"
    return "running" if activity.met else "starting"


def _queued_since(snapshot: JobSnapshot, activity: RankActivity) -> float:
    """Return since when a queued job has waited, in seconds since the epoch.

    That is since its suspension began, or since its oldest pod without a node was created. A job that has
    ever given back its pods (``turns.py``) has waited since its own creation: each try has new pods.
    """
    if snapshot.note is not None:
        return _creation_time(snapshot)
    if snapshot.suspended:
        return activity.paused or snapshot.suspended_since or _creation_time(snapshot)
    waiting = [pod for pod in snapshot.pods if scheduled_at(pod) is None]
    if waiting:
        return min(epoch(pod["metadata"]["creationTimestamp"]) for pod in waiting)
    # It has no pods: count since it was created, was resumed, or last had its nodes.
    since = max(_creation_time(snapshot), snapshot.last_transition, activity.paused)
    if activity.began:  # it had its nodes; if this follower never saw that, count from when it began to watch
        since = max(since, activity.last_placed_or_suspended or activity.watched_since)
    return since


def _creation_time(snapshot: JobSnapshot) -> float:
    """Return when the job was created, in seconds since the epoch; 0: the job is gone."""
    return epoch(snapshot.job["metadata"]["creationTimestamp"]) if snapshot.job else 0.0


_END_TIMEOUT_S = 30.0  # a job must end in this time after all its ranks ended with 0; torchrun would wait 300
_TOLERATED_RESTARTS = 3  # more are a crash loop; a few may happen, for example because a peer is late


def judge(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity, now: float) -> Status:
    """Derive a job's status; a used-up time budget fails the job, unless its ranks have finished.

    Args:
        run: The run.
        snapshot: The job.
        activity: What its ranks have done so far.
        now: Seconds since the epoch, by the cluster's clock.
    """
    status = status_without_budgets(run, snapshot, activity)
    if status.state.terminal:
        return status
    if activity.finished:  # all ranks have ended with 0: give the job some seconds to end by itself
        return Status(state=RunState.SUCCEEDED) if now >= success_time(activity) else status
    present_budgets = budgets(run, snapshot, activity)
    if not present_budgets or now < present_budgets[0].due:
        return status
    first = present_budgets[0]
    reason = "\n".join(part for part in (first.message, diagnosis.explain(snapshot)) if part)
    return Status(state=RunState.FAILED, reason=reason, budget=f"run.{first.field}", by_itself=True)


def success_time(activity: RankActivity) -> float:
    """Return when a job whose ranks have all finished counts as a success, in seconds since the epoch.

    If the job has not ended by then, processes of it still wait for peers that are gone.
    """
    return activity.finished + _END_TIMEOUT_S


def status_without_budgets(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> Status:
    """Derive a job's status from its operator, its pods and its ranks, without time budgets.

    If the operator has not ended the job, the job still counts as failed if an obstacle can never pass, or if
    it crashes in a loop.
    """
    status = JOB_LAUNCHERS[snapshot.job_kind.launch].state(snapshot.job, snapshot.pods)
    if status.state is RunState.FAILED:
        # The training itself did not fail if the job was deleted or a pod was lost. If no container is known
        # to have failed, the cause is unknown.
        was_lost = snapshot.job is None or bool(diagnosis.losses(snapshot))
        training_failed = not was_lost and bool(diagnosis.endings(snapshot))
        return status.model_copy(update={"by_itself": training_failed})
    if status.state.terminal:
        return status
    fatal_reason = diagnosis.fatal_reason(snapshot)
    max_restarts = max(run.max_restarts, _TOLERATED_RESTARTS)  # for each container, and for the launcher
    if not fatal_reason and diagnosis.restarts(snapshot) > max_restarts:
        fatal_reason = (
            f"it crashes in a loop: more than {max_restarts} restarts "
            f"(run.max_restarts is {run.max_restarts})"
        )
    if fatal_reason:
        return Status(state=RunState.FAILED, reason=fatal_reason, by_itself=True)
    present_phase = phase(run, snapshot, activity)
    if present_phase == "running":
        lines = [status.reason, *diagnosis.crashes(snapshot), *diagnosis.losses(snapshot)]
        return Status(state=RunState.RUNNING, reason="\n".join(line for line in lines if line))
    cause = diagnosis.explain(snapshot)
    return Status(state=RunState.PENDING, reason=f"{present_phase}: {cause}" if cause else present_phase)


def must_be_deleted(run: TrainingRun, snapshot: JobSnapshot, status: Status) -> bool:
    """Whether to delete the job of an attempt that has ended: it might continue, or its pods hold nodes.

    If the operator has ended the job as failed, its running pods stay if ``run.keep`` keeps them.
    """
    if snapshot.job is None:
        return False
    if status.state is RunState.SUCCEEDED:
        return snapshot.job_kind.end(snapshot.job) is None  # processes still wait for peers that are gone
    if status.budget is not None or snapshot.job_kind.condition(snapshot.job, FAILED) is None:
        return True  # manycpu has ended the attempt, but the operator has not ended the job
    return run.keep in ("never", "results") and any(not ended(pod) for pod in snapshot.pods)


def final_status(entry: Entry, handle: JobHandle, status: Status) -> Status:
    """Return an attempt's final status: ``status``, unless the ledger has one that decides.

    - A cancellation in the ledger decides always.
    - An earlier verdict in the ledger decides if ``status`` is no success: later changes of the job do not
      change why it failed.
    """
    if (by := entry.cancelled.get(handle.attempt)) is not None:
        return Status(state=RunState.CANCELLED, reason=f"ended by {by}")
    if status.state is RunState.SUCCEEDED:
        return status
    return attempt_state(entry, handle).verdict or status


def with_first_failure(snapshot: JobSnapshot, recorder: AttemptRecorder, status: Status) -> Status:
    """Add to a failed status the rank or the container that failed first, with its last lines.

    Usually the rank has reported its failure. If it could not, because it was killed, for example, its
    container shows the failure: then add the last lines of its pod, and record the failure in ``recorder``.
    """
    if status.failure is not None:  # an earlier follower has added the failure
        return status
    if snapshot.job is None and status.budget:  # a follower deleted the job, which ended its pods
        return status
    observed = recorder.state.observed
    endings = diagnosis.endings(snapshot)
    a_rank_reported = observed.failure is not None
    causes = [*_ends_to_name(endings, a_rank_reported=a_rank_reported), *diagnosis.losses(snapshot)]
    reason = "\n".join(dict.fromkeys([status.reason, *causes]))
    silent_end = _first_silent_end(endings, recorder.state)
    if silent_end is None:  # no failure, or the rank that failed first has reported it
        return status.model_copy(update={"reason": reason, "failure": observed.failure})
    lines = tuple(recorder.tails.get(silent_end.pod, ()))
    rank = next((rank for rank in observed.ranks if rank.hostname == silent_end.hostname), None)
    if rank is None:
        # No known rank ran there: it is a launcher, or the ranks had not met. Add the lines to the reason.
        tail = ["its last lines:", *lines] if lines else []
        text = "\n".join([reason, *tail] if reason else tail)
        return status.model_copy(update={"reason": text, "failure": observed.failure})
    failure = RankFailure(rank=rank.rank, host=rank.host, exit_code=silent_end.code, last_lines=lines)
    recorder.record_failure(failure)
    return status.model_copy(update={"reason": reason, "failure": failure})


def _ends_to_name(endings: Sequence[Ending], *, a_rank_reported: bool) -> list[str]:
    """Describe the failed containers to name in the reason, the earliest first.

    These are all that ran out of memory, which only the kubelet knows: ranks report no more than a signal. If
    no rank reported a failure, it is also the container that failed first.
    """
    first = [] if a_rank_reported else endings[:1]  # the endings are sorted by time
    out_of_memory = [ending for ending in endings if ending.reason == "OOMKilled"]
    return [str(ending) for ending in (*first, *out_of_memory)]


def _first_silent_end(endings: Iterable[Ending], state: AttemptState) -> Ending | None:
    """Return the first failed end that no rank reported; None: there is none, or a rank failed before it."""
    for ending in endings:
        last_report = state.parted.get(ending.pod, -1.0)  # -1: below the 0 of a container that never started
        if last_report >= ending.began:  # a rank of this pod reported its end after the container started
            continue
        failed_at = int(state.observed.failed_at)  # in whole seconds, like the times of containers
        a_rank_failed_before = state.observed.failure is not None and ending.time > failed_at
        return None if a_rank_failed_before else ending
    return None


def record_exit_codes(snapshot: JobSnapshot, observed: Observed) -> None:
    """Add to ``observed`` the exit codes of containers whose ranks reported none; reported codes stay."""
    codes = exit_codes_of_containers(snapshot, observed)
    for rank in observed.ranks:
        rank.exit_code = codes.get(rank.rank, rank.exit_code)


def exit_codes_of_containers(snapshot: JobSnapshot, observed: Observed) -> dict[int, int]:
    """Read the exit codes that ranks did not report, from the containers in which these ranks ran.

    Returns:
        Rank -> exit code, for the ranks of which it is known; empty if a launcher starts the ranks.
    """
    if snapshot.speaker == "launcher":
        return {}  # the ranks' containers run sshd
    # If a container ended before the last meeting of the ranks, that end belongs to an earlier start.
    round_began = int(observed.rounds[-1].get("began", 0)) if observed.rounds else 0
    # Deleted pods come first: of two pods with the same host name, the present one counts.
    last_ends = {
        container.hostname: container.last
        for container in snapshot.rank_containers
        if not container.is_sidecar
    }
    codes = {}
    for rank in observed.ranks:
        end = last_ends.get(rank.hostname or "")
        if rank.exit_code is None and end and epoch(end.get("finishedAt")) >= round_began:
            codes[rank.rank] = diagnosis.exit_code(end)
    return codes


def end_time(snapshot: JobSnapshot) -> float:
    """Return when the job ended, in seconds since the epoch; 0: it has not ended, or the time is unknown."""
    end = snapshot.job_kind.end(snapshot.job)
    return epoch(end.get("lastTransitionTime")) if end else 0.0
