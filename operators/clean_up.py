"""Clean up a run, and tell the task's log what is left of it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from manycpu.operators.live import keep_report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from manycpu.pipeline.run_report import Report
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["clean_up"]


def clean_up(ctx: RunContext, log: Any, place: Mapping[str, Any]) -> Report | None:
    """End what still runs, write the report, delete what the run owns; harmless when there is nothing.

    Args:
        ctx: The run.
        log: The task's logger.
        place: The task, as :func:`place_of` names it: its XCom keeps the report, compact, for its page.

    Returns:
        The report; None where the run never began or is cleaned up already.

    Raises:
        LaunchError: A process of the run does not end.
        ExportError: The report cannot be written to the output.
        ClusterError: The cluster does not answer.
    """
    from manycpu.pipeline.verbs.cleanup import cleanup

    report = cleanup(ctx, tell=partial(keep_report, place=place, log=log))
    if report is None:
        log.info("nothing to clean up")
        _keep_again(ctx, log, place)
        return None
    for path in report.left_behind:
        log.error("left behind: %s", path)
    for path in report.kept:
        log.info("kept: %s", path)
    return report


def _keep_again(ctx: RunContext, log: Any, place: Mapping[str, Any]) -> None:
    """Keep the report of a run that an earlier try cleaned up: that try's XComs are gone."""
    from manycpu.pipeline.spec.errors import ManycpuError
    from manycpu.pipeline.verbs.report import read_report

    with suppress(ManycpuError):
        keep_report(read_report(ctx), place, log)
