"""Preflight checks of a run against its cluster, and the rights that an account needs there."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

import yaml

from manycpu.pipeline.adapters.cluster import amount
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.launchers.pod_spec import TPU
from manycpu.pipeline.spec import memory_estimate
from manycpu.pipeline.spec.credentials import secret_variables
from manycpu.pipeline.spec.errors import BadInputError, ClusterError, Finding, ForbiddenError, NotFoundError
from manycpu.pipeline.spec.job_kinds import (
    JOB_KINDS,
    LOCAL_QUEUE,
    MPIJOB,
    QUEUE_LABEL,
    TRAINJOB,
    VISIBILITY,
    JobKind,
)
from manycpu.pipeline.spec.naming import labels, secret_name
from manycpu.pipeline.spec.targets import OWN_RUNTIME, Kubernetes
from manycpu.pipeline.targets.kubernetes import run_secret
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, claim_of, cluster_of
from manycpu.pipeline.targets.kubernetes.image.checks import check_images
from manycpu.pipeline.targets.kubernetes.launch import objects

Findings = Iterator[Finding]
Right = tuple[str, str, str]
"""A verb, an API group (empty: the core group), and a resource, such as ``pods`` or ``pods/log``."""
RIGHTS: Final = Path(__file__).with_name("rights.yaml")
_MAY_NOT: Final = "this account may not"
_BATCH: Final = "batch"
_DEADLINE_S: Final = 15  # within which the API server must answer, with retries
# Messages with which every call fails if the namespace or a right is missing.
_NO_NAMESPACE: Final = re.compile(r'namespaces "\S+" not found$')
_NO_RIGHT: Final = re.compile(r'User ".+" cannot \w+ resource ')
# patch suspends a job that has got only some of its nodes
_JOB_VERBS: Final = ("create", "delete", "get", "list", "patch", "watch")
_COMPANION_VERBS: Final = ("create", "delete", "get", "list")
_STORAGE_VARIABLES: Final = ("AWS_", "AZURE_", "FSSPEC_", "GCS_", "GOOGLE_")
"""How the names of credentials of object storage begin."""


def findings(ctx: ClusterContext) -> Findings:
    """Yield the findings of all checks; without an answer of the cluster, of those that do not need it."""
    checks = _CHECKS
    try:
        cluster_of(ctx).call("GET", "/version", deadline=_DEADLINE_S)
    except ClusterError as error:
        yield Finding("target.connection", error.message, error.fix or "See target.connection")
        checks = _CHECKS_WITHOUT_CLUSTER
    all_findings = (finding for check in checks for finding in _run_check(check, ctx))
    yield from without_repetitions(dict.fromkeys(all_findings))  # report each finding once


def without_repetitions(found: Iterable[Finding]) -> list[Finding]:
    """Drop repeated findings: if the namespace or a right is missing, many checks fail with that message."""

    def is_of_namespace(finding: Finding) -> bool:
        return finding.field == "target.namespace"

    def says_no_namespace(finding: Finding) -> bool:
        return _NO_NAMESPACE.search(finding.message) is not None

    # In both cases, keep only the finding of the check that looks for this cause.
    result = list(found)
    if any(is_of_namespace(finding) and says_no_namespace(finding) for finding in result):
        result = [finding for finding in result if is_of_namespace(finding) or not says_no_namespace(finding)]
    if any(finding.message.startswith(_MAY_NOT) for finding in result):
        result = [finding for finding in result if not _NO_RIGHT.search(finding.message)]
    return result


def _run_check(check: Callable[[ClusterContext], Findings], ctx: ClusterContext) -> Findings:
    """Yield the findings of a check; an error that the check raises becomes a finding."""
    try:
        yield from check(ctx)
    except (BadInputError, ClusterError) as error:
        yield Finding(error.field or "target.namespace", error.message, error.fix or "See the cluster")


def rights(target: Kubernetes) -> list[Right]:
    """List the rights that an account needs in the namespace of runs with this target.

    They are a part of those in ``rights.yaml``, which suffice for all kinds of jobs, also with a queue.
    """
    to_any_job = {right for kind in JOB_KINDS.values() for right in rights_to(kind)}
    api_groups = {""}  # the core group, with pods, claims and secrets
    if target.queue:
        api_groups |= {LOCAL_QUEUE.group, VISIBILITY.group}
        if target.launch == MPIJOB.launch:
            api_groups.add(_BATCH)  # to release a suspended launcher
    others = [
        (verb, group, resource)
        for verb, group, resource in granted()
        if group in api_groups and (verb, group, resource) not in to_any_job
    ]
    return [*rights_to(JOB_KINDS[target.launch]), *others]


def rights_to(kind: JobKind) -> list[Right]:
    """List the rights that an account needs to jobs of a kind, and to their companions."""
    verbs = [verb for verb in _JOB_VERBS if verb != "patch" or kind.suspend]
    rights_to_job = [(verb, kind.resource.group, kind.resource.plural) for verb in verbs]
    rights_to_companions = [
        (verb, companion.group, companion.plural)
        for companion in kind.companions
        for verb in _COMPANION_VERBS
    ]
    return rights_to_job + rights_to_companions


def granted() -> list[Right]:
    """Read the rights that the Role in ``rights.yaml`` grants."""
    role = yaml.safe_load(RIGHTS.read_text())
    return [
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def _check_operator(ctx: ClusterContext) -> Findings:
    """Check that the cluster serves the kind of the run's job, which shows that its operator is installed."""
    kind = JOB_KINDS[ctx.target.launch]
    try:
        served = cluster_of(ctx).call("GET", kind.resource.path)["resources"]
    except NotFoundError:  # the cluster does not serve the API group at all
        served = []
    if kind.resource.plural not in [resource["name"] for resource in served]:
        yield Finding(
            "target.launch",
            f"the cluster does not serve {kind.kind} of {kind.resource.api_version}",
            f"Install {kind.operator}, or choose another target.launch",
        )


