"""launch: start the next attempt, or attach to the present one."""

from typing import Any

from manycpu.pipeline.ledger import Attempt
from manycpu.pipeline.spec.errors import CancelledError, Finding
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.targets.attempt import attempt_of
from manycpu.pipeline.targets.context import Built, RunContext, Staged
from manycpu.pipeline.targets.output import claim
from manycpu.pipeline.verbs.cancel import end_if_cancelled, take_cancellation

# Fields that take effect at once, also for an attempt that was started with other values.
_NOT_OF_AN_ATTEMPT = frozenset({"run.output", "run.keep", "run.keep_for", "target.connection"})


def launch(ctx: RunContext, staged: Staged, built: Built) -> tuple[Handle, bool]:
    """Start the next attempt, or attach to the present one if it runs or has succeeded.

    Returns:
        The handle, and whether it is the handle of an earlier attempt (attached) or of a new one.

    Raises:
        CancelledError: A person cancelled the next attempt before its launch.
        LaunchError: The target does not accept the run.
    """
    with ctx.ledger.timed("launch", ctx.waiting_lease) as record:
        if how := take_cancellation(ctx):
            raise CancelledError(how)
        if ctx.ledger.read().export is None:
            claim(ctx)  # renew the claim: like the lease, it must last as long as this attempt
        handle, attached = ctx.driver.launch(ctx, staged, built)
        end_if_cancelled(ctx, handle.attempt)
        record.result = "reused" if attached else "done"
        return handle, attached


def edited(ctx: RunContext, handle: Handle, staged: Staged, built: Built) -> Finding | None:
    """Return a warning that names the fields that were edited after an attempt was started; None: none."""
    recorded = ctx.ledger.read().attempts.get(handle.attempt)
    if recorded is None:  # an older version of manycpu started it
        return None
    before, now = _fields_that_bind(recorded), _fields_that_bind(attempt_of(ctx, staged, built))
    names = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    if not names:
        return None
    return Finding(
        ", ".join(names),
        f"attempt {handle.attempt} was started with something else, and is judged by that",
        "What is given now counts from the next attempt on",
        fatal=False,
    )


def _fields_that_bind(attempt: Attempt) -> dict[str, Any]:
    """Return the fields that an attempt keeps to its end: dotted name -> value.

    They include the digests of staged data, model and code.
    """
    flat: dict[str, Any] = {}
    for part in ("run", "target", "digests"):
        for name, value in getattr(attempt, part).items():
            flat[f"{part}.{name}"] = value
    return {name: value for name, value in flat.items() if name not in _NOT_OF_AN_ATTEMPT}
