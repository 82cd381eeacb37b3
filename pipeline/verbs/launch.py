"""launch: start the training, or attach to the one that this run has started already."""

from typing import Any

from manycpu.pipeline.ledger import Attempt, Entry
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.verbs.build import Built
from manycpu.pipeline.verbs.cancel import cancel, heed
from manycpu.pipeline.verbs.context import ClusterContext, MachineContext, RunContext, as_started
from manycpu.pipeline.verbs.place import on_target
from manycpu.pipeline.verbs.stage import Staged

__all__ = [
    "attempt_of",
    "checkpoints_of",
    "edited",
    "goes_on",
    "launch",
    "manifest",
    "present_handle",
    "status",
]

# What becomes of the model, and how a cluster is reached: what is given now counts, whatever the attempt.
_NOT_OF_AN_ATTEMPT = frozenset({"run.output", "run.keep", "run.keep_for", "target.connection"})


def launch(ctx: RunContext, staged: Staged, built: Built) -> tuple[Handle, bool]:
    """Start the next attempt, unless one lives or has succeeded.

    Returns:
        The handle, and whether it is that of an attempt which was there before.

    Raises:
        CancelledError: Somebody said before that nothing more of the run is to be launched.
        LaunchError: The target does not accept the run.
    """
    with ctx.ledger.timed("launch", ctx.waiting_lease) as record:
        heed(ctx)
        handle: Handle
        handle, attached = on_target(ctx, "launch").launch(ctx, staged, built)
        if not attached and (by := ctx.ledger.read().cancelled.get(handle.attempt)):  # said meanwhile
            cancel(ctx, by, handle.attempt)
        record.result = "reused" if attached else "done"
        return handle, attached


def status(ctx: RunContext, handle: Handle, entry: Entry) -> Status:
    """Look at an attempt, by what it was started with; of one that was cancelled, the reason is who did so.

    Raises:
        LaunchError: It was started on another machine.
        ClusterError: The cluster does not answer.
    """
    started = as_started(ctx, entry, handle.attempt)
    seen: Status = on_target(ctx, "launch").status(started, handle, entry)
    by = entry.cancelled.get(handle.attempt)
    if seen.state is RunState.CANCELLED and by is not None:
        return Status(state=RunState.CANCELLED, reason=f"ended by {by}")
    return seen


def present_handle(ctx: RunContext, entry: Entry) -> Handle | None:
    """Find the present attempt, also where whoever started it was killed before it could note the handle."""
    found: Handle | None = on_target(ctx, "launch").present_handle(ctx, entry)
    return found


def manifest(ctx: RunContext) -> dict[str, Any]:
    """Describe what would be run, with nothing staged or started yet."""
    found: dict[str, Any] = on_target(ctx, "launch").manifest(ctx)
    return found


def checkpoints_of(ctx: MachineContext | ClusterContext) -> str:
    """Find the folder of a run's checkpoints on the nodes: its own, also where runs share one."""
    return f"{ctx.run.checkpoints}/{ctx.name}" if ctx.run.checkpoints else f"{ctx.directory}/checkpoints"


def attempt_of(ctx: RunContext, staged: Staged, built: Built) -> Attempt:
    """Describe an attempt that would be started now."""
    return Attempt(
        run=ctx.run_fields,
        target=ctx.target_fields,
        data=staged.data,
        model=staged.model,
        code=built.code,
        image=built.image,
        digests=staged.digests | {"code": built.digest},
    )


def edited(ctx: RunContext, handle: Handle, staged: Staged, built: Built) -> Finding | None:
    """Say what an attempt that is attached to was started with otherwise than given now."""
    known = ctx.ledger.read().attempts.get(handle.attempt)
    if known is None:
        return None
    before, now = _flat(known), _flat(attempt_of(ctx, staged, built))
    names = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    if not names:
        return None
    return Finding(
        ", ".join(names),
        f"attempt {handle.attempt} was started with something else, and is judged by that",
        "What is given now counts from the next attempt on",
        fatal=False,
    )


def _flat(attempt: Attempt) -> dict[str, Any]:
    """Name what an attempt is made of: fields, and digests of what was staged and built."""
    parts = {"run": attempt.run, "target": attempt.target, "digests": attempt.digests}
    flat = {f"{part}.{name}": value for part, fields in parts.items() for name, value in fields.items()}
    return {name: value for name, value in flat.items() if name not in _NOT_OF_AN_ATTEMPT}


def goes_on(seen: Status, entry: Entry) -> bool:
    """Whether the present attempt is to be attached to: it lives, or has succeeded, and not in vain."""
    if seen.state is RunState.SUCCEEDED:
        return not entry.described().fruitless
    return not seen.state.terminal