def _check_manifests(ctx: ClusterContext) -> Findings:
    """Build the manifests of the run's objects, which raises an error if its fields contradict each other."""
    objects(ctx)
    yield from ()  # makes it a generator, as the other checks are


def _check_runtime(ctx: ClusterContext) -> Findings:
    """Create a TrainJob as a dry run, to check the cluster's runtime that the target names.

    Also report if Kueue would put the job into a default queue. Nothing is checked for other kinds of jobs,
    or if manycpu creates the runtime.
    """
    *companions, job = objects(ctx)
    has_own_runtime = bool(companions)  # one that manycpu creates
    if has_own_runtime or job["kind"] != TRAINJOB.kind:
        return
    job["metadata"]["name"] = f"{ctx.name}-preflight"
    try:
        answer = cluster_of(ctx).create(job, dry_run=True)
    except ClusterError as error:
        yield Finding(
            "target.runtime",
            f"Trainer refuses a TrainJob with runtime {ctx.target.runtime!r}: {error.message}",
            f"Name a ClusterTrainingRuntime that the cluster has, or set it to {OWN_RUNTIME!r}",
        )
        return
    # Kueue rewrites a job when it admits it: the job would lose its patches of the cluster's runtime. If
    # target.queue names the queue, manycpu creates a runtime that needs no patches.
    if queue := answer["metadata"].get("labels", {}).get(QUEUE_LABEL):
        text = f"Kueue puts each TrainJob of namespace {ctx.target.namespace} into LocalQueue {queue!r}"
        yield Finding("target.queue", text, f"Set it to {queue}: the run then has a runtime of its own")


def missing_rights(ctx: ClusterContext) -> Findings:
    """Check each right that a run needs; yield one finding for each resource that lacks some."""
    where = ctx.target.namespace
    # groupby needs the verbs of a resource one after another, as `rights` lists them.
    for (group, resource), rights_to_resource in groupby(rights(ctx.target), key=lambda right: right[1:]):
        plural, _, subresource = resource.partition("/")
        lacking = [
            verb
            for verb, *_ in rights_to_resource
            if not cluster_of(ctx).allowed(verb, plural, group=group, subresource=subresource)
        ]
        if lacking:
            yield Finding(
                "target.connection",
                f"{_MAY_NOT} {', '.join(lacking)} {resource} in namespace {where}",
                f"Give it the Role there: `kubectl -n {where} apply -f {RIGHTS}`, and a RoleBinding",
                fatal=group != VISIBILITY.group,  # it only serves to report the position in the queue
            )


