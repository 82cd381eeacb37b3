"""Tell a run's objects from those of others, and wait for objects to be deleted."""

from collections.abc import Callable, Iterable, Mapping

from manycpu.pipeline.adapters.cluster import poll
from manycpu.pipeline.spec.errors import ForbiddenError, NotFoundError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, resources
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.naming import label
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of


def kinds() -> list[str]:
    """List the kinds of objects that have a run's labels: those that manycpu creates, and the jobs' pods.

    Kinds that only operators create, such as services, are missing: Kubernetes deletes them with the job.
    """
    return [*resources(), "Pod", "PersistentVolumeClaim", "ConfigMap"]


def is_companion(item: KubeObject) -> bool:
    """Whether an object is a companion of a job, such as a runtime: it stays until the run is deleted."""
    return item["kind"] in resources() and item["kind"] not in {kind.kind for kind in JOB_KINDS.values()}


def is_owned(item: KubeObject, run: str, uid: str | None) -> bool:
    """Whether the ledger of the run named ``run`` owns an object directly.

    ``uid``: the ledger's uid; None: any ledger of this name counts, also an earlier one.
    """
    return any(
        owner["kind"] == "ConfigMap" and owner["name"] == run and uid in (None, owner["uid"])
        for owner in item["metadata"].get("ownerReferences") or ()
    )


def of_run(run: str, uid: str | None, items: Iterable[KubeObject]) -> list[KubeObject]:
    """Return the run's objects among ``items``: its ledger, what that owns, and the pods of its jobs.

    Anybody can create objects with the run's labels, so that labels are no proof.

    Args:
        run: The run's name.
        uid: The ledger's uid; None: any ledger of this name counts, as the run's ledger is gone.
        items: All objects with the run's labels.
    """
    found = list(items)
    jobs = [item for item in found if item["kind"] in {kind.kind for kind in JOB_KINDS.values()}]
    foreign = [job for job in jobs if not is_owned(job, run, uid)]
    foreign_uids = {job["metadata"]["uid"] for job in foreign}
    own_names = {job["metadata"]["name"] for job in jobs if job not in foreign}
    foreign_names = {job["metadata"]["name"] for job in foreign} - own_names

    def is_pod_of_job(item: KubeObject) -> bool:
        """Whether an object is a pod of a job of the run; if the job is gone, Kubernetes deletes the pod.

        An operator may create pods through objects that manycpu may not read, such as a JobSet. Their names
        begin with the job's name.
        """
        job = f"{run}-{label(item, 'attempt')}"  # the name is that of Placement.job
        owners = item["metadata"].get("ownerReferences") or ()
        if job in foreign_names or foreign_uids.intersection(owner["uid"] for owner in owners):
            return False
        return any(f"{owner['name']}-".startswith(f"{job}-") for owner in owners)

    def is_of_run(item: KubeObject) -> bool:
        """Whether an object is the run's."""
        if item["kind"] == "ConfigMap" and item["metadata"]["name"] == run:
            return uid in (None, item["metadata"]["uid"])
        return is_owned(item, run, uid) or (item["kind"] == "Pod" and is_pod_of_job(item))

    return [item for item in found if is_of_run(item)]


def wait_until_gone(
    ctx: ClusterContext,
    selector: Mapping[str, str],
    timeout: float,
    choose: Callable[[list[KubeObject]], Iterable[KubeObject]] = lambda items: items,
) -> list[str]:
    """Wait until no object with these labels exists, of those that ``choose`` returns.

    Returns the names of the objects that still exist after ``timeout`` seconds; empty: all are gone.
    """

    def undeleted() -> list[str]:
        return named(ctx, choose(present(ctx, selector)))

    return poll(undeleted, done=lambda names: not names, timeout_s=timeout)


def present(ctx: ClusterContext, selector: Mapping[str, str]) -> list[KubeObject]:
    """List the objects with these labels, for all launch kinds, as earlier attempts may have had another one.

    Kinds that only other launch kinds use are skipped if the cluster lacks them or the account may not list
    them.

    Raises:
        ForbiddenError: The account may not list a kind that the run's own launch kind needs.
        NotFoundError: The cluster does not serve such a kind.
    """
    chosen = JOB_KINDS[ctx.target.launch]
    items: list[KubeObject] = []
    for kind in kinds():
        try:
            items += cluster_of(ctx).list(kind, selector)
        except (ForbiddenError, NotFoundError):
            is_needed = kind not in resources() or resources()[kind] in (chosen.resource, *chosen.companions)
            if is_needed:
                raise
    return items


def named(ctx: ClusterContext, items: Iterable[KubeObject]) -> list[str]:
    """Return the names of objects as a report lists them: ``Kind namespace/name``."""
    return [f"{item['kind']} {ctx.target.namespace}/{item['metadata']['name']}" for item in items]
