"""launch: start the next attempt, or attach to the present one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manycpu.pipeline.ledger import Attempt, Entry, VerbRecord
from manycpu.pipeline.spec.errors import CancelledError, Finding
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.attempt import attempt_status, join, should_attach
from manycpu.pipeline.targets.context import Built, RunContext, Staged
from manycpu.pipeline.targets.open_run import FIELDS_AT_ONCE
from manycpu.pipeline.targets.output import claim
from manycpu.pipeline.verbs.cancel import end_if_cancelled, take_cancellation

_DIGEST_FIELDS = {"digests.code": "run.program", "digests.data": "run.data", "digests.model": "run.model"}
"""Name of a digest of an attempt -> the field that names the files of this digest."""


def launch(ctx: RunContext, staged: Staged, built: Built) -> tuple[Handle, bool]:
    """Start the next attempt, or attach to the present one if it runs or has succeeded.

    Returns:
        The handle, and whether it is the handle of an earlier attempt (attached) or of a new one.

    Raises:
        CancelledError: A person cancelled the next attempt before its launch.
        LaunchError: The target does not accept the run.
    """
    with _launching(ctx) as record:
        handle, attached = ctx.driver.launch(ctx, staged, built)
        end_if_cancelled(ctx, handle.attempt)
        record.result = "reused" if attached else "done"
        return handle, attached


def attach(ctx: RunContext) -> Handle | None:
    """Attach to the present attempt if it runs or has succeeded, and return its handle.

    None: the caller must stage, build, and call ``launch``. The sources of data, model and code are not
    needed here: an attempt that runs has copies of them.

    Raises:
        CancelledError: A person cancelled the next attempt before its launch.
        ForeignRunError: Another task trains this run, and describes another training.
    """
    if not ctx.ledger.exists():
        return None
    with ctx.ledger.update() as entry:
        join(ctx, entry, "train")  # records which task trains
    handle = attachable(ctx, entry)
    if handle is None:
        return None
    with _launching(ctx) as record:
        end_if_cancelled(ctx, handle.attempt)
        record.result = "reused"
        return handle


def attachable(ctx: RunContext, entry: Entry) -> Handle | None:
    """Return the handle of the present attempt if it runs or has succeeded; else None.

    None also if the attempt's launch was killed, or if its state is unknown: only ``launch`` handles these.
    """
    handle: Handle | None = ctx.driver.present_handle(ctx, entry)
    if handle is None or handle != entry.handle:  # the launch was killed: the next one records what it finds
        return None
    status = attempt_status(ctx, handle, entry)
    if status.state is RunState.UNKNOWN:  # `launch` refuses it, and says why
        return None
    return handle if should_attach(status, entry) else None


@contextmanager
def _launching(ctx: RunContext) -> Iterator[VerbRecord]:
    """Record the ``with`` block as the verb launch, and renew the output's claim before the block.

    The claim of a run that is exported already is not renewed.

    Raises:
        CancelledError: A person cancelled the next attempt before its launch.
    """
    with ctx.ledger.timed("launch", ctx.waiting_lease) as record:
        if how := take_cancellation(ctx):
            raise CancelledError(how)
        if ctx.ledger.read().export is None:  # else it is exported, and the claim was released
            claim(ctx)  # renew the claim: like the lease, it must last as long as this attempt
        yield record


def edited(ctx: RunContext, handle: Handle) -> Finding | None:
    """Return a warning that names what has changed since an attempt was started.

    None: nothing has changed, or an older version did not record what the attempt was started with.
    """
    entry = ctx.ledger.read()
    recorded = entry.attempts.get(handle.attempt)
    if recorded is None:  # an older version of manycpu started it
        return None
    # What was not staged or built again counts as unchanged.
    digests = {name: entry.digests.get(name, digest) for name, digest in recorded.digests.items()}
    before = _dotted_fields(recorded)
    now = _dotted_fields(Attempt(run=ctx.run_fields, target=ctx.target_fields, digests=digests))
    at_once = {f"run.{name}" for name in FIELDS_AT_ONCE}  # these count for the attempt, too
    at_once |= {f"target.{name}" for name in ctx.target.reached_by}
    names = [name for name in sorted({*before, *now} - at_once) if before.get(name) != now.get(name)]
    if not names:
        return None
    changed = [f"the files of {_DIGEST_FIELDS[name]}" if name in _DIGEST_FIELDS else name for name in names]
    is_one_value = len(names) == 1 and names[0] not in _DIGEST_FIELDS
    has_changed, values = ("has", "value") if is_one_value else ("have", "values")
    return Finding(
        "",  # the message names all fields
        f"{', '.join(changed)} {has_changed} changed since attempt {handle.attempt} began",
        f"This attempt keeps the old {values}; the next one uses the new",
        fatal=False,
    )


def _dotted_fields(attempt: Attempt) -> dict[str, Any]:
    """Return the fields of an attempt, and its digests: dotted name -> value."""
    parts = {"run": attempt.run, "target": attempt.target, "digests": attempt.digests}
    return {f"{part}.{name}": value for part, fields in parts.items() for name, value in fields.items()}