def _check_namespace(ctx: ClusterContext) -> Findings:
    """Create a ConfigMap as a dry run: it fails if the namespace is missing or being deleted."""
    probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{ctx.name}-preflight"}}
    try:
        cluster_of(ctx).create(probe, dry_run=True)
    except ClusterError as error:
        yield Finding("target.namespace", error.message, "Create the namespace, or name another")


def _check_claim(ctx: ClusterContext) -> Findings:
    """Check that all nodes can mount the claim; a claim of the user must also exist and have its volume."""
    if ctx.target.makes_claim:  # it may not exist yet
        modes, field = [ctx.target.claim_access], "target.claim_access"
    else:
        claim = cluster_of(ctx).get("PersistentVolumeClaim", claim_of(ctx))
        field = "target.claim"
        if claim is None:
            yield Finding(
                field,
                f"there is no claim {claim_of(ctx)!r} in namespace {ctx.target.namespace}",
                "Create it, name another, or leave it out to have one made for the run",
            )
            return
        modes = claim["spec"]["accessModes"]
        if (claim.get("status") or {}).get("phase") == "Lost":
            yield Finding(field, f"claim {claim_of(ctx)!r} has lost its volume", "Name another claim")
    if ctx.run.nodes.most > 1 and "ReadWriteMany" not in modes:
        yield Finding(
            field,
            f"{ctx.run.nodes.most} nodes write to the claim, which one can mount ({', '.join(modes)})",
            "Take a claim that is ReadWriteMany, or set run.nnodes to 1",
        )


def _check_checkpoints(ctx: ClusterContext) -> Findings:
    """Check that ``run.checkpoints`` is a folder on the user's claim, which outlives the run."""
    folder, mount_path = ctx.run.checkpoints, ctx.target.mount_path
    if folder is None or not folder.startswith("/"):  # no folder: another check refuses a URL
        return
    if ctx.target.makes_claim:
        yield Finding(
            "run.checkpoints",
            "the checkpoints shall outlive the run, and the claim that is made for the run does not",
            "Name a claim of your own in target.claim, or leave run.checkpoints out: retries resume anyway",
        )
    elif not Path(folder).is_relative_to(os.path.normpath(mount_path)):
        # If the job is the only object, it uses a runtime of the cluster, which may mount other volumes.
        has_cluster_runtime = [described["kind"] for described in objects(ctx)] == [TRAINJOB.kind]
        unless = ""
        if has_cluster_runtime:
            unless = f", unless runtime {ctx.target.runtime!r} mounts a volume there"
        yield Finding(
            "run.checkpoints",
            f"{folder} is not on the claim, which is mounted at {mount_path}: it ends with its pod{unless}",
            "Give a folder below that, or a relative one, which starts there",
            fatal=not has_cluster_runtime,
        )


def _check_secrets(ctx: ClusterContext) -> Findings:
    """Check that the Secrets of ``run.env_from`` exist, and that the name of the run's own Secret is free.

    Warn if storage may need secrets of ``run.env``.
    """
    if ctx.output_in_cluster:
        for name in secret_variables(ctx.run.env):
            if name.startswith(_STORAGE_VARIABLES) or name.upper().endswith("_PROXY"):
                yield Finding(
                    "run.env",
                    f"{name} may be needed to write the last report, when the Secret with the values of "
                    "run.env is deleted already",
                    "Put credentials of storage and proxies into a Secret of your own, for run.env_from",
                    fatal=False,  # it may be for another service
                )
    for name in ctx.run.env_from:
        if cluster_of(ctx).get("Secret", name) is None:
            yield Finding(
                "run.env_from",
                f"there is no secret {name!r} in namespace {ctx.target.namespace}",
                f"Create it: kubectl create secret generic {name} --from-literal=NAME=value",
            )
    if secret_variables(ctx.run.env):  # else the run has no Secret of its own
        run_secret.refuse_foreign(ctx, cluster_of(ctx).get("Secret", secret_name(ctx.name)))


