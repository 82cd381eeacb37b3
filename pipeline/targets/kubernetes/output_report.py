"""Read and write report.json if the output is a URL: a pod does it, with the run's secrets and network.

The final report is written after the rest of the run was deleted. So the pod that writes it has no owner, and
mounts no claim but the user's. The worker deletes this pod; if the worker was killed, a later run does.
"""

from contextlib import AbstractContextManager
from typing import Any, Final

from manycpu.pipeline import run_report, transfer
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.spec.errors import raise_findings
from manycpu.pipeline.spec.output import REPORT
from manycpu.pipeline.targets import output
from manycpu.pipeline.targets.kubernetes import run_secret
from manycpu.pipeline.targets.kubernetes.context import ClusterContext
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import Helper, helper

_VERB: Final = "report"
_ENDED_PHASES: Final = frozenset({"Succeeded", "Failed"})  # phases of a pod


def write_report(ctx: ClusterContext, text: str) -> None:
    """Write report.json to the output.

    If only pods reach the output, a pod writes the report. If the run has ended, the pod also releases the
    run's claim of the output, as the worker may have no access to it.

    Raises:
        OutputTakenError: Another run has claimed the output, or has left a model and its report there.
        BadInputError: The output has files, but no report of a run.
        RemoteError: The output cannot be read or written.
    """
    if not ctx.output_in_cluster:
        output.write_report(ctx, text)
        return
    with _report_pod(ctx) as pod:
        existing = _read_report(ctx, pod)
        output.check_report(ctx, existing["names"], existing["text"])
        _write_report(ctx, pod, text)
        report = run_report.parse(text)
        if report is not None and report.state.terminal:
            release(ctx, pod)
    _remove_secret_if_kept(ctx)


def write_beside(ctx: ClusterContext, name: str, text: str) -> None:
    """Write report.html or run.log to the output.

    Nothing is written if the program wrote a file of that name, or beside the report of another run.
    """
    if not ctx.output_in_cluster:
        output.write_beside(ctx, name, text)
        return
    _ask(ctx, "write_beside", key=ctx.key, name=name, text=text)


def claim(ctx: ClusterContext, pod: Helper) -> None:
    """Claim the output for this run, through a running pod: no second run can then write to it.

    Raises:
        BadInputError: Another run has claimed the output.
        RemoteError: The output cannot be read or written.
    """
    claimant = {"run": ctx.name, "place": f"namespace {ctx.target.namespace}", "seconds": ctx.waiting_lease}
    answer = pod.ask("claim", url=ctx.destination, key=ctx.claim_key, **claimant)
    if answer["other"]:  # another run that has claimed it
        raise_findings([output.claimed_finding(ctx, answer["other"], answer["fix"])])


def release(ctx: ClusterContext, pod: Helper) -> None:
    """Delete the run's claim of the output, through a running pod."""
    pod.ask("release", url=ctx.destination, key=ctx.claim_key)


def begin(ctx: ClusterContext, pod: Helper, text: str) -> None:
    """Write the run's first report.json through a running pod.

    Raises:
        BadInputError: The output has files that the run did not write.
        OutputTakenError: Another run has claimed the output meanwhile.
        RemoteError: The output cannot be read or written.
    """
    existing = _read_report(ctx, pod)
    if finding := output.occupied_finding(ctx, existing["names"], existing["text"]):
        raise_findings([finding])
    _write_report(ctx, pod, text)


def _read_report(ctx: ClusterContext, pod: Helper) -> dict[str, Any]:
    """Read through a running pod: ``text`` of report.json (or None), and ``names`` of two files there."""
    return pod.ask("read", url=ctx.destination, name=REPORT)


def _write_report(ctx: ClusterContext, pod: Helper, text: str) -> None:
    """Write report.json through a running pod.

    Raises:
        OutputTakenError: Another run has claimed the output.
    """
    answer = pod.ask("write_report", url=ctx.destination, key=ctx.claim_key, text=text)
    if answer["other"]:  # another run that has claimed it: nothing was written
        raise output.taken_error(output.claimed_finding(ctx, answer["other"], answer["fix"]))


def read_beside(ctx: ClusterContext, name: str) -> str | None:
    """Read a text file of the output, with a pod if only pods reach the output; None: it does not exist."""
    if not ctx.output_in_cluster:
        return output.read_beside(ctx, name)
    text: str | None = _ask(ctx, "read", name=name)["text"]
    return text


def why_not_exported(ctx: ClusterContext, digest: str, *, sizes: bool = True) -> str | None:
    """Say why an export is not in the output, with a pod if only pods reach the output; None: it is.

    See :func:`manycpu.pipeline.transfer.why_not_exported`.
    """
    if not ctx.output_in_cluster:
        return transfer.why_not_exported(ctx.output, digest, sizes=sizes)
    reason: str | None = _ask(ctx, "compare", digest=digest, sizes=sizes)["reason"]
    return reason


def _ask(ctx: ClusterContext, command: str, **request: Any) -> dict[str, Any]:
    """Run one command for the output in a pod of its own, and return the answer."""
    with _report_pod(ctx) as pod:
        answer: dict[str, Any] = pod.ask(command, url=ctx.destination, **request)
    _remove_secret_if_kept(ctx)
    return answer


def _remove_secret_if_kept(ctx: ClusterContext) -> None:
    """Delete the run's Secret once more if the run is kept: the report pod has created it again."""
    if ctx.ledger.exists() and ctx.ledger.lease().kept:
        run_secret.remove(ctx)


def remove_forgotten(cluster: Cluster) -> None:
    """Delete report pods that have ended and have no owner: the workers that created them were killed.

    Other report pods stay. One that still runs may be in use; one with an owner is deleted with its ledger.
    """
    for pod in cluster.list("Pod", {"manycpu/verb": _VERB}):
        if not pod["metadata"].get("ownerReferences") and pod["status"].get("phase") in _ENDED_PHASES:
            cluster.delete("Pod", pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace=0)


def _report_pod(ctx: ClusterContext) -> AbstractContextManager[Helper]:
    """Start a helper pod that reaches the output; it mounts the user's claim, if the target names one."""
    return helper(ctx, _VERB, ctx.target.claim, progress=lambda *_: None)
