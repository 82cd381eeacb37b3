"""Check a run against the cluster it is meant for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from manycpu.pipeline.adapters.cluster import amount
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.launchers.pod_spec import TPU
from manycpu.pipeline.launchers.ranks import rank_template
from manycpu.pipeline.spec.errors import BadInputError, ClusterError, Finding, ForbiddenError, NotFoundError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, MPIJOB, TRAINJOB, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.kueue import LOCAL_QUEUE, VISIBILITY
from manycpu.pipeline.spec.targets import OWN_RUNTIME, Kubernetes
from manycpu.pipeline.targets.context import ClusterContext
from manycpu.pipeline.targets.kubernetes.image.checks import check_images
from manycpu.pipeline.targets.kubernetes.launch import objects

__all__ = ["RIGHTS", "Right", "findings", "granted", "missing_rights", "rights", "rights_to"]

Findings = Iterator[Finding]
Right = tuple[str, str, str]
"""A verb, an API group, and a resource with its subresource."""
RIGHTS: Final = Path(__file__).with_name("rights.yaml")
_BATCH: Final = "batch"
# patch: to suspend one that holds nodes and lacks others
_JOB_VERBS: Final = ("create", "delete", "get", "list", "patch", "watch")
_COMPANION_VERBS: Final = ("create", "delete", "get", "list")


def findings(ctx: ClusterContext) -> Findings:
    """Check the cluster; where it cannot be reached, nothing else."""
    try:
        ctx.cluster.call("GET", "/version", deadline=15)
    except ClusterError as error:
        yield Finding("target.connection", error.message, error.fix or "See target.connection")
        return
    found = (finding for check in _CHECKS for finding in _found(check, ctx))
    yield from dict.fromkeys(found)  # what several checks meet is told once


def _found(check: Callable[[ClusterContext], Findings], ctx: ClusterContext) -> Findings:
    try:
        yield from check(ctx)
    except (BadInputError, ClusterError) as error:
        yield Finding(error.field or "target.namespace", error.message, error.fix or "See the cluster")


def rights(target: Kubernetes) -> list[Right]:
    """List what the account must be allowed to do in the namespace of runs with such a target."""
    of_jobs = {right for kind in JOB_KINDS.values() for right in rights_to(kind)}
    of_queues = {LOCAL_QUEUE.group, VISIBILITY.group, *([_BATCH] if target.launch == MPIJOB.launch else [])}
    groups = {"", *(of_queues if target.queue else ())}
    others = [right for right in granted() if right not in of_jobs and right[1] in groups]
    return [*rights_to(JOB_KINDS[target.launch]), *others]


def rights_to(kind: JobKind) -> list[Right]:
    """List what the account must be allowed to do with jobs of a kind, and with their companions."""
    verbs = [(kind.resource, _JOB_VERBS), *((companion, _COMPANION_VERBS) for companion in kind.companions)]
    return [(verb, resource.group, resource.plural) for resource, each in verbs for verb in each]


def granted() -> list[Right]:
    """Read what the documented Role grants."""
    role = yaml.safe_load(RIGHTS.read_text())
    return [
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def _operator(ctx: ClusterContext) -> Findings:
    kind = JOB_KINDS[ctx.target.launch]
    try:
        served = ctx.cluster.call("GET", kind.resource.path)["resources"]
    except NotFoundError:
        served = []
    if kind.resource.plural not in [resource["name"] for resource in served]:
        yield Finding(
            "target.launch",
            f"the cluster does not serve {kind.kind} of {kind.resource.api_version}",
            f"Install Kubeflow's {kind.operator}, or choose another target.launch",
        )


def _runtime(ctx: ClusterContext) -> Findings:
    """Create a TrainJob as a dry run, where it refers to what is there: Trainer speaks up."""
    *own, job = objects(ctx)
    if own or job["kind"] != TRAINJOB.kind:
        return
    job["metadata"]["name"] = f"{ctx.name}-preflight"
    if refusal := _refusal(ctx, job):
        yield Finding(
            "target.runtime",
            f"Trainer refuses a TrainJob with runtime {ctx.target.runtime!r}: {refusal}",
            f"Name a ClusterTrainingRuntime that the cluster has, or set it to {OWN_RUNTIME!r}",
        )


def _queue(ctx: ClusterContext) -> Findings:
    """Look for the queue, and for its priority where this account may see those."""
    if (name := ctx.target.queue) is None:
        if ctx.target.queue_priority:
            text = "it counts in a queue of Kueue's, and there is no target.queue"
            yield Finding("target.queue_priority", text, "Name the queue in target.queue, or leave it out")
        return
    try:
        path = ctx.cluster.path(LOCAL_QUEUE.kind)
    except NotFoundError:
        yield Finding("target.queue", "the cluster has no Kueue", "Install it, or leave target.queue out")
        return
    queue = ctx.cluster.get(LOCAL_QUEUE.kind, name)
    if queue is None:
        where = f"in namespace {ctx.target.namespace}"
        fix = f"Name one that `kubectl -n {ctx.target.namespace} get localqueues` lists"
        yield Finding("target.queue", f"there is no LocalQueue {name!r} {where}", fix)
    elif inactive := _inactive(queue):
        text = f"LocalQueue {name!r} admits nothing at present: {inactive}"
        fix = "Ask who looks after the queue: the job waits until it admits again"
        yield Finding("target.queue", text, fix, fatal=False)
    yield from _queue_priority(ctx, path.partition("/namespaces/")[0])


def _inactive(queue: KubeObject) -> str:
    conditions = (queue.get("status") or {}).get("conditions") or ()
    inactive = (one for one in conditions if one["type"] == "Active" and one["status"] == "False")
    return next((f"{one['reason']}: {one.get('message', '')}".rstrip(": ") for one in inactive), "")


def _queue_priority(ctx: ClusterContext, group: str) -> Findings:
    if (name := ctx.target.queue_priority) is None:
        return
    try:
        ctx.cluster.call("GET", f"{group}/workloadpriorityclasses/{name}")
    except NotFoundError:
        fix = "Name one that `kubectl get workloadpriorityclasses` lists"
        yield Finding("target.queue_priority", f"there is no WorkloadPriorityClass {name!r}", fix)
    except ForbiddenError:  # they are the cluster's, which few may see
        text = f"whether there is a WorkloadPriorityClass {name!r} could not be seen: this account may not"
        fix = "Kueue takes no job of one that is not there: see that its name is right"
        yield Finding("target.queue_priority", text, fix, fatal=False)


def missing_rights(ctx: ClusterContext) -> Findings:
    """Ask for each right that a run needs; those to one resource are told together."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for verb, group, resource in rights(ctx.target):
        plural, _, subresource = resource.partition("/")
        if not ctx.cluster.allowed(verb, plural, group=group, subresource=subresource):
            lacking.setdefault((group, resource), []).append(verb)
    for (_, resource), verbs in lacking.items():
        yield Finding(
            "target.connection",
            f"this account may not {', '.join(verbs)} {resource} in namespace {ctx.target.namespace}",
            f"Give it a Role there, with what {RIGHTS} lists",
        )