def _check_resources(ctx: ClusterContext) -> Findings:
    """Check that cores and memory are set, that a node has as much, and that each process gets a core."""
    resources = ctx.run.resources
    if resources.cpu is None or resources.memory is None:
        yield Finding(
            "run.resources",
            "without cpu and memory the pods are not of the class Guaranteed: others may take their cores",
            "Set run.resources.cpu and run.resources.memory below what a node can allocate",
            fatal=False,
        )
    if resources.cpu is not None and not ctx.run.oversubscribe:
        max_processes = max(1, int(resources.cpu))  # one process may have less than a core
        if ctx.run.processes > max_processes:
            yield Finding(
                "run.nproc_per_node",
                f"{ctx.run.processes} processes on {resources.cpu:g} cores",
                f"Set it to {max_processes} or less, or set run.oversubscribe to true",
            )
    yield from _check_allocatable(ctx)


def _check_memory(ctx: ClusterContext) -> Findings:
    """Compare the estimated memory of a recipe's ranks with the memory of their pod."""
    estimated, memory = memory_estimate.estimate(ctx.run, ctx.base), ctx.run.cpu_request.memory
    if memory and not isinstance(estimated, str):  # a text says why there is no estimate
        yield from memory_estimate.findings(estimated, memory, "run.resources.memory", "its pod")


def _check_allocatable(ctx: ClusterContext) -> Findings:
    """Compare what a pod requests with the most that a node can allocate, if the account may list nodes."""
    # Kubernetes writes a selector as key=value,key=value.
    selector = ",".join(f"{key}={value}" for key, value in ctx.target.node_selector.items())
    try:
        query = {"labelSelector": selector} if selector else {}
        nodes = cluster_of(ctx).call("GET", "/api/v1/nodes", query=query, deadline=_DEADLINE_S)["items"]
    except ClusterError:  # few accounts may list nodes: they belong to the cluster
        return
    requests = {"cpu": str(ctx.run.resources.cpu or 0), "memory": ctx.run.resources.memory or "0"}
    if ctx.run.device == "xla":
        requests[TPU] = str(ctx.run.nproc_per_node)
    for resource, request in requests.items():
        allocatable = [amount(node["status"]["allocatable"].get(resource, "0")) for node in nodes]
        most = max(allocatable, default=None)  # None: no node fits the selector
        if most is not None and amount(request) > most:
            yield Finding(
                "run.nproc_per_node" if resource == TPU else f"run.resources.{resource}",
                f"{request} was asked for, and no node that fits target.node_selector can allocate more than "
                f"{most:f}",
                "Ask for less",
            )


def _check_admission(ctx: ClusterContext) -> Findings:
    """Create a rank's pod as a dry run.

    The cluster checks its Pod Security level, quota, limits, service account and priority class.
    """
    job = objects(ctx)[-1]  # the companions come before the job
    ranks = JOB_LAUNCHERS[ctx.target.launch].ranks(job)
    if ranks is None:  # never true for a job that manycpu describes
        return
    metadata = {"name": f"{ctx.name}-preflight", "labels": labels(ctx.name, verb="launch", role="rank")}
    spec = ranks.pod | {"restartPolicy": "Never"}
    spec["containers"][0]["image"] = ctx.target.image or "preflight"  # a dry run pulls no image
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    try:
        cluster_of(ctx).create(pod, dry_run=True)
    except ClusterError as error:
        matching = [field for words, field in _ADMISSION_FIELDS.items() if words in error.message]
        field = matching[0] if matching else "target"  # the field of the first words that match
        yield Finding(field, f"the cluster refuses a rank's pod: {error.message}", "See the message")


_ADMISSION_FIELDS: Final = {
    "exceeded quota": "run.resources",
    "per Container": "run.resources",
    "per Pod": "run.resources",
    "PriorityClass": "target.priority_class",
    "serviceaccount": "target.service_account",
    "service account": "target.service_account",
    "PodSecurity": "target.namespace",
    "nodeSelector": "target.node_selector",
    "tolerations": "target.tolerations",
    "mountPath": "target.mount_path",
}
"""Words in the message with which the API server refuses a pod -> the field that the user should change."""


