"""Who hears a training on Airflow's side, in worker and triggerer alike: the task's log, and trackers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manycpu.pipeline.listeners import RankListener
    from manycpu.pipeline.spec.handle import Handle
    from manycpu.pipeline.spec.observed import Progress
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["listeners"]


def listeners(
    log: Any, ctx: RunContext, handle: Handle, progress: Progress | None = None
) -> tuple[RankListener, ...]:
    """Make those who hear all that the ranks of an attempt write.

    Args:
        log: The logger of the operator, or of the trigger that goes on for it.
        ctx: The run, as the attempt was started.
        handle: The attempt.
        progress: How far the training is, where another has heard its beginning.
    """
    from manycpu.pipeline.listeners import ReadableLog
    from manycpu.pipeline.tracking.live import listeners as trackers

    say, warn = partial(log.info, "%s"), partial(log.warning, "%s")
    return ReadableLog(say), *trackers(ctx, handle, warn, progress, say)
