"""What Kubernetes does for each verb: the functions of :class:`manycpu.pipeline.targets.TargetVerbs`."""

from manycpu.pipeline.targets.kubernetes.build import build
from manycpu.pipeline.targets.kubernetes.cancel import cancel
from manycpu.pipeline.targets.kubernetes.cleanup import keep, keep_results, owns, remove, remove_expired
from manycpu.pipeline.targets.kubernetes.export import export, may_have_model, model_of, read_returned, strays
from manycpu.pipeline.targets.kubernetes.launch import launch, objects, present_handle, status
from manycpu.pipeline.targets.kubernetes.output_report import read_report, write_report
from manycpu.pipeline.targets.kubernetes.preflight import findings
from manycpu.pipeline.targets.kubernetes.stage import stage
from manycpu.pipeline.targets.kubernetes.wait import observed_of, seconds, watch

__all__ = [
    "build",
    "cancel",
    "export",
    "findings",
    "keep",
    "keep_results",
    "launch",
    "may_have_model",
    "model_of",
    "objects",
    "observed_of",
    "owns",
    "present_handle",
    "read_report",
    "read_returned",
    "remove",
    "remove_expired",
    "seconds",
    "stage",
    "status",
    "strays",
    "watch",
    "write_report",
]
