"""Launch a training on Kubernetes, as a job of one of Kubeflow's operators, and read its status."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tenacity import (
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random,
)

from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.ledger import Attempt, Entry
from manycpu.pipeline.spec.errors import ClusterError, ConflictError, LaunchError, RunGoneError
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, kind_of, resource_of, resources
from manycpu.pipeline.spec.kube_object import KubeObject, epoch, is_being_deleted
from manycpu.pipeline.spec.naming import label, labels
from manycpu.pipeline.spec.placement import CODE, Placement
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.attempt import (
    attempt_of,
    attempt_status,
    begin_attempt,
    checkpoints_of,
    join,
    should_attach,
)
from manycpu.pipeline.targets.context import Built, Staged
from manycpu.pipeline.targets.kubernetes import run_secret
from manycpu.pipeline.targets.kubernetes.context import (
    ClusterContext,
    attempt_directory,
    claim_of,
    cluster_of,
    directory_of,
    is_readable,
)
from manycpu.pipeline.targets.kubernetes.deletion import is_companion, of_run, present, wait_until_gone
from manycpu.pipeline.targets.kubernetes.following import exit_records, judgement
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder, attempt_state
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.kueue import describe_wait_once
from manycpu.pipeline.targets.kubernetes.volume.claims import with_volume_of
from manycpu.pipeline.targets.open_run import as_started
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.targets.program_code import program_of

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
_COMPANION_TIMEOUT_S = 60.0  # within which the operator's cache must have the companions of a job
_CONFLICT_TRIES = 10  # number of tries of an update that conflicts with other processes' changes
_ENDED_TIMEOUT_S = 120.0  # within which the pods of an earlier attempt must be gone


def launch(ctx: ClusterContext, staged: Staged, built: Built) -> tuple[JobHandle, bool]:
    """Create the next attempt's job, or attach to an attempt that runs or has succeeded.

    The ledger records the attempt before its job exists. The job has the attempt's name, so two launches at
    the same time create one job.

    Returns:
        The attempt's handle; and True if the launch attached to the attempt, False if it created the job.

    Raises:
        ForeignRunError: Another Airflow task trains this run, with other fields.
        LaunchError: The cluster does not accept the job, or the earlier attempt's pods do not end.
        RunGoneError: The run was deleted meanwhile.
    """
    _judge_by_exit_records(ctx)
    handle, entry = _retry_conflicts(_record_attempt, ctx, attempt_of(ctx, staged, built))
    if handle is not None:
        return handle, True
    _end_earlier_attempts(ctx, entry.attempt)
    run_secret.provide(ctx)
    placement = place(ctx, staged, built, entry)
    manifests = JOB_LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement)
    handle = _make_handle(ctx, _create(ctx, manifests), entry.attempt)
    if _record_handle_or_delete(ctx, handle):
        return handle, False
    return launch(ctx, staged, built)  # another launch has begun a later attempt: attach to that


def _create(ctx: ClusterContext, manifests: list[KubeObject]) -> KubeObject:
    """Create the companions of an attempt's job, such as a runtime, and then the job; return the job."""
    *companions, job = manifests
    for companion in companions:
        _create_one(ctx, companion)
    # The operator checks the companions that the job refers to, and may not have seen them yet: retry.
    timeout_s = _COMPANION_TIMEOUT_S if companions else 0.0
    retrying = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, LaunchError) and "not found" in str(error)),
        stop=stop_after_delay(timeout_s),
        wait=wait_random(0.2, 0.6),
        reraise=True,
    )
    return retrying(_create_one, ctx, job)


def _create_one(ctx: ClusterContext, manifest: KubeObject) -> KubeObject:
    """Create an object, or return the one that this run created earlier.

    Raises:
        LaunchError: The cluster refuses the object, or an object of another run has its name.
    """
    try:
        # If an object of this name exists, create() returns that one: it may be another run's.
        created = cluster_of(ctx).create(manifest)
    except ClusterError as error:
        raise LaunchError(
            f"the cluster does not accept the {manifest['kind']}: {error.message}",
            field=error.field or "target.launch",
            fix=error.fix or "`manycpu render` prints what was asked for",
        ) from error
    if not _belongs_to(created, manifest["metadata"].get("ownerReferences", [])):
        raise _foreign(ctx, kind_of(manifest), manifest["metadata"]["name"])
    return created


def _foreign(ctx: ClusterContext, kind: str, name: str) -> LaunchError:
    """Make the error about an object that is in the way and that the run's ledger does not own."""
    resource = resource_of(kind)
    # kubectl needs the group, because two groups may have a kind of this name. The core group is empty.
    full_kind = f"{resource.plural}.{resource.group}".rstrip(".")
    return LaunchError(
        f"there is a {resource.kind} {name} that is not of this run, such as one whose ledger was deleted",
        field="target.namespace",
        fix=f"`kubectl -n {ctx.target.namespace} delete {full_kind} {name}` if you may, and run again",
    )


