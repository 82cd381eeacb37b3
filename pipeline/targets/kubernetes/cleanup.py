"""Cancel a training, and delete what a run created: objects that its ledger owns, a folder on the volume."""

import logging
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import cast

from manycpu.pipeline.ledger import CLEANUP
from manycpu.pipeline.ledger.configmap import expired
from manycpu.pipeline.spec.errors import ConflictError, Finding, LaunchError, ManycpuError, RunGoneError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.kube_object import KubeObject, is_being_deleted
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.targets import output
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.kubernetes import run_secret
from manycpu.pipeline.targets.kubernetes.context import (
    ClusterContext,
    claim_of,
    cluster_of,
    directory_of,
    is_readable,
)
from manycpu.pipeline.targets.kubernetes.deletion import (
    is_companion,
    is_owned,
    of_run,
    present,
    wait_until_gone,
)
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import attempt_state
from manycpu.pipeline.targets.kubernetes.launch import has_ended, present_handle
from manycpu.pipeline.targets.kubernetes.output_report import remove_forgotten
from manycpu.pipeline.targets.kubernetes.volume.claims import with_each_volume
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import helper
from manycpu.pipeline.targets.open_run import reopen
from manycpu.pipeline.transfer import TransferError, discard_exports

_LOG = logging.getLogger(__name__)
_CANCEL_TIMEOUT_S = 90.0  # the grace period of pods is 30 s
_GONE_TIMEOUT_S = 120.0  # within which the run's objects must be gone
_EXPIRED_TIMEOUT_S = 30.0  # how long a run waits while expired runs are removed
_DELETED_LAST = ("ConfigMap", "PersistentVolumeClaim")  # the ledger, and the claim that it may own


def cancel(ctx: ClusterContext, by: str, attempt: int | None, *, only_over: bool = False) -> bool:
    """Record who cancels the present attempt, delete its job, and wait until its pods are gone.

    Args:
        ctx: The run.
        by: Who cancels it.
        attempt: The attempt to cancel; None: the present one.
        only_over: True: cancel only if the run's lease is over. False: cancel in any case.

    Returns:
        True: the attempt was cancelled. False: nothing was changed, because the attempt has ended, is not the
        present one or has no job, or because ``only_over`` is set and the lease is not over.

    Raises:
        ConflictError: With ``only_over``: another process has changed the ledger; nothing was cancelled.
        LaunchError: The pods do not end in time.
        ClusterError: The cluster does not answer.
    """
    # claim() fails if another process changes the ledger meanwhile, such as one that resumes the run.
    change_ledger = ctx.ledger.claim if only_over else ctx.ledger.update
    with change_ledger() as entry:
        if attempt is not None and entry.attempt != attempt:
            return False
        if only_over and not ctx.ledger.lease().over(ctx.ledger.now()):
            return False
        handle = present_handle(ctx, entry)
        if handle is None:
            return False
        recorded = attempt_state(entry, handle)
        if recorded.succeeded or has_ended(ctx, handle):
            return False
        if recorded.verdict is None:  # else the attempt failed before: delete its job, and keep that verdict
            entry.record_canceller(by)
    uid = ctx.ledger.uid()
    cluster_of(ctx).delete(JOB_KINDS[handle.launch].kind, handle.name, uid=handle.uid)
    attempt_labels = labels(ctx.name, attempt=str(handle.attempt))

    def of_attempt(items: list[KubeObject]) -> list[KubeObject]:
        """Choose the job and its pods; a companion, such as a runtime, stays until the run is deleted."""
        return [item for item in of_run(ctx.name, uid, items) if not is_companion(item)]

    undeleted = wait_until_gone(ctx, attempt_labels, _CANCEL_TIMEOUT_S, of_attempt)
    if undeleted:
        raise LaunchError(
            f"{', '.join(undeleted)} is still there {_CANCEL_TIMEOUT_S:g} s after the run was cancelled",
            fix="See why it stays with `kubectl describe`; its node may be lost",
        )
    return True


