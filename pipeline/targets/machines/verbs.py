"""What machines do for each verb: the functions of :class:`manycpu.pipeline.targets.TargetVerbs`."""

from manycpu.pipeline.targets.machines.build import build
from manycpu.pipeline.targets.machines.cancel import cancel
from manycpu.pipeline.targets.machines.cleanup import keep, keep_results, owns, remove, remove_expired
from manycpu.pipeline.targets.machines.export import export, may_have_model, model_of, read_returned, strays
from manycpu.pipeline.targets.machines.launch import launch, objects, present_handle, status
from manycpu.pipeline.targets.machines.preflight import findings
from manycpu.pipeline.targets.machines.stage import stage
from manycpu.pipeline.targets.machines.wait import observed_of, seconds, watch
from manycpu.pipeline.targets.output import read_report, write_report

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