def _belongs_to(item: KubeObject, owners: Iterable[KubeObject]) -> bool:
    """Whether an object has all these owners, such as the run's ledger; they are compared by uid."""
    item_owners = {owner["uid"] for owner in item["metadata"].get("ownerReferences", [])}
    return item_owners.issuperset(owner["uid"] for owner in owners)


def status(ctx: ClusterContext, handle: JobHandle, entry: Entry) -> Status:
    """Return an attempt's status now, from the ledger, or else from its job, its pods and warning events.

    The attempt's follower judges in the same way. It also ends an attempt that has used up a time budget;
    this function ignores time budgets.
    """
    recorded = attempt_state(entry, handle)
    if recorded.succeeded is not None:  # a success stays one, even if its job is deleted
        return outcome(ctx, recorded.succeeded, recorded.observed)
    snapshot = JobSnapshot(handle, (claim_of(ctx),))
    snapshot.replace(*observe(ctx, handle))
    warnings = cluster_of(ctx).list("Event", fields="type=Warning")
    snapshot.apply("Event", warnings, deleted=[], complete=True)
    job_status = judgement.status_without_budgets(ctx.run, snapshot, recorded.activity)
    if not job_status.state.terminal:
        queue_reason = describe_wait_once(cluster_of(ctx), snapshot, time.time())
        return job_status.model_copy(update={"reason": f"{job_status.reason}\n{queue_reason}".strip()})
    # A cancellation that the ledger records wins always, a recorded failure over any state but a success.
    job_status = judgement.final_status(entry, handle, job_status)
    if job_status.state is not RunState.SUCCEEDED:
        return job_status
    # The job has succeeded, but no follower has read its log to the end: whether the ranks met is not known.
    return Status(state=job_status.state, reason="its log has not been read to the end yet")


def has_ended(ctx: ClusterContext, handle: JobHandle) -> bool:
    """Whether an attempt's job is gone, or has ended and no rank still works.

    The job decides, not the ledger: the job of an attempt that is recorded as failed may still run.
    """
    job, pods = observe(ctx, handle)
    if job is not None and JOB_KINDS[handle.launch].end(job) is None:  # no condition says that it ended
        return False
    return JOB_LAUNCHERS[handle.launch].state(job, pods).state.terminal  # false while pods still work


def observe(ctx: ClusterContext, handle: JobHandle) -> tuple[KubeObject | None, list[KubeObject]]:
    """Read an attempt's job (None when it is gone) and its pods from the cluster."""
    job = cluster_of(ctx).get(JOB_KINDS[handle.launch].kind, handle.name)
    if job is not None and job["metadata"]["uid"] != handle.uid:  # a later job of the same name
        job = None
    return job, cluster_of(ctx).list("Pod", labels(handle.run, attempt=str(handle.attempt)))


def present_handle(ctx: ClusterContext, entry: Entry) -> JobHandle | None:
    """Return the present attempt's handle; None: there is no attempt, or it has neither handle nor job.

    A recorded handle is returned even if its job is gone. If the launch was killed before it recorded the
    handle, the job is found by its name.
    """
    handle = entry.handle
    if isinstance(handle, JobHandle) and handle.attempt == entry.attempt:
        return handle
    if entry.attempt == 0:
        return None
    # Use the launch kind of the recorded target: the present target may have been edited.
    kind = JOB_KINDS[entry.described().target["launch"]]
    job = cluster_of(ctx).get(kind.kind, f"{ctx.name}-{entry.attempt}")  # the name is that of Placement.job
    if job is None or not _belongs_to(job, ctx.ledger.owner()):
        return None
    return _make_handle(ctx, job, entry.attempt)


def objects(ctx: ClusterContext) -> list[KubeObject]:
    """Build the manifests of the objects that a launch would create; the last one is the job.

    Nothing is staged or built, so that placeholders stand for the image and the paths of data and base model.
    """
    _, arguments = program_of(ctx)
    staged = Staged(data=_example_path(ctx, "data"), model=_example_path(ctx, "model"))
    image = (ctx.target.image or "IMAGE").removeprefix("http://")  # only manycpu knows this prefix
    built = Built(code=CODE, program=arguments, digest="", image=image)
    placement = place(ctx, staged, built, entry=None)
    return JOB_LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement)


