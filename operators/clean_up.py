"""Clean up a run, and tell the task's log what is left of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manycpu.pipeline.run_report import Report
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["clean_up"]


def clean_up(ctx: RunContext, log: Any) -> Report | None:
    """End what still runs, write the report, delete what the run owns; harmless when there is nothing.

    Returns:
        The report; None where the run never began or is cleaned up already.

    Raises:
        LaunchError: A process of the run does not end.
        ExportError: The report cannot be written to the output.
        ClusterError: The cluster does not answer.
    """
    from manycpu.pipeline.verbs.cleanup import cleanup

    report = cleanup(ctx)
    if report is None:
        log.info("nothing to clean up")
        return None
    for path in report.left_behind:
        log.error("left behind: %s", path)
    for path in report.kept:
        log.info("kept: %s", path)
    return report
