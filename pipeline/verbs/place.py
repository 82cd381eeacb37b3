"""Where a verb is done: each target's modules have the verbs' names."""

import importlib
from typing import Any

from manycpu.pipeline.verbs.context import ClusterContext, RunContext

__all__ = ["on_target"]


def on_target(ctx: RunContext, verb: str) -> Any:
    """Find the module that does a verb on the run's target; what it needs is imported only then."""
    place = "on_kubernetes" if isinstance(ctx, ClusterContext) else "on_machines"
    return importlib.import_module(f"manycpu.pipeline.verbs.{place}.{verb}")
