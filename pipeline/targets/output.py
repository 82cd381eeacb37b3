"""The output of a run, as this machine sees it: its claim, its report, and files of others in it."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from manycpu.pipeline import run_report, transfer
from manycpu.pipeline.spec.credentials import without_secrets
from manycpu.pipeline.spec.errors import (
    BadInputError,
    Finding,
    ManycpuError,
    OutputTakenError,
    raise_findings,
)
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.output import REPORT, replaceable, run_of
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext


def claim(ctx: RunContext, holder: ProcessHandle | None = None) -> None:
    """Claim the run's output, or renew the claim: a small file that refuses a second run with this output.

    The claim is for the run's ledger, which must exist. Does nothing if ``run.output`` is null, or if only
    pods reach the output: a pod then claims it.

    Args:
        ctx: The run.
        holder: The process that runs all verbs of the run; None: several processes work in turn.

    Raises:
        BadInputError: Another run has claimed the output, or it cannot be written.
    """
    if ctx.run.output is None or ctx.output_in_cluster:
        return
    try:
        place = f"host {socket.gethostname()}, {ctx.where}"
        claimant = transfer.Claimant(ctx.claim_key, ctx.name, place, ctx.waiting_lease, holder)
        transfer.claim(ctx.output, claimant, partial(_trains, ctx))
    except transfer.ClaimedError as error:
        raise_findings([claimed_finding(ctx, str(error), error.fix)])
    except BadInputError:  # of the URL: it has its field and fix already
        raise
    except Exception as error:
        # Each fsspec protocol raises its own error types.
        raise BadInputError(
            without_secrets(f"{ctx.destination} cannot be written: {error}", ctx.destination),
            field="run.output",
            fix="Give a folder, or a URL of storage, that can be written to from here",
        ) from error


def _trains(ctx: RunContext, claim: transfer.Claim) -> bool:
    """Whether the run that made a claim still trains, such as after its command was killed.

    False also if that cannot be seen from here: then the time of the claim decides.
    """
    other = replace(ctx, name=claim.run, key=run_of(claim.key))
    try:
        entry = other.ledger.read()
        handle = other.driver.present_handle(other, entry)
        # No attempt was started, or the ledger of that name here is another run's.
        if handle is None or claim.key not in (entry.key, other.claim_key):
            return False
        state = attempt_status(other, handle, entry).state
    except (ManycpuError, OSError, ValueError):
        return False
    return not state.terminal and state is not RunState.UNKNOWN


def release(ctx: RunContext, key: str | None = None) -> None:
    """Delete the claims of the run on its output, and on those that it had before ``run.output`` was edited.

    Pods release what they have claimed. ``key``: that of the claim, if it was made for an earlier ledger of
    the run.
    """
    outputs = {ctx.run.output} if ctx.run.output else set()
    with suppress(ManycpuError):  # the ledger is gone
        outputs |= ctx.ledger.read().outputs
    for output in outputs:
        claimed = replace(ctx, run=ctx.run.model_copy(update={"output": output}))
        if not claimed.output_in_cluster:
            transfer.release(claimed.output, key or ctx.claim_key)


def claimed_finding(ctx: RunContext, other: str, fix: str) -> Finding:
    """Make the finding that another run has claimed the output; ``other`` describes that run."""
    return Finding("run.output", f"{ctx.destination} is in use: {other}", fix)


def read_beside(ctx: RunContext, name: str) -> str | None:
    """Read a text file of the output, such as report.json; None: there is none."""
    return ctx.output.read_text(name)


def write_report(ctx: RunContext, text: str) -> None:
    """Write the output's report.json.

    Raises:
        OutputTakenError: Another run has claimed the output, or has left a model and its report there.
        BadInputError: The output has a report.json that manycpu did not write.
    """
    existing_text = ctx.output.read_text(REPORT)
    check_report(ctx, names=[] if existing_text is None else [REPORT], text=existing_text)
    try:
        transfer.write_report(ctx.output, ctx.claim_key, text)
    except transfer.ClaimedError as error:
        raise taken_error(claimed_finding(ctx, str(error), error.fix)) from error


def check_report(ctx: RunContext, names: Sequence[str], text: str | None) -> None:
    """Check that the run may write report.json: the output has no file, or a report that it may replace.

    Args:
        ctx: The run.
        names: Names of files in the output; one of them is enough to judge.
        text: The content of the output's report.json; None: there is none.

    Raises:
        OutputTakenError: Another run has left a model and its report there.
        BadInputError: The output has files, and no report of a run.
    """
    if not names or (text is not None and replaceable(text, ctx.key)):
        return
    finding = not_empty_finding(ctx, names[0], text)
    if run_report.parse(text) is not None:  # the report of another run
        raise taken_error(finding)
    raise_findings([finding])


def taken_error(finding: Finding) -> OutputTakenError:
    """Make the error for an output that another run has; ``finding`` has its text, field and fix."""
    return OutputTakenError(finding.message, field=finding.field, fix=finding.fix)


def write_beside(ctx: RunContext, name: str, text: str) -> None:
    """Write report.html or run.log to the output, unless the program wrote a file of that name."""
    transfer.write_beside(ctx.output, ctx.key, name, text)


def occupied_finding(ctx: RunContext, names: Sequence[str], text: str | None) -> Finding | None:
    """Return a finding if the output has files that this run must not overwrite; None: it has none.

    Args:
        ctx: The run.
        names: Names of files in the output, except report.html and run.log; two of them are enough to judge.
        text: The content of the output's report.json; None: there is none.
    """
    if not names:
        return None
    report = run_report.parse(text)
    if report is not None:
        is_own = report.key == ctx.key  # this run, which is resumed, wrote the files
        is_only_report_of_a_failure = len(names) == 1 and replaceable(text, ctx.key)
        if is_own or is_only_report_of_a_failure:
            return None
    return not_empty_finding(ctx, names[0], text)


def not_empty_finding(ctx: RunContext, name: str, text: str | None) -> Finding:
    """Make the finding that the output has a file or a folder that this run did not write.

    If another run left its report there, the finding names that run.

    Args:
        ctx: The run.
        name: Name of the file or folder in the output.
        text: The content of the output's report.json; None: there is none.
    """
    report = run_report.parse(text)
    if report is not None and not replaceable(text, ctx.key):
        return Finding(
            "run.output",
            f"{ctx.destination} is not empty: another run, {report.name}, wrote its model and report there",
            "Give another output, or move that folder away. To replace that model, start its run again with "
            "its --run-id. (If your own run has already trained, it exports to the new output without "
            "training again.)",
        )
    if report is not None:  # an export of this run that is cut, or the model of an earlier success
        return Finding(
            "run.output",
            f"{ctx.destination} is not empty: {name} is in it, and the report of run {report.name}, which is "
            f"{report.state}",
            "Give another output, or move that folder away; a run never overwrites what it did not make",
        )
    return Finding(
        "run.output",
        f"{ctx.destination} is not empty: {name} is in it",
        "Give an empty or new folder; a run never overwrites what it did not make",
    )
