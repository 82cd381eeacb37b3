"""Who hears a training on Airflow's side, in the worker and in the triggerer alike: the task's log."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manycpu.pipeline.listeners import RankListener

__all__ = ["listeners"]


def listeners(log: Any) -> tuple[RankListener, ...]:
    """Make those who hear all that the ranks of an attempt write.

    Args:
        log: The logger of the operator, or of the trigger that goes on for it.
    """
    from manycpu.pipeline.listeners import ReadableLog

    return (ReadableLog(partial(log.info, "%s")),)