def _namespace(ctx: ClusterContext) -> Findings:
    """Create the ledger as a dry run: that fails where the namespace is missing, or is being deleted."""
    probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{ctx.name}-preflight"}}
    try:
        ctx.cluster.create(probe, dry_run=True)
    except ClusterError as error:
        if not _lacks_right(error):
            yield Finding("target.namespace", error.message, "Create the namespace, or name another")


def _refusal(ctx: ClusterContext, wanted: KubeObject) -> str:
    """Create an object as a dry run; what is said against it, if other checks do not tell that already."""
    try:
        ctx.cluster.create(wanted, dry_run=True)
    except ClusterError as error:
        lacks_namespace = isinstance(error, NotFoundError) and "namespaces" in error.message
        return "" if lacks_namespace or _lacks_right(error) else error.message
    return ""


def _lacks_right(error: ClusterError) -> bool:
    """Whether it is the account that may not, rather than the object that must not be; both are forbidden."""
    return isinstance(error, ForbiddenError) and "cannot create resource" in error.message


def _claim(ctx: ClusterContext) -> Findings:
    modes, field = [ctx.target.claim_access], "target.claim_access"
    if not ctx.target.makes_claim:
        claim = ctx.cluster.get("PersistentVolumeClaim", ctx.claim)
        field = "target.claim"
        if claim is None:
            yield Finding(
                field,
                f"there is no claim {ctx.claim!r} in namespace {ctx.target.namespace}",
                "Create it, name another, or leave it out to have one made for the run",
            )
            return
        modes = claim["spec"]["accessModes"]
        if (claim.get("status") or {}).get("phase") == "Lost":
            yield Finding(field, f"claim {ctx.claim!r} has lost its volume", "Name another claim")
    if ctx.run.nodes[1] > 1 and "ReadWriteMany" not in modes:
        yield Finding(
            field,
            f"{ctx.run.nodes[1]} nodes write to the claim, and it can be mounted by one ({', '.join(modes)})",
            "Take a claim that is ReadWriteMany, or set run.nnodes to 1",
        )


