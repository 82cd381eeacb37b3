"""prepare: check the run, claim its output and create its ledger, before anything starts."""

import time
from contextlib import suppress
from typing import Final

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import Finding, ForeignRunError, ManycpuError, NoReportError, raise_findings
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.output import claim, release
from manycpu.pipeline.verbs.cancel import take_cancellation
from manycpu.pipeline.verbs.cleanup import may_delete_expired
from manycpu.pipeline.verbs.launch import attachable
from manycpu.pipeline.verbs.preflight import preflight
from manycpu.pipeline.verbs.report import read_report

SOURCES: Final = ("run.data", "run.model", "run.program", "run.code")
"""Fields that name files of which an attempt has copies: once it runs, it does not need the files."""


def prepare(ctx: RunContext, holder: ProcessHandle | None = None) -> list[Finding]:
    """Run preflight, remove expired runs, claim the output, and create the ledger.

    A cancellation that was recorded during an earlier try does not count for this try. If that try started an
    attempt which still runs, the attempt is ended.

    Args:
        ctx: The run.
        holder: The process that runs all verbs of the run; None: several processes work in turn.

    Returns:
        Warnings: of preflight, and about expired runs that cannot be removed. If ``holder`` is given and the
        present attempt runs or has succeeded, also fatal findings of the fields ``SOURCES``: they count only
        if another attempt must start.

    Raises:
        BadInputError: Preflight has fatal findings, or another run has the output; nothing was started.
        ExportError: With ``run.checkpoints``: the report of an earlier training cannot be read.
        ForeignRunError: Another process runs all verbs of this run.
    """
    started = time.monotonic()
    findings = preflight(ctx)
    # A training that runs already needs no sources: a finding about them must not refuse to attach to it.
    others = [finding for finding in findings if finding.field not in SOURCES]
    has_source_findings = len(others) < len(findings)
    may_attach = holder is not None and has_source_findings and ctx.ledger.exists()
    if may_attach and attachable(ctx, ctx.ledger.read()):
        raise_findings(others)
    else:
        raise_findings(findings)
    findings += ctx.driver.remove_expired(ctx, ctx.ledger.now(), may_delete_expired)
    if ctx.ledger.exists():
        entry = _take_up(ctx, holder)
        take_cancellation(ctx)  # one of an earlier try, before its launch: it does not count for this try
    else:
        entry = _begin(ctx, holder)
    if "prepare" not in entry.verbs:
        with ctx.ledger.timed("prepare") as record:  # all is done: the block only makes the record
            record.seconds = 0
        with ctx.ledger.update() as entry:  # `timed` lacks the seconds before the ledger existed
            entry.verbs["prepare"].seconds = time.monotonic() - started
    return findings


def _checkpoints_since(ctx: RunContext, now: float) -> float | None:
    """Return ``checkpoints_since`` of a run that begins now, by the report of this run in its output.

    After a success the run gets a new folder of checkpoints, and otherwise it resumes in the last one.

    Raises:
        ExportError: The report cannot be read.
    """
    if ctx.run.checkpoints is None:
        return None
    try:
        report = read_report(ctx)
    except NoReportError:
        return None
    return now if report.state is RunState.SUCCEEDED else report.checkpoints_since


def _take_up(ctx: RunContext, holder: ProcessHandle | None) -> Entry:
    """Renew the claim of a run that has begun, and then its lease; a refused run keeps its lease as it is."""
    claim_key = ctx.claim_key
    try:
        ctx.ledger.refuse_second_holder()  # first: the claim would name this process as its holder
        claim(ctx, holder)
        entry = _open(ctx, holder)
    except BaseException as error:
        if not ctx.ledger.exists():  # otherwise the run has begun, and its claim must stay
            release(ctx, claim_key)
        elif isinstance(error, ForeignRunError):  # another process works on this run: it gets its claim back
            claim(ctx, ctx.ledger.lease().holder)
        raise
    if ctx.claim_key != claim_key:  # another process has removed the ledger, and this one is new
        release(ctx, claim_key)
        _claim_for_new(ctx, holder)
        with ctx.ledger.update() as entry:
            entry.checkpoints_since = _checkpoints_since(ctx, entry.created)
    return entry


def _begin(ctx: RunContext, holder: ProcessHandle | None) -> Entry:
    """Create the ledger, and claim the output for it.

    The ledger comes first, because the claim is for it: after a kill between the two, the next try claims.
    """
    entry = _open(ctx, holder, _checkpoints_since(ctx, time.time()))
    _claim_for_new(ctx, holder)
    return entry


def _open(ctx: RunContext, holder: ProcessHandle | None, checkpoints_since: float | None = None) -> Entry:
    """Create the ledger or renew its lease, and make ``holder`` hold it; return its entry.

    ``checkpoints_since``: the field of a new ledger.
    """
    new = ctx.new_entry(time.time()).model_copy(update={"checkpoints_since": checkpoints_since})
    entry: Entry = ctx.ledger.open(new)
    if holder is not None:
        ctx.ledger.change_lease(holder=holder)
    return entry


def _claim_for_new(ctx: RunContext, holder: ProcessHandle | None) -> None:
    """Claim the output for a new ledger; if that fails, delete the ledger: the run has not begun.

    Only a ledger for which nothing was done is deleted.
    """
    try:
        claim(ctx, holder)
    except BaseException:
        with suppress(OSError, ManycpuError):  # if the ledger stays, it goes when its lease is over
            if not ctx.ledger.read().verbs:  # another process of this run may have begun it
                release(ctx)
                ctx.driver.remove(ctx)
        raise