def _check_quota(ctx: ClusterContext) -> Findings:
    """Compare the requests of all pods with what each quota has left; ``_check_admission`` tries one pod."""
    resources = ctx.run.resources
    pods = ctx.run.nodes.least  # one on each node; the run begins with the least number
    # The requests of one pod.
    demand = {"cpu": str(resources.cpu or 0), "memory": resources.memory or "0", "pods": "1"}
    for quota in cluster_of(ctx).list("ResourceQuota"):
        used = quota["status"].get("used", {})
        for name, hard in quota["status"].get("hard", {}).items():
            # `cpu`, `requests.cpu` and `limits.cpu` all limit the cores of pods.
            resource = name.removeprefix("requests.").removeprefix("limits.")
            free = amount(hard) - amount(used.get(name, "0"))
            if resource in demand and pods * amount(demand[resource]) > free:
                yield Finding(
                    "run.nnodes" if resource == "pods" else f"run.resources.{resource}",
                    f"{pods} pods with {resource} {demand[resource]} each exceed the quota "
                    f"{quota['metadata']['name']!r}: {name} has {free:f} left",
                    "Ask for less, or wait until others are done",
                )


def check_queue(ctx: ClusterContext) -> Findings:
    """Check that ``target.queue`` exists and admits jobs, and that ``target.queue_priority`` exists.

    Without a queue, only report a ``queue_priority``, which then has no effect.
    """
    if (name := ctx.target.queue) is None:
        if ctx.target.queue_priority is not None:
            fix = "Set target.queue, or leave target.queue_priority out"
            yield Finding("target.queue_priority", "it is of a queue, and target.queue is left out", fix)
        return
    try:
        # /apis/GROUP/VERSION: the part of the path before the namespace.
        group_path = cluster_of(ctx).path(LOCAL_QUEUE.kind).partition("/namespaces/")[0]
    except NotFoundError:
        yield Finding("target.queue", "the cluster has no Kueue", "Install it, or leave target.queue out")
        return
    queue = cluster_of(ctx).get(LOCAL_QUEUE.kind, name)
    if queue is None:
        where = f"in namespace {ctx.target.namespace}"
        fix = f"Name one that `kubectl -n {ctx.target.namespace} get localqueues` lists"
        yield Finding("target.queue", f"there is no LocalQueue {name!r} {where}", fix)
    else:
        for condition in (queue.get("status") or {}).get("conditions") or ():
            if condition["type"] == "Active" and condition["status"] == "False":
                why = f"{condition.get('message', '')} ({condition['reason']})".strip()
                text = f"LocalQueue {name!r} admits nothing at present: {why}"
                fix = "The run waits until it admits jobs again: ask who looks after the queue"
                yield Finding("target.queue", text, fix, fatal=False)
    yield from _check_queue_priority(ctx, group_path)


def _check_queue_priority(ctx: ClusterContext, group_path: str) -> Findings:
    """Check that the queue's priority exists; ``group_path`` is the URL path of Kueue's API group."""
    if (name := ctx.target.queue_priority) is None:
        return
    try:
        cluster_of(ctx).call("GET", f"{group_path}/workloadpriorityclasses/{name}")
    except NotFoundError:
        fix = "Name one that `kubectl get workloadpriorityclasses` lists"
        yield Finding("target.queue_priority", f"there is no WorkloadPriorityClass {name!r}", fix)
    except ForbiddenError:  # these objects are in no namespace: few accounts may read them
        text = f"whether there is a WorkloadPriorityClass {name!r} could not be seen: this account may not"
        fix = "See that its name is right: Kueue lets no job wait with one that is not there"
        yield Finding("target.queue_priority", text, fix, fatal=False)


_CHECKS: tuple[Callable[[ClusterContext], Findings], ...] = (
    _check_operator,
    _check_namespace,
    missing_rights,
    check_queue,
    _check_runtime,
    _check_claim,
    _check_checkpoints,
    _check_secrets,
    _check_resources,
    _check_memory,
    _check_quota,
    _check_admission,
    check_images,
)
_CHECKS_WITHOUT_CLUSTER: tuple[Callable[[ClusterContext], Findings], ...] = (
    _check_manifests,
    _check_checkpoints,
    _check_memory,
)