def _secrets(ctx: ClusterContext) -> Findings:
    for name in ctx.run.env_from:
        if ctx.cluster.get("Secret", name) is None:
            yield Finding(
                "run.env_from",
                f"there is no secret {name!r} in namespace {ctx.target.namespace}",
                f"Create it: kubectl create secret generic {name} --from-literal=NAME=value",
            )


def _resources(ctx: ClusterContext) -> Findings:
    resources = ctx.run.resources
    if resources.cpu is None or resources.memory is None:
        yield Finding(
            "run.resources",
            "without cpu and memory the pods are not of the class Guaranteed: others may take their cores",
            "Set run.resources.cpu and run.resources.memory below what a node can allocate",
            fatal=False,
        )
    if resources.cpu is not None and ctx.run.processes > max(1, resources.cpu) and not ctx.run.oversubscribe:
        yield Finding(
            "run.nproc_per_node",
            f"{ctx.run.processes} processes on {resources.cpu:g} cores",
            f"Set it to {max(1, int(resources.cpu))} or less, or set run.oversubscribe to true",
        )
    yield from _allocatable(ctx)


def _allocatable(ctx: ClusterContext) -> Findings:
    """Compare with what nodes can allocate, where this account may see nodes."""
    nodes = _nodes(ctx)
    requests = {"cpu": str(ctx.run.resources.cpu or 0), "memory": ctx.run.resources.memory or "0"}
    requests |= {TPU: str(ctx.run.nproc_per_node)} if ctx.run.device == "xla" else {}
    for resource, request in requests.items():
        most = max((amount(node["status"]["allocatable"].get(resource, "0")) for node in nodes), default=None)
        if most is not None and amount(request) > most:
            yield Finding(
                "run.nproc_per_node" if resource == TPU else f"run.resources.{resource}",
                f"{request} was asked for, and no node that fits target.node_selector can allocate more than "
                f"{most:f}",
                "Ask for less",
            )


def _nodes(ctx: ClusterContext) -> list[dict[str, Any]]:
    selector = ",".join(f"{key}={value}" for key, value in ctx.target.node_selector.items())
    try:
        query = {"labelSelector": selector} if selector else {}
        nodes = ctx.cluster.call("GET", "/api/v1/nodes", query=query, deadline=15)
    except ClusterError:
        return []
    return list(nodes["items"])


def _admission(ctx: ClusterContext) -> Findings:
    """Create a rank's pod, as a dry run: Pod Security, quota, limits, account and priority class speak up."""
    written = objects(ctx)
    template, needed = rank_template(written), JOB_LAUNCHERS[ctx.target.launch].ranks(written[-1])
    template["spec"] = template["spec"] | (needed.pod if needed else {})
    template["metadata"]["name"] = f"{ctx.name}-preflight"
    template["spec"]["restartPolicy"] = "Never"
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["spec"]["containers"][0]["image"] = ctx.target.image or "preflight"
    if refusal := _refusal(ctx, pod):
        field = next((field for word, field in _ADMISSION.items() if word in refusal), "target")
        yield Finding(field, f"the cluster refuses a rank's pod: {refusal}", "See the message")


_ADMISSION: Final = {
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


def _quota(ctx: ClusterContext) -> Findings:
    """Compare the demand of all pods with what the namespace's quotas have left; the dry run sees one pod."""
    resources, pods = ctx.run.resources, ctx.run.nodes[0]
    demand = {"cpu": str(resources.cpu or 0), "memory": resources.memory or "0", "pods": "1"}
    for quota in ctx.cluster.list("ResourceQuota"):
        used = quota["status"].get("used", {})
        for name, hard in quota["status"].get("hard", {}).items():
            resource = name.removeprefix("requests.").removeprefix("limits.")
            free = amount(hard) - amount(used.get(name, "0"))
            if resource in demand and pods * amount(demand[resource]) > free:
                yield Finding(
                    "run.nnodes" if resource == "pods" else f"run.resources.{resource}",
                    f"{pods} pods with {resource} {demand[resource]} each exceed the quota "
                    f"{quota['metadata']['name']!r}: {name} has {free:f} left",
                    "Ask for less, or wait until others are done",
                )


_CHECKS: tuple[Callable[[ClusterContext], Findings], ...] = (
    _operator,
    _namespace,
    missing_rights,
    _queue,
    _runtime,
    _claim,
    _secrets,
    _resources,
    _quota,
    _admission,
    check_images,
)
