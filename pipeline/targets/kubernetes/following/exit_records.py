"""Judge the end of an attempt by its ranks' exit records, which may show that a failed job was a success.

An exit record is a file on the volume that is written when a rank ends. It has the exit code, and the reports
of the rank that decide how its end is judged.
"""

from collections.abc import Iterable
from typing import Any, Final

from manycpu.pipeline.observed import add_exit_records
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.exit_records import FOLDER
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, attempt_directory, claim_of
from manycpu.pipeline.targets.kubernetes.following import diagnosis
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.judgement import exit_codes_of_containers
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import helper
from manycpu.pipeline.transfer import TransferError

_START_TIMEOUT_S: Final = 300  # for the start of the helper pod: its node may be unreachable
_BUDGETS_OF_WORK: Final = (None, "run.run_timeout", "run.stall_timeout")
"""Values of ``Status.budget`` with which ranks may have worked; None: no budget was used up."""
UNREADABLE: Final = (ManycpuError, TransferError)
"""The errors that :func:`read` raises if the records cannot be read."""


def are_needed(status: Status, snapshot: JobSnapshot, observed: Observed) -> bool:
    """Whether the exit records are needed, because cluster and logs do not show how all ranks ended. Pure.

    Args:
        status: How the job ended.
        snapshot: The job.
        observed: What the ranks have reported, still without the exit codes of their containers.
    """
    a_rank_failed = any(rank.exit_code for rank in observed.ranks)
    if status.state is RunState.CANCELLED or observed.finished or a_rank_failed:
        return False  # the end is known
    # If the job succeeded, only logs were lost: the records also have the metrics and the returned value.
    # If pods were lost, their containers' exit codes do not show how the ranks ended.
    if status.state is RunState.SUCCEEDED or _is_lost(snapshot):
        return True
    if not observed.met or status.budget not in _BUDGETS_OF_WORK:
        return not status.by_itself  # by itself: it failed before its ranks worked, for a known cause
    reported = {rank.rank: rank.exit_code for rank in observed.ranks}
    codes = reported | exit_codes_of_containers(snapshot, observed)  # rank -> exit code; None: unknown
    return not any(codes.values())  # no rank is known to have failed


def read(ctx: ClusterContext, attempt: int) -> list[dict[str, Any]]:
    """Read, with a helper pod, the exit records of the last meeting whose ranks all ended with 0.

    A meeting is one start of all ranks together. Returns an empty list if there is no such meeting. This
    takes some minutes at most.

    Raises:
        ManycpuError: The pod does not start, or the run was deleted.
        TransferError: The volume cannot be read.
    """
    claim = claim_of(ctx)
    with helper(ctx, "exits", claim, progress=lambda *_: None, start_timeout=_START_TIMEOUT_S) as pod:
        return list(pod.ask("exits", folder=f"{attempt_directory(ctx, attempt)}/{FOLDER}")["records"])


def judge(
    status: Status, snapshot: JobSnapshot, observed: Observed, records: Iterable[dict[str, Any]]
) -> Status:
    """Return the status; a failure becomes a success if reports or records show that all ranks ended with 0.

    Args:
        status: How the job ended.
        snapshot: The job.
        observed: What the ranks have reported; the records are added to it in any case.
        records: The exit records of a meeting whose ranks all ended with 0; may be empty.
    """
    add_exit_records(observed, records)  # this may make `observed.finished` true
    # mpirun may know of a failure that no rank reports. It counts, unless pods were lost or time ran out.
    overrides_job = snapshot.speaker != "launcher" or _is_lost(snapshot) or status.budget is not None
    if status.state is not RunState.FAILED or not observed.finished or not overrides_job:
        return status
    return Status(state=RunState.SUCCEEDED, reason=f"all ranks had finished before: {status.in_short}")


def with_unreadable_records(status: Status, error: BaseException) -> Status:
    """Add to a status that the exit records cannot be read, so that the cause of the failure is unknown."""
    explanation = f"its ranks may have finished: their records on the volume cannot be read: {error}"
    reason = "\n".join(part for part in (status.reason, explanation) if part)
    return status.model_copy(update={"reason": reason, "by_itself": False})


def _is_lost(snapshot: JobSnapshot) -> bool:
    """Whether the job was deleted, or pods of it were evicted or lost with their node."""
    return snapshot.job is None or bool(diagnosis.losses(snapshot))
