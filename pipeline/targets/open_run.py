"""Open a run: validate its fields and target, or read them from its ledger."""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.spec import program, recipe_options
from manycpu.pipeline.spec.errors import BadInputError, LedgerError, ManycpuError, RunGoneError, require
from manycpu.pipeline.spec.naming import run_key, run_name
from manycpu.pipeline.spec.targets import TargetFields
from manycpu.pipeline.spec.training_run import TrainingRun, passable
from manycpu.pipeline.spec.validation import read_both, read_recorded
from manycpu.pipeline.targets.context import Access, RunContext, without_protocol

_LOG = logging.getLogger(__name__)
FIELDS_AT_ONCE = ("output", "keep", "keep_for")
"""Fields of a run whose new values count at once, also for an attempt that was started with others."""


def open_context(
    run: Mapping[str, Any] | TrainingRun,
    target: Mapping[str, Any] | TargetFields | None,
    *identity: object,
    base: Path,
    access: Access | None = None,
) -> RunContext:
    """Open a run: validate the run and the target, and make their paths absolute.

    Args:
        run: The run, or its fields.
        target: The target, or its fields; None: this machine.
        identity: Values that tell this run from others; the key of the run is their hash.
        base: Folder that relative paths start from: that of the run file or the DAG file.
        access: Access to a cluster and its registry; None: from the target's fields.

    Raises:
        BadInputError: A field is wrong.
    """
    # The target fills in what the fields leave open, such as the number of processes.
    valid_run, valid_target = read_both(run, target)
    completed_run, completed_target = valid_target.completed(valid_run)
    absolute_run = _with_absolute_paths(completed_run, completed_target, base)
    paths = {name: getattr(completed_target, name) for name in completed_target.paths}
    absolute_paths = {name: absolute(path, base, f"target.{name}") for name, path in paths.items() if path}
    absolute_target = completed_target.model_copy(update=absolute_paths)
    key = run_key(*identity)
    name = run_name(absolute_run.label, key)
    run_id = str(identity[1]) if identity[0] in ("cli", "notebook") else ""
    named = {"name": name, "key": key, "run_id": run_id}
    return _context(absolute_run, absolute_target, access, **named, base=base.absolute())


def reopen(
    entry: Entry, directory: str | None = None, access: Access | None = None, attempt: int | None = None
) -> RunContext:
    """Open a run that has begun, from the fields in its ledger.

    Args:
        entry: The ledger's entry.
        directory: The folder of a target on machines; None: as recorded.
        access: Access to a cluster and its registry; None: from the target's fields.
        attempt: The attempt whose fields to use; None: the present one.

    Raises:
        LedgerError: This version cannot read the recorded fields.
    """
    described = entry.described(attempt)
    try:
        run, target = read_recorded(described.run, described.target)
    except BadInputError as error:
        message = f"the ledger of run {entry.name} describes none that this version reads: {error}"
        raise LedgerError(message, fix="Use the version of manycpu that began it") from error
    if directory is not None:
        target = target.model_copy(update={"directory": directory})
    base = Path(directory or Path.cwd())  # hardly used: ledgers record absolute paths
    named = {"name": entry.name, "key": entry.key, "run_id": entry.run_id}
    return _context(run, target, access, **named, base=base)


def reopen_all(
    ledgers: Iterable[Ledger], directory: str | None = None, access: Access | None = None
) -> list[RunContext]:
    """Open the runs whose ledgers can be read, oldest first; log the errors of the others."""
    opened = []  # pairs: when the run was created, by which they are sorted, and the run
    for ledger in ledgers:
        try:
            entry = ledger.read()
            opened.append((entry.created, reopen(entry, directory, access)))
        except (RunGoneError, PermissionError):
            continue  # it was just removed, or another user owns it
        except (ManycpuError, OSError) as error:
            _LOG.warning("%s", error)
    return [ctx for _, ctx in sorted(opened, key=lambda pair: pair[0])]


