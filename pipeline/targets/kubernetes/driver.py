"""The driver of Kubernetes clusters."""

from functools import partial

from manycpu.pipeline.adapters import cluster
from manycpu.pipeline.adapters.storage import is_remote
from manycpu.pipeline.ledger import Entry, configmap
from manycpu.pipeline.ledger.configmap import ConfigMapLedger
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets import Driver
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.kubernetes import (
    build,
    cleanup,
    export,
    launch,
    output_report,
    preflight,
    stage,
)
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, sharing
from manycpu.pipeline.targets.kubernetes.deletion import named, of_run, present
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import attempt_state
from manycpu.pipeline.targets.kubernetes.wait import JobWatch, lines_so_far
from manycpu.pipeline.targets.open_run import reopen_all


class KubernetesDriver(Driver[ClusterContext, JobHandle]):
    """The driver of Kubernetes: a ConfigMap owns what a run creates, and a Kubeflow job is the training."""

    findings = staticmethod(preflight.findings)
    watch = staticmethod(JobWatch)
    lines_so_far = staticmethod(lines_so_far)
    cancel = staticmethod(cleanup.cancel)
    read_beside = staticmethod(output_report.read_beside)
    why_not_exported = staticmethod(output_report.why_not_exported)
    write_report = staticmethod(output_report.write_report)
    write_beside = staticmethod(output_report.write_beside)
    keep_results = staticmethod(cleanup.keep_results)
    remove = staticmethod(cleanup.remove)
    remove_expired = staticmethod(cleanup.remove_expired)
    objects = staticmethod(launch.objects)
    present_handle = staticmethod(launch.present_handle)
    status = staticmethod(launch.status)
    read_log = staticmethod(export.read_log)
    read_returned = staticmethod(export.read_returned)
    model_of = staticmethod(export.model_of)
    save_image = staticmethod(build.save_image)
    # These come last: each hides the module of its name.
    stage = staticmethod(stage.stage)
    build = staticmethod(build.build)
    launch = staticmethod(launch.launch)
    export = staticmethod(export.export)

    def ledger(self, ctx: ClusterContext) -> ConfigMapLedger:
        return ConfigMapLedger(cluster_of(ctx), ctx.name)

    def where(self, ctx: ClusterContext) -> str:
        return f"{ctx.target.namespace}/{ctx.name}"

    def location(self, ctx: ClusterContext) -> tuple[str, ...]:
        connection = ctx.target.connection
        return ("--namespace", ctx.target.namespace, *(("--connection", connection) if connection else ()))

    def names(self, ctx: ClusterContext) -> list[str]:
        return configmap.names(cluster_of(ctx), ctx.key)

    def runs(self, target: Kubernetes) -> list[RunContext]:
        """Find the runs of the target's namespace, oldest first; all share one connection to the cluster."""
        opened = cluster.Cluster(partial(cluster.connect, target.connection), target.namespace)
        return reopen_all(configmap.ledgers(opened), access=sharing(opened))

    def reaches_output(self, ctx: ClusterContext) -> bool:
        return is_remote(ctx.destination)  # pods write to a URL, and the worker needs no credentials

    def observed_of(self, ctx: ClusterContext, handle: JobHandle) -> Observed:
        return attempt_state(ctx.ledger.read(), handle).observed

    def seconds(self, ctx: ClusterContext, handle: JobHandle) -> float:
        ended = attempt_state(ctx.ledger.read(), handle).ended
        return max(0.0, ended - handle.created) if ended else 0.0

    def may_have_model(self, ctx: ClusterContext, handle: JobHandle) -> bool:  # noqa: ARG002
        return True  # unknown: only pods can read the volume

    def strays(self, ctx: ClusterContext, entry: Entry, handle: JobHandle) -> list[str]:  # noqa: ARG002
        return []  # files outside of the volume are deleted with their pod

    def keep(self, ctx: ClusterContext, seconds: float | None) -> list[str]:
        ctx.ledger.keep(seconds)
        return named(ctx, of_run(ctx.name, ctx.ledger.uid(), present(ctx, labels(ctx.name))))

    def owns(self, ctx: ClusterContext, what: str) -> bool:
        return ctx.target.makes_claim and what.startswith(f"{ctx.target.mount_path}/")