def keep_results(ctx: ClusterContext, seconds: float | None, *, checkpoints: bool = True) -> list[str]:
    """Keep the run's results, which are output and checkpoints, and delete the rest of the run.

    The ledger stays, and so does a claim that was made for the run. If there are no results, the run's
    objects and its lease stay as they are: the caller then removes the run.

    Args:
        ctx: The run.
        seconds: For how long the results are kept; None: for ever.
        checkpoints: Whether the checkpoints are kept too.

    Returns:
        For messages: each result and its claim. Empty: there are no results.
    """
    # An attempt may have used another volume than the present one: each has its own results.
    kept = [name for each in with_each_volume(ctx) for name in _delete_all_but_results(each, checkpoints)]
    if not kept:
        return []
    ctx.ledger.keep(seconds)
    run_secret.remove(ctx)
    uid = ctx.ledger.uid()
    undeleted = _remove_objects(ctx, uid)
    undeleted += wait_until_gone(ctx, labels(ctx.name), _GONE_TIMEOUT_S, partial(_all_but_last, ctx, uid))
    for name in undeleted:
        _LOG.warning("%s is not deleted: it goes with what is kept of the run", name)
    return kept


def _delete_all_but_results(ctx: ClusterContext, checkpoints: bool) -> list[str]:
    """Delete the run's files on one volume, except output and checkpoints, with a helper pod.

    If the pod fails, log a warning: the run's whole folder then counts as kept.

    Args:
        ctx: The run, with the volume.
        checkpoints: Whether the checkpoints are kept too.

    Returns:
        For messages: each result, or the whole folder, and its claim. Empty: there are no results, or the
        claim has no volume or is being deleted.
    """
    folder = directory_of(ctx)
    where = f"claim {ctx.target.namespace}/{claim_of(ctx)}"
    if not is_readable(ctx):
        return []
    # A claim that was made for the run has no other files. On a user's claim, only this folder is the run's.
    within = ctx.target.home if ctx.target.makes_claim else folder
    request = {"folder": folder, "within": within, "checkpoints": checkpoints}
    try:
        # The lambda: no progress is shown.
        with helper(ctx, "cleanup", claim_of(ctx), lambda *_: None) as pod:
            return [f"{folder}/{result} of {where}" for result in pod.ask("trim", **request)["results"]]
    except RunGoneError:  # also a ManycpuError: do not treat a deleted run as a failure of the pod
        raise
    except (TransferError, ManycpuError) as error:
        _LOG.warning("%s on claim %s is kept as a whole: %s", folder, claim_of(ctx), error)
        return [f"{folder} of {where}"]


def remove(ctx: ClusterContext) -> list[str]:
    """Delete what the run owns, and wait until it is gone.

    Returns:
        For messages: what could not be deleted, or still exists after the timeout. Empty: nothing is left.

    Raises:
        RunGoneError: The ledger belongs to a later run of the same name.
    """
    ledger = cluster_of(ctx).get("ConfigMap", ctx.name)
    if ledger is None or is_being_deleted(ledger):
        # An earlier try has deleted the ledger; Kubernetes deletes what it owns.
        return wait_until_gone(ctx, labels(ctx.name), _GONE_TIMEOUT_S, partial(of_run, ctx.name, None))
    uid = ctx.ledger.uid()  # before the removal, which deletes the ledger
    undeleted = _begin_removal(ctx, uid)
    # If something could not be deleted, `_begin_removal` kept the ledger: do not wait for ledger and claim.
    awaited = partial(_all_but_last, ctx, uid) if undeleted else partial(of_run, ctx.name, uid)
    return undeleted + wait_until_gone(ctx, labels(ctx.name), _GONE_TIMEOUT_S, awaited)


def _begin_removal(ctx: ClusterContext, uid: str) -> list[str]:
    """Delete what the run owns, and its ledger last; return the names of what could not be deleted.

    The run owns its objects, its folder on each volume that it used, and the files that failed exports left
    beside outputs on this disk. If anything could not be deleted, the ledger stays: without the ledger, no
    later clean-up would know of the rest.
    """
    undeleted = _remove_objects(ctx, uid)
    discard_exports(ctx.ledger.read().outputs, ctx.key)
    # A claim that was made for the run is deleted with its ledger. On the user's claim, the run has a folder
    # once an attempt has begun.
    volumes = with_each_volume(ctx) if ctx.ledger.read().attempt > 0 else []
    for each in volumes:
        claim = claim_of(each)
        if each.target.makes_claim or not is_readable(each):
            continue
        try:
            # The lambda: no progress is shown.
            with helper(each, "cleanup", claim, lambda *_: None) as pod:
                pod.ask("remove", folder=directory_of(each))
        except RunGoneError:  # also a ManycpuError: the run was deleted meanwhile
            raise
        except (TransferError, ManycpuError) as error:
            undeleted.append(f"{directory_of(each)} on claim {ctx.target.namespace}/{claim}: {error}")
    if not undeleted:
        ctx.ledger.remove()
    return undeleted


