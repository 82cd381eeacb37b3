"""Whose run it is: tasks share one because they are told to, and must then mean the same training."""

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import ForeignRunError
from manycpu.pipeline.verbs.context import RunContext

__all__ = ["join"]


def join(ctx: RunContext, entry: Entry, role: str) -> None:
    """Note which task does something for a run; before the first attempt, as what it describes the run.

    A task that was edited since goes on with its run: it is the same task.

    Args:
        ctx: The run, as the task describes it.
        entry: The ledger's entry, which is changed.
        role: What the task does that no second one may do otherwise: ``prepare``, ``train``.

    Raises:
        ForeignRunError: Another task did so, and describes another training.
    """
    if not ctx.task:
        return
    first = entry.tasks.setdefault(role, ctx.task)
    if first != ctx.task:
        _compare(ctx, entry, first)
    if entry.attempt == 0:
        entry.run, entry.target = ctx.run_fields, ctx.target_fields


def _compare(ctx: RunContext, entry: Entry, first: str) -> None:
    known = entry.described()
    mine, theirs = ({"run": ctx.run_fields, "target": ctx.target_fields}, known.model_dump(mode="json"))
    fields = [
        f"{part}.{name}"
        for part in mine
        for name in sorted(mine[part] | theirs[part])
        if mine[part].get(name) != theirs[part].get(name)
    ]
    if fields:
        raise ForeignRunError(
            f"{ctx.task} and {first} are one run, {ctx.name}, and differ in {', '.join(fields)}",
            field="training",
            fix="Give each a `training` of its own, or the same run and target",
        )
