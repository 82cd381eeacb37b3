"""report.json behind a URL: written and read by a pod, which has the run's secrets and a way there.

The last word is written when all else of the run is gone. Nothing owns that pod, and only a claim that was
there before the run is mounted in it; it is deleted at once, and where its worker was killed, by a later run.
"""

from typing import Any, Final

from manycpu.pipeline import report as reports
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.pod.channel import Message
from manycpu.pipeline.verbs.context import ClusterContext
from manycpu.pipeline.verbs.on_kubernetes.helper import Helper, helper

__all__ = ["look", "read", "remove_forgotten", "write"]

_VERB: Final = "report"
_ENDED: Final = frozenset({"Succeeded", "Failed"})


def write(ctx: ClusterContext, text: str) -> None:
    """Write report.json."""
    _ask(ctx, "write", url=ctx.run.output, name=reports.REPORT, text=text)


def read(ctx: ClusterContext) -> str | None:
    """Read report.json; None where there is none."""
    text: str | None = _ask(ctx, "read", url=ctx.run.output, name=reports.REPORT)["text"]
    return text


def look(ctx: ClusterContext, pod: Helper) -> tuple[list[str], str | None]:
    """Name files that are in the output, and read its report.json, by a pod that is there."""
    said = pod.ask("read", url=ctx.run.output, name=reports.REPORT)
    return said["names"], said["text"]


def remove_forgotten(cluster: Cluster) -> None:
    """Delete the pods that killed workers left and nothing owns, once they have ended by themselves."""
    for pod in cluster.list("Pod", {"manycpu/verb": _VERB}):
        if not pod["metadata"].get("ownerReferences") and pod["status"].get("phase") in _ENDED:
            cluster.delete("Pod", pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace=0)


def _ask(ctx: ClusterContext, command: str, **request: Any) -> Message:
    with helper(ctx, _VERB, ctx.target.claim, lambda *_: None) as pod:
        return pod.ask(command, **request)