def place(ctx: ClusterContext, staged: Staged, built: Built, entry: Entry | None) -> Placement:
    """Collect what a launcher must know of an attempt: its names, its image, and its paths in the pods.

    The attempt is the present one of the ledger's ``entry``, and the ledger owns its objects. None: describe
    the first one of a new run, as there may be no ledger yet.
    """
    attempt = 1 if entry is None else entry.attempt
    folder = attempt_directory(ctx, attempt)
    return Placement(
        name=ctx.name,
        attempt=attempt,
        python="python3",
        code=built.code or CODE,
        program=built.program,
        data=staged.data,
        model=staged.model,
        # One folder for each attempt: files of a failed attempt must not count as the model.
        output=f"{folder}/output",
        checkpoints=checkpoints_of(ctx, entry, directory_of(ctx)),
        caches=f"{ctx.target.home}/caches",
        attempt_directory=folder,
        resume_from=ctx.run.resume_from,
        image=built.image or "",
        claim=claim_of(ctx),
        owners=() if entry is None else tuple(ctx.ledger.owner()),
    )


def _record_handle_or_delete(ctx: ClusterContext, handle: JobHandle) -> bool:
    """Record the created job in the ledger, or delete the job if its attempt is no longer the present one.

    The process of a launch may be suspended after it recorded an attempt and before it creates the job. When
    it wakes up, another launch may have created that job, seen it fail, and begun the next attempt. Both jobs
    would write to the same checkpoints.

    Returns:
        True: the job is recorded. False: it was deleted, because another attempt or another job counts.

    Raises:
        RunGoneError: The run was deleted meanwhile; the job was deleted too.
    """
    try:
        if _retry_conflicts(_record_handle, ctx, handle):
            return True
    except RunGoneError:  # the ledger, which owns the job, is gone
        _delete(ctx, handle)
        raise
    _delete(ctx, handle)
    return False


def _record_handle(ctx: ClusterContext, handle: JobHandle) -> bool:
    """Record the handle in the ledger, and remove the reports of an earlier attempt's ranks from it.

    Returns:
        True: the ledger has this handle. False: another attempt has begun, or another job is recorded for
        this attempt; nothing was changed.
    """
    with ctx.ledger.claim() as entry:
        other = entry.handle
        if entry.attempt != handle.attempt:
            return False
        if isinstance(other, JobHandle) and other.attempt == handle.attempt:
            # This launch was suspended, and another one has recorded a job for the attempt. If it is the same
            # job, keep the record, which may have its end already. If not, the recorded job counts.
            return other.uid == handle.uid
        entry.handle, entry.observed = handle, None
        return True


def _delete(ctx: ClusterContext, handle: JobHandle) -> None:
    """Begin to delete the job of a handle; a later job of the same name stays."""
    cluster_of(ctx).delete(JOB_KINDS[handle.launch].kind, handle.name, uid=handle.uid)


def _judge_by_exit_records(ctx: ClusterContext) -> None:
    """Record the present attempt as a success if its job failed, but its ranks' exit records prove a success.

    The launch then attaches to this attempt instead of training again. Usually the follower reads the exit
    records: here the attempt had no follower, or its follower could not read them. If the ledger says that
    the training itself failed, nothing is changed.
    """
    entry = ctx.ledger.read()
    handle = present_handle(ctx, entry)
    if handle is None or handle.attempt in entry.cancelled:
        return
    # The fields may have been edited since: judge by those that the attempt was started with.
    started = as_started(ctx, entry, handle.attempt)
    on_its_volume = with_volume_of(ctx, entry, handle.attempt)
    state = attempt_state(entry, handle)
    snapshot = JobSnapshot(handle, (claim_of(on_its_volume),))
    snapshot.replace(*observe(ctx, handle))
    job_status = judgement.status_without_budgets(started.run, snapshot, state.activity)
    job_status = judgement.final_status(entry, handle, job_status)
    training_failed = state.verdict is not None and state.verdict.by_itself
    if training_failed or job_status.state is not RunState.FAILED:
        return
    records = list[dict[str, Any]]()
    if exit_records.are_needed(job_status, snapshot, state.observed) and is_readable(on_its_volume):
        try:
            records = exit_records.read(on_its_volume, handle.attempt)
        except RunGoneError:  # also one of UNREADABLE: do not launch a run that was deleted
            raise
        except exit_records.UNREADABLE as error:
            _LOG.warning("%s", exit_records.with_unreadable_records(job_status, error).reason)
    judged = exit_records.judge(job_status, snapshot, state.observed, records)
    if judged.state is RunState.SUCCEEDED:
        _LOG.info("attempt %d counts as a success: %s", handle.attempt, judged.reason)
        state.verdict = judged
        state.ended = judgement.end_time(snapshot) or time.time()
        fields = state.model_dump(mode="json", exclude_defaults=True)
        # Only write() is used, which needs neither a cursor nor a reader's name.
        AttemptRecorder(ctx, handle, cursor=None, reader=state.by).write(fields)


