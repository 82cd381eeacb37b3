"""Find folders of a run on the worker's own disk, which the next task may not see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from manycpu.pipeline.spec.errors import Finding
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["findings"]

_POD_PER_TASK = "KubernetesExecutor"  # the pod's disk is deleted with it
_MANY_MACHINES = ("CeleryExecutor", "EdgeExecutor")


def findings(ctx: RunContext, executor: str | None) -> Iterator[Finding]:
    """Report folders of the run that are on this worker's root disk, and so on no volume.

    Args:
        ctx: The run.
        executor: The task's executor; None: Airflow's first one.
    """
    from airflow.sdk.configuration import conf

    from manycpu.pipeline.spec.errors import Finding

    name = executor or str(conf.get("core", "executor", fallback="")).split(",", maxsplit=1)[0]
    if not any(kind in name for kind in (_POD_PER_TASK, *_MANY_MACHINES)):
        return
    gone = "is deleted with this task's pod" if _POD_PER_TASK in name else "the next worker may not see"
    for field, folder in _folders(ctx).items():
        if _device(folder) == _device(Path("/")):
            yield Finding(
                field,
                f"{folder} is on the disk of this worker, which {gone} ({name})",
                "Give a folder on a volume that every worker mounts, or, for run.output, a URL",
                fatal=_POD_PER_TASK in name,
            )


def _folders(ctx: RunContext) -> dict[str, Path]:
    from manycpu.pipeline.adapters.storage import is_remote

    home = ctx.driver.home(ctx)
    folders = {"target.directory": home} if home else {}
    # With run.output null the report reaches the next task by itself.
    if ctx.run.output is not None and not is_remote(ctx.run.output) and ctx.output.local:
        folders["run.output"] = ctx.output.local
    return folders


def _device(folder: Path) -> int:
    return next(path for path in (folder, *folder.parents) if path.exists()).stat().st_dev
