"""Helper pods: a pod that mounts the run's volume while a verb reads or writes files there."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from manycpu.pipeline.launchers.pod_spec import (
    HOME,
    env_list,
    on_nodes,
    one_off_pod,
    pod_spec,
    security_context,
    unprivileged,
)
from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import Channel, LostError, Message, RemoteError
from manycpu.pipeline.spec.errors import (
    BadInputError,
    ClusterError,
    DeadlineError,
    ForbiddenError,
    InvalidError,
)
from manycpu.pipeline.spec.kube_object import KubeObject, epoch, is_being_deleted
from manycpu.pipeline.spec.naming import labels, secret_name
from manycpu.pipeline.spec.placement import LIB
from manycpu.pipeline.targets.kubernetes import run_secret
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.image import images
from manycpu.pipeline.targets.kubernetes.pod_status import PodReason, containers, reasons
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.kubernetes.volume.way_to_pod import CONTAINER, MEMORY, PROGRAM, Answer, WayToPod
from manycpu.pipeline.transfer import Progress

_IDLE_TIMEOUT_S: Final = 600  # a pod that gets no command for this time ends by itself
_MAX_LIFE_S: Final = 604_800  # Kubernetes ends a pod of this age
STALL_TIMEOUT_S: Final = 300.0  # a command fails after this time of broken connections without progress
_FORBIDDEN_TIMEOUT_S: Final = 15.0  # grace period for RBAC after the API server starts
_POLL_INTERVAL_S: Final = 0.25  # between two polls of the pod, and before the first retry
_MAX_PAUSE_S: Final = 10.0  # between two tries of a command
_DELETION_TIMEOUT_S: Final = 30.0  # after its grace period, for a pod to go; its node may be lost
_CHECK_INTERVAL_S: Final = 2.0  # between two checks that the run's ledger and claim exist
_SPEC_DIGEST: Final = "manycpu/asked"  # annotation with the digest of the requested spec
_SECRET_POLLS: Final = 8  # number of polls to wait for a secret: the node's cache may lack a new one


def manifest(
    ctx: ClusterContext, verb: str, claim: str | None, image: str, owners: list[KubeObject]
) -> KubeObject:
    """Build the manifest of a helper pod, which has no privileges and no token for the API.

    The pod mounts the claim, if there is one, and gets the run's variables and secrets.
    """
    run, target = ctx.run, ctx.target
    # The first process compiles the modules to this folder: later ones start in a fifth of the time.
    compiled = {"PYTHONPYCACHEPREFIX": f"{HOME}/bytecode"}
    # The ranks' variables, such as the Hub's address and proxies, are also the pod's.
    env = {"HOME": HOME, **compiled, **run.env, "PYTHONPATH": LIB}
    container: KubeObject = {
        "name": CONTAINER,
        "image": image,
        "command": [*PROGRAM, "idle", str(_IDLE_TIMEOUT_S)],
        "env": env_list(env, secret_name(ctx.name), optional=True),
        "envFrom": [{"secretRef": {"name": secret}} for secret in run.env_from],
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "2", "memory": MEMORY},
        },
        "securityContext": unprivileged(),
        "volumeMounts": [{"name": "data", "mountPath": target.mount_path}] if claim else [],
    }
    if target.pull_policy:
        container["imagePullPolicy"] = target.pull_policy
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    # Use the training's nodes: the first pod on a volume may fix the node or the zone of the volume.
    spec = pod_spec(container, volumes, securityContext=security_context(), **on_nodes(target))
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    metadata = {
        "name": f"{ctx.name}-{verb}",
        "labels": labels(ctx.name, verb=verb),
        "annotations": {_SPEC_DIGEST: digest},
        "ownerReferences": owners,
    }
    return one_off_pod(metadata, spec, _MAX_LIFE_S)


@contextmanager
def helper(
    ctx: ClusterContext, verb: str, claim: str | None, progress: Progress, start_timeout: float | None = None
) -> Iterator["Helper"]:
    """Create a helper pod for a verb, and delete it at the end of the ``with`` block, also after an error.

    Args:
        ctx: The run.
        verb: The verb, which is part of the pod's name.
        claim: The claim to mount; None: no claim.
        progress: Called with the bytes that are done, and bytes in all.
        start_timeout: Seconds within which the pod must start; None: ``run.start_timeout``.

    Raises:
        ClusterError: The cluster refuses the pod.
    """
    pod = Helper(ctx, verb, claim, progress, start_timeout)
    pod.create()
    try:
        yield pod
    finally:
        pod.delete()


class Helper:
    """The helper pod of a verb; if the pod is lost, the next try of a command creates it again."""

    def __init__(
        self,
        ctx: ClusterContext,
        verb: str,
        claim: str | None,
        progress: Progress,
        start_timeout: float | None = None,
    ) -> None:
        self._start_timeout = start_timeout or ctx.run.start_timeout
        self._ctx, self._cluster, self._progress = ctx, cluster_of(ctx), progress
        # The pod that writes the final report has no owner, because the ledger was deleted before.
        owners = ctx.ledger.owner() if ctx.ledger.exists() else []
        self._manifest = manifest(ctx, verb, claim, images.helper(ctx), owners)
        self._claim, self._owned = claim, bool(owners)
        self._last_check = time.monotonic()  # when ledger and claim were last seen to exist
        self.name = str(self._manifest["metadata"]["name"])
        self._uid: str | None = None
        """Uid of the pod, so that no later pod of this name is deleted; None: it was not created yet."""
        self._most_done = 0
        """The most bytes that the present command has reported as done."""
        self._progressed = False
        """Whether the present connection has made progress."""
        self._way = WayToPod(cluster_of(ctx), self.name, direct=ctx.target.direct)

    def create(self) -> None:
        """Create the pod, or reuse one from an earlier try; :meth:`wait_ready` replaces it if it differs."""
        if self._owned:  # without a ledger, which owns the Secret, no clean-up would delete the Secret
            run_secret.provide(self._ctx)
        self._uid = self._cluster.create(self._manifest)["metadata"]["uid"]

    def delete(self) -> None:
        """Begin to delete the pod, without a grace period, as it has nothing to finish.

        If the cluster does not answer, the pod stays until the run's cleanup deletes it.
        """
        with suppress(ClusterError):
            self._cluster.delete("Pod", self.name, uid=self._uid, grace=0)

    def run(self, command: str, talk: Callable[[Channel], Answer]) -> Answer:
        """Run a command in the pod; if the connection breaks, run it again from the beginning.

        Args:
            command: Name of the command.
            talk: Sends the request to the command over a channel, and returns the command's answer. It may be
                called several times, and must be idempotent.

        Raises:
            RemoteError: The pod's program failed.
            DeadlineError: The connection broke repeatedly, without progress for five minutes; or the pod did
                not start in time.
            ClusterError: The cluster refuses the call.
            RunGoneError: The run was deleted meanwhile.
        """
        self._most_done = 0
        broken_since: float | None = None  # when the connection first broke after the last progress
        pause = _POLL_INTERVAL_S
        while True:
            self._progressed = False
            try:
                self.wait_ready()
                return self._talk(command, talk)
            except InvalidError:  # the cluster would refuse the same call again
                raise
            except (LostError, ClusterError) as error:
                if not self._progressed:  # if the connection was direct, it may let nothing through
                    self._way.leave_silent_connection()
                if broken_since is None or self._progressed:  # the time without progress begins now
                    broken_since = time.monotonic()
                    pause = _POLL_INTERVAL_S
                broken_s = time.monotonic() - broken_since
                if isinstance(error, ForbiddenError) and broken_s > _FORBIDDEN_TIMEOUT_S:
                    raise
                if broken_s > STALL_TIMEOUT_S:
                    stalled = f"{STALL_TIMEOUT_S:g} s without progress"
                    raise DeadlineError(
                        f"pod {self.name} was lost again and again; {stalled}: {error}",
                        fix="See that the cluster is well, and run again: the copy resumes",
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def ask(self, command: str, **request: Any) -> Message:
        """Run a command that needs only one request in the pod; return the command's answer.

        Args:
            command: Name of the command.
            request: The fields of the request.

        Raises:
            RemoteError: The pod's program failed.
            DeadlineError: The connection broke repeatedly without progress, or the pod did not start in time.
            ClusterError: The cluster refuses the call.
            RunGoneError: The run was deleted meanwhile.
        """
        return self.run(command, lambda channel: client.ask(channel, **request))

    def _talk(self, command: str, talk: Callable[[Channel], Answer]) -> Answer:
        return self._way.talk(command, talk, self.report)

    def report(self, done: int, total: int) -> None:
        """Report bytes done and bytes in all to the caller; only more bytes than before count as progress.

        Raises:
            RunGoneError: The run was deleted meanwhile.
        """
        if done > self._most_done:
            self._most_done, self._progressed = done, True
        with suppress(ClusterError):  # the pod may answer while the API server does not
            self._check_run_exists()
        self._progress(done, total)

    def _check_run_exists(self) -> None:
        """Raise RunGoneError if ledger or claim are gone; do nothing within 2 s of the last check."""
        if not self._owned:  # the pod writes the final report, after the run was deleted
            return
        if time.monotonic() - self._last_check < _CHECK_INTERVAL_S:
            return
        self._last_check = time.monotonic()
        self._ctx.ledger.uid()  # raises RunGoneError if there is no ledger
        if self._claim is not None:
            claims.check_exists(self._ctx, self._claim)

    def wait_ready(self) -> None:
        """Wait until the pod runs; replace a pod that is gone, has ended or differs from the requested one.

        Raises:
            BadInputError: A Secret of ``run.env_from`` does not exist.
            DeadlineError: The image cannot be used, or the pod did not start in time; the message says why.
            RemoteError: The pod ran out of memory.
            RunGoneError: The run was deleted meanwhile.
        """
        deadline = time.monotonic() + self._start_timeout
        polls_without_secret = 0
        while True:
            pod = self._read_or_create()
            if _is_running(pod) and self._has_requested_spec(pod):
                return
            self._check_run_exists()
            pod_reasons = reasons(pod)
            secret = next((reason.missing_secret for reason in pod_reasons if reason.missing_secret), None)
            polls_without_secret = polls_without_secret + 1 if secret else 0
            if secret and polls_without_secret > _SECRET_POLLS:  # it is missing in the cluster, too
                namespace = self._ctx.target.namespace
                raise BadInputError(
                    f"pod {self.name} cannot start: there is no secret {secret!r} in namespace {namespace}",
                    field="run.env_from",
                    fix=f"Create it: kubectl -n {namespace} create secret generic {secret} "
                    "--from-literal=NAME=value",
                )
            never_starts = any(reason.fatal for reason in pod_reasons)  # only faults of the image are fatal
            if never_starts or time.monotonic() > deadline:
                raise DeadlineError(
                    f"pod {self.name} did not start: {self._describe_reasons(pod, pod_reasons)}",
                    field="target.helper_image" if never_starts else "run.start_timeout",
                    fix=f"kubectl -n {self._ctx.target.namespace} describe pod {self.name}",
                )
            time.sleep(_POLL_INTERVAL_S)

    def _read_or_create(self) -> KubeObject:
        """Read the pod, or create it if it is gone.

        If the pod has ended, differs from the requested one or hangs in deletion, delete it, and return it
        all the same: a later call finds it gone, and creates the next one.

        Raises:
            RemoteError: The pod ran out of memory.
        """
        pod = self._cluster.get("Pod", self.name)
        if pod is None:
            created = self._cluster.create(self._manifest)
            self._uid = created["metadata"]["uid"]
            return created
        self._uid = pod["metadata"]["uid"]
        if out_of_memory(pod):  # the next pod would also run out of memory
            self._cluster.delete("Pod", self.name, uid=pod["metadata"]["uid"], grace=0)
            raise RemoteError(f"pod {self.name} ran out of memory: it may use {MEMORY}", "memory")
        if is_being_deleted(pod):
            # The timestamp is the end of the pod's grace period.
            over_s = self._cluster.now() - epoch(pod["metadata"]["deletionTimestamp"])
            is_to_delete = over_s > _DELETION_TIMEOUT_S  # delete it now without a grace period
        else:
            has_ended = pod["status"].get("phase") in {"Succeeded", "Failed"}
            is_to_delete = has_ended or not self._has_requested_spec(pod)
        if is_to_delete:
            self._cluster.delete("Pod", self.name, uid=pod["metadata"]["uid"], grace=0)
        return pod

    def _has_requested_spec(self, pod: KubeObject) -> bool:
        """Whether a pod has the requested spec: a pod of an earlier try may differ, such as in its claim."""
        requested = self._manifest["metadata"]["annotations"][_SPEC_DIGEST]
        return bool(pod["metadata"].get("annotations", {}).get(_SPEC_DIGEST) == requested)

    def _describe_reasons(self, pod: KubeObject, why: list[PodReason]) -> str:
        """Describe in one line why the pod does not run: the reasons ``why``, and its last three warnings."""
        texts = [reason.text for reason in why]
        if not texts and is_being_deleted(pod):
            texts = ["it is being replaced"]
        elif not texts:
            texts = [str(pod["status"].get("phase", "Pending"))]
        events = self._cluster.list("Event", fields=f"involvedObject.name={self.name}")
        warnings = [event.get("message", "") for event in events if event.get("type") == "Warning"]
        return "; ".join(dict.fromkeys([*texts, *filter(None, warnings[-3:])]))  # each text once


def _is_running(pod: KubeObject) -> bool:
    """Whether a pod runs, and is not being deleted."""
    return pod.get("status", {}).get("phase") == "Running" and not is_being_deleted(pod)


def out_of_memory(pod: KubeObject) -> bool:
    """Whether a container of a pod was killed because its memory ran out."""
    ended = [container.state("terminated") or {} for container in containers(pod)]
    return any(state.get("reason") == "OOMKilled" for state in ended)
