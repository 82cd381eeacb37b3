"""What the ranks of an attempt recorded of their ends on the volume: it counts before how their job ended."""

from collections.abc import Iterable
from typing import Any, Final

from manycpu.pipeline.observed import believe
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.exit_records import FOLDER
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, attempt_directory, claim_of
from manycpu.pipeline.targets.kubernetes.following import diagnosis
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.judgement import ends
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import helper
from manycpu.pipeline.transfer import TransferError

__all__ = ["UNREADABLE", "are_needed", "judged", "read", "unread"]

_START: Final = 300  # seconds that the pod which reads them has to start: its node may be away
_LATE: Final = (None, "run.run_timeout", "run.stall_timeout")  # budgets that run while ranks work
UNREADABLE: Final = (ManycpuError, TransferError)
"""What says that the records cannot be read."""


def are_needed(status: Status, snapshot: JobSnapshot, observed: Observed) -> bool:
    """Whether the records may tell more of an end than the cluster and the logs do. Pure.

    Args:
        status: How the job ended.
        snapshot: The job.
        observed: What its ranks have reported; how their containers ended is not noted there yet.
    """
    if status.state is RunState.CANCELLED or observed.finished or any(r.exit_code for r in observed.ranks):
        return False
    if _is_lost(snapshot):  # how its containers ended then is not how their ranks did
        return True
    if not observed.met or status.budget not in _LATE:
        return False
    known = {rank.rank: rank.exit_code for rank in observed.ranks} | ends(snapshot, observed)
    if status.state is RunState.SUCCEEDED:
        return snapshot.speaker != "launcher" and any(code != 0 for code in known.values())
    return not any(known.values())


def read(ctx: ClusterContext, attempt: int) -> list[dict[str, Any]]:
    """Read the records of the round that all of its ranks finished; empty where there is none.

    It takes some minutes at most.

    Raises:
        ManycpuError: The volume cannot be read.
        TransferError: The same.
    """
    with helper(ctx, "exits", claim_of(ctx), lambda *_: None, start_timeout=_START) as pod:
        return list(pod.ask("exits", folder=f"{attempt_directory(ctx, attempt)}/{FOLDER}")["records"])


def judged(
    status: Status, snapshot: JobSnapshot, observed: Observed, records: Iterable[dict[str, Any]]
) -> Status:
    """Judge an end by what all ranks have reported or recorded: work that is finished is a success. Pure.

    Args:
        status: How the job ended.
        snapshot: The job.
        observed: What its ranks have reported; gets what they recorded.
        records: Of a round that all of its ranks finished.
    """
    believe(observed, records)
    # Where nothing was lost, the word of a launcher counts: mpirun may know of a failure that ranks do not.
    counts = snapshot.speaker != "launcher" or _is_lost(snapshot) or status.budget is not None
    if status.state is not RunState.FAILED or not observed.finished or not counts:
        return status
    return Status(state=RunState.SUCCEEDED, reason=f"all ranks had finished before: {status.in_short}")


def unread(status: Status, error: BaseException) -> Status:
    """Add to an end that its records cannot be read: it may be no failure of the training's own."""
    lack = f"its ranks may have finished: their records on the volume cannot be read: {error}"
    reason = "\n".join(part for part in (status.reason, lack) if part)
    return status.model_copy(update={"reason": reason, "by_itself": False})


def _is_lost(snapshot: JobSnapshot) -> bool:
    return snapshot.job is None or bool(diagnosis.losses(snapshot))