def _retry_conflicts(act: Callable[..., Result], *arguments: object) -> Result:
    """Call ``act(*arguments)``, which updates the ledger, and return its result; retry after a conflict.

    Raises:
        ConflictError: Another process changed the ledger during each of the tries.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(ConflictError),
        stop=stop_after_attempt(_CONFLICT_TRIES),
        wait=wait_random(0.05, 0.5),  # at random, so that two processes do not conflict each time
        reraise=True,
    )
    return retrying(act, *arguments)


def _record_attempt(ctx: ClusterContext, described: Attempt) -> tuple[JobHandle | None, Entry]:
    """Record in the ledger which attempt the launch continues with.

    - The present attempt runs or has succeeded: attach to it. Its handle is recorded, too: an earlier launch
      may have been killed after it created the job.
    - The present attempt has no job yet, and the same fields: complete it.
    - Else begin the next attempt.

    Returns:
        The handle of the attempt to attach to, or None if its job must be created; and the ledger's entry.

    Raises:
        ConflictError: Another process changed the ledger at the same time.
        ForeignRunError: Another Airflow task trains this run, with other fields.
    """
    with ctx.ledger.claim() as entry:
        join(ctx, entry, "train")
        present = present_handle(ctx, entry)
        if present is not None and should_attach(attempt_status(ctx, present, entry), entry):
            entry.handle = present
            return present, entry
        # A launch was killed after it recorded this attempt and before it created the job: complete it.
        has_no_job = entry.attempt > 0 and present is None and entry.cancelled_by is None
        # If the fields have changed since, begin a new attempt: the earlier launch may still create its job.
        # A missing description, of an older version, counts as unchanged.
        completes = has_no_job and entry.attempts.get(entry.attempt, described) == described
        begin_attempt(entry, entry.attempt if completes else entry.attempt + 1, described)
        return None, entry


def _end_earlier_attempts(ctx: ClusterContext, attempt: int) -> None:
    """Delete the jobs of all earlier attempts, and wait until these jobs and their pods are gone.

    They would write to the same checkpoints as the new attempt. More than one earlier attempt may have a job:
    the previous launch may have been killed while it waited here.

    Raises:
        LaunchError: A job or pod still exists after two minutes, or a job is not this run's.
    """
    if attempt == 1:  # there is no earlier one
        return

    def stays(item: KubeObject) -> bool:
        """Whether an object belongs to the run as a whole, or to this attempt or a later one."""
        attempt_of_item = label(item, "attempt")
        # Companions, such as a runtime, and the run's claim, which has no attempt, stay with the run.
        if is_companion(item) or item["kind"] not in (*resources(), "Pod") or not attempt_of_item.isdigit():
            return True
        return int(attempt_of_item) >= attempt  # another launch may have created a later attempt

    def ends(items: list[KubeObject]) -> list[KubeObject]:
        """Choose what of the run must be gone before the new attempt begins."""
        return [item for item in of_run(ctx.name, ctx.ledger.uid(), items) if not stays(item)]

    owners = ctx.ledger.owner()
    items = [item for item in present(ctx, labels(ctx.name)) if not stays(item)]
    jobs = [item for item in items if item["kind"] in resources()]
    for job in jobs:
        if _belongs_to(job, owners):  # Kubernetes deletes its pods with it
            cluster_of(ctx).delete(job["kind"], job["metadata"]["name"], uid=job["metadata"]["uid"])
        elif not is_being_deleted(job):
            raise _foreign(ctx, job["kind"], job["metadata"]["name"])
    undeleted = wait_until_gone(ctx, labels(ctx.name), _ENDED_TIMEOUT_S, ends)
    if undeleted:
        raise LaunchError(
            f"an earlier attempt does not end: {', '.join(undeleted)} is still there "
            f"after {_ENDED_TIMEOUT_S:g} s",
            fix="See why it stays with `kubectl describe`, and run again",
        )


def _make_handle(ctx: ClusterContext, job: KubeObject, attempt: int) -> JobHandle:
    """Make the handle of an attempt from its job, as the cluster returned it."""
    meta = job["metadata"]
    return JobHandle(
        run=ctx.name,
        attempt=attempt,
        launch=kind_of(job).lower(),
        namespace=ctx.target.namespace,
        name=meta["name"],
        uid=meta["uid"],
        created=epoch(meta["creationTimestamp"]),
        connection=ctx.target.connection,
    )


def _example_path(ctx: ClusterContext, name: str) -> str | None:
    """Return a placeholder path for the field ``data`` or ``model``; None: the run leaves it out."""
    return f"{ctx.target.home}/{name}/DIGEST" if getattr(ctx.run, name) else None
