"""The driver of Kubernetes clusters with Kubeflow's operators."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import cluster
from manycpu.pipeline.adapters.storage import is_remote
from manycpu.pipeline.ledger import Entry, configmap
from manycpu.pipeline.ledger.configmap import ConfigMapLedger
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets import Driver
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.kubernetes import cleanup, export, launch, output_report
from manycpu.pipeline.targets.kubernetes.build import build
from manycpu.pipeline.targets.kubernetes.cancel import cancel
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, sharing
from manycpu.pipeline.targets.kubernetes.deletion import named, present
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import Cursor, attempt_state
from manycpu.pipeline.targets.kubernetes.preflight import findings
from manycpu.pipeline.targets.kubernetes.stage import stage
from manycpu.pipeline.targets.kubernetes.wait import JobWatch
from manycpu.pipeline.targets.open_run import reopen_all
from manycpu.pipeline.targets.results import Built, Copied, Staged
from manycpu.pipeline.transfer import Manifest, Progress

__all__ = ["KubernetesDriver"]


class KubernetesDriver(Driver[ClusterContext, JobHandle]):
    """The driver of Kubernetes: a ConfigMap owns what a run creates, and a Kubeflow job is the training."""

    def ledger(self, ctx: ClusterContext) -> ConfigMapLedger:
        """Open the run's ledger: a ConfigMap."""
        return ConfigMapLedger(cluster_of(ctx), ctx.name)

    def where(self, ctx: ClusterContext) -> str:
        """Return the namespace, and the run's name there."""
        return f"{ctx.target.namespace}/{ctx.name}"

    def location(self, ctx: ClusterContext) -> tuple[str, ...]:
        """Return the options by which a command finds the run: the namespace, and the kubeconfig if set."""
        given = ctx.target.connection
        return ("--namespace", ctx.target.namespace, *(("--connection", given) if given else ()))

    def names(self, ctx: ClusterContext) -> list[str]:
        """List the names under which a run with this key has begun."""
        return configmap.names(cluster_of(ctx), ctx.key)

    def runs(self, target: Kubernetes) -> list[RunContext]:
        """Find the runs of the target's namespace, oldest first; they share one connection."""
        opened = cluster.Cluster(partial(cluster.connect, target.connection), target.namespace)
        return reopen_all(configmap.ledgers(opened), access=sharing(opened))

    def reaches_output(self, ctx: ClusterContext) -> bool:
        """Whether pods write the output themselves: true for a URL, so the worker needs no credentials."""
        return is_remote(ctx.destination)

    def save_image(self, ctx: ClusterContext, archive: Path) -> str:
        """Write the training image as an OCI archive; return its name."""
        from manycpu.pipeline.targets.kubernetes.image.image_archive import save

        return save(ctx, archive)

    def findings(self, ctx: ClusterContext) -> Iterable[Finding]:
        """Check the run against the cluster."""
        return findings(ctx)

    def stage(self, ctx: ClusterContext, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
        """Copy each source to the claim through a helper pod."""
        return stage(ctx, sources, progress)

    def build(self, ctx: ClusterContext) -> tuple[Built, bool]:
        """Build the image with the code; return whether the registry had it already."""
        return build(ctx)

    def launch(self, ctx: ClusterContext, staged: Staged, built: Built) -> tuple[JobHandle, bool]:
        """Create the next attempt's job, or attach to the present attempt; return whether it attached."""
        return launch.launch(ctx, staged, built)

    def objects(self, ctx: ClusterContext) -> list[dict[str, Any]]:
        """Describe the objects that a launch would create."""
        return launch.objects(ctx)

    def present_handle(self, ctx: ClusterContext, entry: Entry) -> JobHandle | None:
        """Return the present attempt's handle, from the ledger or from its job; None: there is none."""
        return launch.present_handle(ctx, entry)

    def status(self, ctx: ClusterContext, handle: JobHandle, entry: Entry) -> Status:
        """Derive an attempt's status from its job, its pods and its records in the ledger."""
        return launch.status(ctx, handle, entry)

    def watch(self, ctx: ClusterContext, handle: JobHandle, cursor: Cursor | None) -> JobWatch:
        """Begin to watch an attempt, or resume from a cursor."""
        return JobWatch(ctx, handle, cursor)

    def observed_of(self, ctx: ClusterContext, handle: JobHandle) -> Observed:
        """Read what the ranks of an attempt reported, as its follower recorded it."""
        return attempt_state(ctx.ledger.read(), handle).observed

    def seconds(self, ctx: ClusterContext, handle: JobHandle) -> float:
        """Compute how many seconds an attempt took, from its creation to its end; 0: it has not ended."""
        ended: Any = attempt_state(ctx.ledger.read(), handle).ended
        return max(0.0, ended - handle.created) if ended else 0.0

    def cancel(self, ctx: ClusterContext, by: str, attempt: int | None) -> bool:
        """Record who cancels the present attempt, and delete its job; return whether there was one."""
        return cancel(ctx, by, attempt)

    def export(self, ctx: ClusterContext, handle: JobHandle, progress: Progress) -> Manifest:
        """Copy what the program wrote from the claim to the output."""
        return export.export(ctx, handle, progress)

    def read_returned(self, ctx: ClusterContext, handle: JobHandle, name: str) -> bytes:
        """Read a file that the function of an attempt returned."""
        return export.read_returned(ctx, handle, name)

    def model_of(self, ctx: ClusterContext, handle: JobHandle) -> str:
        """Name the folder that the program of an attempt wrote to."""
        return export.model_of(ctx, handle)

    def may_have_model(self, ctx: ClusterContext, handle: JobHandle) -> bool:  # noqa: ARG002
        """Return true: only pods can read the volume."""
        return True

    def strays(self, ctx: ClusterContext, entry: Entry, handle: JobHandle) -> list[str]:  # noqa: ARG002
        """Return an empty list: files outside of the volume are deleted with their pod."""
        return []

    def read_report(self, ctx: ClusterContext) -> str | None:
        """Read report.json; if the output is a URL, through a pod."""
        return output_report.read_report(ctx)

    def write_report(self, ctx: ClusterContext, text: str) -> None:
        """Write report.json; if the output is a URL, through a pod."""
        output_report.write_report(ctx, text)

    def keep(self, ctx: ClusterContext, seconds: float | None) -> list[str]:
        """Record for how long the run's objects are kept, and return their names."""
        ctx.ledger.keep(seconds)
        return named(ctx, present(ctx, labels(ctx.name)))

    def keep_results(self, ctx: ClusterContext, seconds: float | None) -> list[str]:
        """Keep output and checkpoints, and delete the rest of the run; return the kept paths."""
        return cleanup.keep_results(ctx, seconds)

    def owns(self, ctx: ClusterContext, what: str) -> bool:
        """Whether a path is deleted with the run, because it is on the claim that was made for the run."""
        return ctx.target.makes_claim and what.startswith(f"{ctx.target.mount_path}/")

    def remove(self, ctx: ClusterContext) -> list[str]:
        """Delete what the run owns, and return the names of objects that remain."""
        return cleanup.remove(ctx)

    def remove_expired(
        self, ctx: ClusterContext, now: float, end: Callable[[RunContext], bool]
    ) -> list[Finding]:
        """Delete other runs of the namespace whose lease is over; return warnings."""
        return cleanup.remove_expired(ctx, now, end)
