"""The attempts of a run: the tasks that own them, what they are started with, and their status."""

from datetime import UTC, datetime

from manycpu.pipeline.ledger import Attempt, End, Entry
from manycpu.pipeline.spec.errors import ForeignRunError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.context import Built, RunContext, Staged
from manycpu.pipeline.targets.open_run import as_started


def join(ctx: RunContext, entry: Entry, role: str) -> None:
    """Record which task does a step of a run; before the first attempt, also record the run's fields.

    Tasks of one DAG run share a run if they have the same ``training``; then their fields must agree. A task
    whose fields were edited continues its own run.

    Args:
        ctx: The run, as the task describes it.
        entry: The entry of its ledger, which is changed.
        role: The step that tasks with other fields must not share: ``prepare`` or ``train``.

    Raises:
        ForeignRunError: Another task does this step, and describes another training.
    """
    if not ctx.task:  # outside of Airflow, no other task shares the run
        return
    first_task = entry.tasks.setdefault(role, ctx.task)
    if first_task != ctx.task:
        _check_same_fields(ctx, entry, first_task)
    if entry.attempt == 0:
        entry.run, entry.target = ctx.run_fields, ctx.target_fields


def _check_same_fields(ctx: RunContext, entry: Entry, first_task: str) -> None:
    """Raise ForeignRunError if the task's fields differ from those of the task that came first."""
    own = {"run": ctx.run_fields, "target": ctx.target_fields}
    recorded = entry.described().model_dump(mode="json")
    fields = [
        f"{part}.{name}"
        for part in own
        for name in sorted(own[part] | recorded[part])
        if own[part].get(name) != recorded[part].get(name)
    ]
    if fields:
        raise ForeignRunError(
            f"{ctx.task} and {first_task} are one run, {ctx.name}, and differ in {', '.join(fields)}",
            field="training",
            fix="Give each a `training` of its own, or the same run and target",
        )


def attempt_of(ctx: RunContext, staged: Staged, built: Built) -> Attempt:
    """Describe the next attempt for the ledger: its fields, and what was staged and built for it."""
    return Attempt(
        run=ctx.run_fields,
        target=ctx.target_fields,
        data=staged.data,
        model=staged.model,
        code=built.code,
        image=built.image,
        digests=staged.digests | {"code": built.digest},
    )


def begin_attempt(entry: Entry, number: int, started_with: Attempt) -> None:
    """Begin an attempt in a ledger's entry, and remove what the entry says of the attempt before it.

    The caller must save the entry before anything of the attempt starts. After a kill, a retry then finds the
    attempt.
    """
    entry.attempt = number
    entry.attempts[number] = started_with
    entry.handle = entry.export = None
    entry.verbs.pop("wait", None)


def checkpoints_of(ctx: RunContext, entry: Entry | None, directory: object) -> str:
    """Return the run's folder of checkpoints on the nodes, which all its attempts share.

    It is below ``run.checkpoints``, or, if that is null, below the run's own folder ``directory``. A run that
    trains again after a success gets a new folder: from the old one it would only repeat the finished model.

    Args:
        ctx: The run.
        entry: The entry of its ledger; None: the folder of a run that has not succeeded before.
        directory: The run's own folder.
    """
    if not ctx.run.checkpoints:
        return f"{directory}/checkpoints"
    folder = f"{ctx.run.checkpoints}/{ctx.name}"
    if entry is None or entry.checkpoints_since is None:
        return folder
    return f"{folder}-{datetime.fromtimestamp(entry.checkpoints_since, UTC):%Y%m%dT%H%M%S.%f}"


def should_attach(status: Status, entry: Entry) -> bool:
    """Whether to attach to the present attempt: it runs, or it has succeeded and may have a model.

    If False, this has recorded the attempt's end in the ledger's entry, and the next attempt may start.
    """
    if not status.state.terminal:
        return True
    # fruitless: an export found that the attempt had written no model. Then another attempt must train.
    if status.state is RunState.SUCCEEDED and not entry.described().fruitless:
        return True
    # The verb `wait` may have recorded it before, with more fields: that record stays.
    entry.ends.setdefault(entry.attempt, End(state=status.state, reason=status.in_short))
    return False


def attempt_status(ctx: RunContext, handle: Handle, entry: Entry) -> Status:
    """Read the status of an attempt, judged by the fields that the attempt was started with.

    The reason of a cancelled attempt names who cancelled it.
    """
    started = as_started(ctx, entry, handle.attempt)
    return with_canceller(ctx.driver.status(started, handle, entry), handle, entry)


def with_canceller(status: Status, handle: Handle, entry: Entry) -> Status:
    """Return the status; if the attempt was cancelled, the reason names who did it, if that is recorded."""
    canceller = entry.cancelled.get(handle.attempt)
    if status.state is RunState.CANCELLED and canceller is not None:
        return Status(state=RunState.CANCELLED, reason=f"ended by {canceller}")
    return status
