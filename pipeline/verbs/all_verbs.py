"""All verbs of a run, one after the other: what `manycpu run` and a notebook call."""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import process
from manycpu.pipeline.listeners import RunListener, Silent
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import CancelledError, RunGoneError
from manycpu.pipeline.spec.targets import Target
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.runs import find
from manycpu.pipeline.tracking.live import listeners as trackers
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.export import export
from manycpu.pipeline.verbs.launch import edited, launch
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.report import conclude as conclude_run
from manycpu.pipeline.verbs.report import read_report, report_path
from manycpu.pipeline.verbs.stage import stage
from manycpu.pipeline.verbs.wait import conclude, wait

__all__ = ["new_run_id", "run_all", "train"]


def train(
    run: TrainingRun | Mapping[str, Any],
    target: Target | Mapping[str, Any] | None = None,
    *,
    run_id: str | None = None,
    base: Path | None = None,
    listener: RunListener | None = None,
) -> Report:
    """Run all verbs of a training: prepare, stage, build, launch, wait, export and clean up.

    In a DAG each verb is a task, and :class:`manycpu.operators.TrainOperator` is launch and wait alone.

    Args:
        run: What to train.
        target: Where; None is this machine.
        run_id: Tells this run from every other: the same again attaches to what it started.
        base: Folder that relative paths start from; default: the present one.
        listener: Is told how it goes.

    Returns:
        The report that stands beside the exported model.

    Raises:
        BadInputError: A field is wrong; nothing was started.
        ManycpuError: A verb failed. The report says so too.
    """
    ctx = open_context(run, target, "cli", run_id or new_run_id(), base=base or Path.cwd())
    ctx = find(ctx) if run_id else ctx
    return run_all(ctx, listener or Silent())


def new_run_id() -> str:
    """Generate a run id: the time, and a random suffix."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def run_all(ctx: RunContext, listener: RunListener) -> Report:
    """Run all verbs; whatever happens, clean up and have the report say how it ended.

    Raises:
        ForeignRunError: Another process of this machine does so; nothing was touched.
        ManycpuError: A verb failed.
    """
    begun_before = ctx.ledger.exists()
    if begun_before:
        ctx.ledger.refuse_second()
    try:
        with _reporting(listener, "prepare"):
            for finding in prepare(ctx):
                listener.finding(finding)
    except KeyboardInterrupt as interrupt:
        if not begun_before:
            _cleaned_up(ctx)
        raise CancelledError("interrupted; nothing was launched") from interrupt
    # All of it is this process's: when it is killed, nobody has to wait for the end of the lease.
    ctx.ledger.change_lease(holder=process.handle_of_this_process(Path(), ctx.name, 0))
    taken_away = False
    try:
        _stage_to_export(ctx, listener)
    except KeyboardInterrupt as interrupt:
        cancel(ctx, by="the terminal")
        raise CancelledError("interrupted; the training was ended") from interrupt
    except RunGoneError:
        taken_away = not ctx.ledger.exists()
        raise
    finally:
        if not taken_away:  # otherwise nothing is left to clean up, nor to report on
            with _reporting(listener, "cleanup"):
                written = _cleaned_up(ctx) or read_report(ctx)
            listener.report(written, report_path(ctx))
    return conclude_run(written)


def _cleaned_up(ctx: RunContext) -> Report | None:
    """Clean up to the end, also when somebody interrupts it: only a second time gives up."""
    try:
        return cleanup(ctx)
    except KeyboardInterrupt:
        return cleanup(ctx)


def _stage_to_export(ctx: RunContext, listener: RunListener) -> None:
    with _reporting(listener, "stage"):
        staged = stage(ctx, listener.progress)
    with _reporting(listener, "build"):
        built = build(ctx)
    with _reporting(listener, "launch"):
        handle, _ = launch(ctx, staged, built)
        if finding := edited(ctx, handle, staged, built):
            listener.finding(finding)
    with _reporting(listener, "wait"):
        conclude(ctx, handle, wait(ctx, handle, listener, *trackers(ctx, handle)))
    with _reporting(listener, "export"):
        export(ctx, handle, listener.progress)


@contextmanager
def _reporting(listener: RunListener, verb: str) -> Iterator[None]:
    listener.begin(verb)
    started, result = time.monotonic(), "failed"
    try:
        yield
        result = "done"
    finally:
        listener.end(verb, time.monotonic() - started, result)
