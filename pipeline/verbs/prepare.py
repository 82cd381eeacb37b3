"""prepare: find everything that can be known before a core is spent, and begin the ledger."""

import time

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import Finding, raise_findings
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.output import claim, release
from manycpu.pipeline.verbs.cleanup import end_expired
from manycpu.pipeline.verbs.preflight import preflight

__all__ = ["prepare"]


def prepare(ctx: RunContext, holder: ProcessHandle | None = None) -> list[Finding]:
    """Run preflight, claim the output, then begin the ledger.

    Args:
        ctx: The run.
        holder: The process that does all of it; None: many work on it in turn.

    Returns:
        What preflight found that is no obstacle, and what older runs left that cannot be removed.

    Raises:
        BadInputError: What preflight found that is one; nothing was started.
    """
    started = time.monotonic()
    findings = preflight(ctx)
    raise_findings(findings)
    findings += ctx.driver.remove_expired(ctx, ctx.ledger.now(), end_expired)
    claim(ctx, holder)
    try:
        entry: Entry = ctx.ledger.open(ctx.new_entry(time.time()))
    except BaseException:
        if not ctx.ledger.exists():  # else the claim is that of the run, which goes on
            release(ctx)
        raise
    if entry.attempt + 1 in entry.cancelled:  # said of what was begun before, and did not get that far
        with ctx.ledger.update() as entry:
            entry.cancelled.pop(entry.attempt + 1, None)
    if "prepare" not in entry.verbs:
        with ctx.ledger.timed("prepare") as record:
            record.seconds = 0
        with ctx.ledger.update() as entry:
            entry.verbs["prepare"].seconds = time.monotonic() - started
    return findings
