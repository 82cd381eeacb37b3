"""prepare: find everything that can be known before a core is spent, and begin the ledger."""

import time

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import Finding, raise_findings
from manycpu.pipeline.targets import verbs_of
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.verbs.cleanup import undelivered
from manycpu.pipeline.verbs.preflight import preflight

__all__ = ["prepare"]


def prepare(ctx: RunContext) -> list[Finding]:
    """Run preflight, then begin the ledger.

    Returns:
        What preflight found that is no obstacle, and what older runs left that cannot be removed.

    Raises:
        BadInputError: What preflight found that is one; nothing was started.
    """
    started = time.monotonic()
    findings = preflight(ctx)
    raise_findings(findings)
    findings += verbs_of(ctx).remove_expired(ctx, time.time(), undelivered)
    entry: Entry = ctx.ledger.open(ctx.new_entry(time.time()))
    if entry.attempt + 1 in entry.cancelled:  # said of what was begun before, and did not get that far
        with ctx.ledger.update() as entry:
            entry.cancelled.pop(entry.attempt + 1, None)
    if "prepare" not in entry.verbs:
        with ctx.ledger.timed("prepare") as record:
            record.seconds = 0
        with ctx.ledger.update() as entry:
            entry.verbs["prepare"].seconds = time.monotonic() - started
    return findings