def find(ctx: RunContext) -> RunContext:
    """Return the run with the name under which it began; an edited field may have given ``ctx`` another.

    A run that has not begun is returned unchanged.
    """
    if ctx.ledger.exists():
        return ctx
    names = ctx.driver.names(ctx)
    return replace(ctx, name=names[0]) if names else ctx


def as_started(ctx: RunContext, entry: Entry, attempt: int) -> RunContext:
    """Return the run with the fields that an attempt was started with: the attempt is judged by these.

    Some fields always keep their present values: ``FIELDS_AT_ONCE``, and those of the target that say how to
    reach it.

    Args:
        ctx: The run; its fields may have been edited since.
        entry: Its ledger's entry.
        attempt: The attempt; if an older version started it without a record, the entry's fields are used.
    """
    if attempt == 0:  # none has begun
        return ctx
    started = entry.described(attempt)
    if (started.run, started.target) == (ctx.run_fields, ctx.target_fields):
        return ctx
    present_of_run = {name: getattr(ctx.run, name) for name in FIELDS_AT_ONCE}
    present_of_target = {name: getattr(ctx.target, name) for name in ctx.target.reached_by}
    run, target = read_recorded(started.run, started.target)
    return replace(
        ctx,
        run=run.model_copy(update=present_of_run),
        target=target.model_copy(update=present_of_target),
    )


def _context(run: TrainingRun, target: TargetFields, access: Access | None, **identity: Any) -> RunContext:
    """Make the context; raise an error if this environment lacks packages that the target needs."""
    if target.extra:
        require(*target.extra)
    return RunContext(run, target, access=access or Access(), **identity)


def _with_absolute_paths(run: TrainingRun, target: TargetFields, base: Path) -> TrainingRun:
    """Make the paths of a run absolute, starting from ``base``."""

    def absolute_from(folder: Path, *fields: str) -> dict[str, str | None]:
        return {field: absolute(getattr(run, field), folder, f"run.{field}") for field in fields}

    paths = absolute_from(base, "data", "model", "output")
    # These folders are on the nodes, where relative paths may start from the volume.
    nodes_base = target.node_folder(base)
    paths |= absolute_from(nodes_base, "checkpoints", "resume_from")
    if run.code != program.AUTO:
        paths |= absolute_from(base, "code")
    if program.parse(run.program).kind == "script":
        paths |= absolute_from(base, "program")
    return run.model_copy(update={**paths, "args": _resolved_args(run, base)})


def _resolved_args(run: TrainingRun, base: Path) -> tuple[str, ...]:
    """Return a run's arguments; for a recipe, a JSON file of options is replaced by the options in it.

    The nodes may not have that file.
    """
    if program.parse(run.program).kind != "recipe":
        return run.args
    try:
        return tuple(recipe_options.words(run.args, base))
    except BadInputError:
        # `words` raises only if the one argument names a JSON file.
        if (base / run.args[0]).is_file():  # this machine has the file, and its content is wrong
            raise
        return run.args  # only the nodes may have the file


def absolute(path: str | None, base: Path, field: str) -> str | None:
    """Make a relative path absolute, starting from ``base``; a URL of this disk becomes its path.

    Other URLs and None stay as they are.

    Raises:
        BadInputError: The path names an unknown user or another host, or ``base`` is no UTF-8. ``field`` is
            the field of the path, for the error.
    """
    if path is None:
        return None
    path = without_protocol(path, field)
    if "://" in path:
        return path
    try:
        absolute_path: str = passable(os.path.normpath(base.absolute() / Path(path).expanduser()))
    except RuntimeError as error:  # ~name, and there is no such user
        raise BadInputError(f"{path}: {error}", field=field, fix="Write the path without ~") from error
    except ValueError as error:  # of a folder whose name is no UTF-8, which no record can hold
        raise BadInputError(f"{str(base)!r}: {error}", fix="Start from a folder with another name") from error
    return absolute_path