def _remove_objects(ctx: ClusterContext, uid: str) -> list[str]:
    """Delete what the run's ledger owns in all namespaces, except the claim; Kubernetes deletes jobs' pods.

    Owner references do not work across namespaces: Kubernetes does not delete objects of other namespaces
    with the ledger.

    Args:
        ctx: The run.
        uid: The uid of the run's ledger. Objects that it does not own stay: other people, or a later run of
            the same name, made them.

    Returns:
        For messages: the objects in other namespaces that could not be deleted, some with the error.
    """
    undeleted = []
    for full_name in ctx.ledger.read().elsewhere:
        namespace, kind, item_name = full_name.split("/")  # as `builder_pod` records them
        try:
            cluster = cluster_of(ctx).in_namespace(namespace)
            cluster.delete(kind, item_name)
            item = cluster.get(kind, item_name)
        except ManycpuError as error:
            undeleted.append(f"{full_name}: {error}")
            continue
        if item is not None and not is_being_deleted(item):  # an object in deletion counts as deleted
            undeleted.append(full_name)
    for item in present(ctx, labels(ctx.name)):
        if is_owned(item, ctx.name, uid) and item["kind"] not in _DELETED_LAST:
            cluster_of(ctx).delete(item["kind"], item["metadata"]["name"], uid=item["metadata"]["uid"])
    return undeleted


def _all_but_last(ctx: ClusterContext, uid: str, items: list[KubeObject]) -> list[KubeObject]:
    """Choose the run's objects except ledger and claim; ``uid`` is the ledger's."""
    return [item for item in of_run(ctx.name, uid, items) if item["kind"] not in _DELETED_LAST]


def remove_expired(
    ctx: ClusterContext, now: float, may_delete: Callable[[RunContext], bool]
) -> list[Finding]:
    """Delete other runs of the namespace whose lease is over.

    A thread does the removal. This function waits for it at most half a minute; then the thread continues.

    Args:
        ctx: The run that starts the removal.
        now: Seconds since the epoch, by the clock of leases.
        may_delete: Returns whether a run may be deleted. If the run must be kept, the function records in its
            ledger for how long.

    Returns:
        Warnings, which do not stop this run: runs that could not be removed, or a removal that takes longer.
    """
    troubles: list[Finding] = []
    removal = threading.Thread(target=_remove_all_expired, args=(ctx, now, may_delete, troubles), daemon=True)
    removal.start()
    removal.join(_EXPIRED_TIMEOUT_S)
    if removal.is_alive():
        troubles.append(_not_removed(f"the removal of older runs takes more than {_EXPIRED_TIMEOUT_S:g} s"))
    return troubles[:]  # a copy: the thread may still append to the list


def _remove_all_expired(
    ctx: ClusterContext, now: float, may_delete: Callable[[RunContext], bool], troubles: list[Finding]
) -> None:
    """Delete the expired runs, one after another; warnings are appended to ``troubles``."""
    try:
        ledgers = expired(cluster_of(ctx), now)
        remove_forgotten(cluster_of(ctx))  # report pods, which belong to no run's ledger
    except ManycpuError as error:
        troubles.append(_not_removed(f"older runs cannot be looked for: {error}"))
        return
    random.shuffle(ledgers)  # a slow removal must not delay the same runs every time
    for ledger in ledgers:
        if ledger.name == ctx.name and not ledger.is_marked_removed:
            continue  # its lease is over, and this run resumes it
        undeleted = []
        try:
            other = cast("ClusterContext", reopen(ledger.read(), access=ctx.access))
            # The list may be minutes old: a person may have resumed this run since.
            if not other.ledger.lease().over(now):
                continue
            # The run may still train: without a follower, no time budget ends it.
            cancel(other, CLEANUP, attempt=None, only_over=True)
            # mark_removed() returns false if another process has renewed the lease since the list.
            if may_delete(other) and ledger.mark_removed(now):
                output.release(other)
                undeleted = _begin_removal(other, other.ledger.uid())
        except (RunGoneError, ConflictError):
            continue  # another process has removed it, or resumes it
        except ManycpuError as error:
            undeleted = [str(error)]
        troubles += [
            _not_removed(f"run {ledger.name}, whose time is over, is not removed: {problem}")
            for problem in undeleted
        ]


def _not_removed(message: str) -> Finding:
    """Make a warning about a failed removal; it does not stop the run that tried."""
    fix = "The next run tries again; `manycpu clean` does so now"
    return Finding("target.namespace", message, fix, fatal=False)
