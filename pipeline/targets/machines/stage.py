"""Stage and build on machines: copy sources and code to folders that runs share, here and on the hosts."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.credentials import without_secrets
from manycpu.pipeline.spec.errors import (
    DISK_FULL,
    BadInputError,
    LaunchError,
    ManycpuError,
    RunGoneError,
    StageError,
)
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import Built, Copied, RunContext
from manycpu.pipeline.targets.machines.context import MachineContext, home_of
from manycpu.pipeline.targets.machines.hosts import deliver, hosts_without
from manycpu.pipeline.targets.program_code import code_of, installed_digest, program_of
from manycpu.pipeline.transfer import Manifest, Progress, Stored

_LOG: Final = logging.getLogger(__name__)
_DIGITS: Final = 16  # of the digest in the name of a code's folder


def stage(ctx: MachineContext, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
    """Copy each source to a folder that is named by its content; with ``stage: in_place``, use its path."""
    return {name: _stage_one(ctx, name, url, progress) for name, url in sources.items()}


def _stage_one(ctx: MachineContext, name: str, url: str, progress: Progress) -> Copied:
    """Copy the source of the field ``name`` (``data`` or ``model``), or use it in place."""
    field, home = f"run.{name}", home_of(ctx)
    source = Location.of(url, field)
    try:
        if ctx.target.stage == "in_place" and source.local is not None:
            return _use_in_place(ctx, source.local, transfer.scan(source), field)
        source = source.at_commit()  # a branch of the Hub may move during the copy
        identity = transfer.identity(source)
        intended_folder = home / name / identity[: transfer.DIGITS]
        folder, manifest, reused = _copy_everywhere(ctx, source, intended_folder, identity, progress)
        # The copy of a single file is a folder with this file.
        path = folder / source.name if source.is_file() else folder
    except (BadInputError, LaunchError, RunGoneError, StageError):  # these already say which host or field
        raise
    except Exception as error:
        # Each fsspec protocol raises its own error types.
        fix = "See that its name is right, and that this machine may read it"
        if source.url.startswith("hf://"):
            fix += "; a private one of the Hub needs HF_TOKEN"
        if isinstance(error, transfer.TransferError):
            fix = "Stage again when nothing writes to it"
        elif isinstance(error, OSError) and error.errno in DISK_FULL:
            fix = f"Make room in {home}, or set target.directory to another disk; then run again"
        raise StageError(
            without_secrets(f"{url} was not staged: {error}", url), field=field, fix=fix
        ) from error
    return Copied(str(path), manifest.digest, reused)


def _use_in_place(ctx: MachineContext, path: Path, manifest: Manifest, field: str) -> Copied:
    """Use a source without a copy, if every host has the same content at its path."""
    if differing_hosts := hosts_without(ctx, path, manifest):
        raise StageError(
            f"{path} is not the same here and on {', '.join(differing_hosts)}",
            field=field,
            fix="Share its folder with every host, or set target.stage to copy",
        )
    return Copied(str(path), manifest.digest, reused=True)


def build(ctx: MachineContext) -> tuple[Built, bool]:
    """Make a snapshot of the program's code; return it, and whether it existed before.

    Code that is installed in this environment needs no snapshot: then ``code`` is None.
    """
    root, arguments = program_of(ctx)
    if root is None:
        return Built(code=None, program=arguments, digest=installed_digest()), True  # nothing to make
    source = code_of(ctx, root, arguments)
    _LOG.info("the code: %s", source)
    digest = transfer.identity(source.location)
    folder = home_of(ctx) / "code" / digest[:_DIGITS]
    code, _, reused = _copy_everywhere(ctx, source.location, folder, identity=digest)
    return Built(code=str(code), program=arguments, digest=digest), reused


def _copy_everywhere(
    ctx: MachineContext, source: Location, folder: Path, identity: str, progress: Progress = lambda *_: None
) -> Stored:
    """Copy a source to a folder, here and on the hosts, unless they have it; return the folder of the copy.

    If the folder has other content which a training uses, the copy goes to a folder beside it, whose name
    ends in ``-2``, ``-3``...

    Args:
        ctx: The run.
        source: What to copy.
        folder: Where to.
        identity: A hash of the source's content, made before the copy: the copy must have the same.
        progress: Called with bytes done and bytes in all.
    """

    def is_same(copied: Manifest) -> bool:
        """Whether a copy has the content that was identified: files may be replaced during the copy."""
        return transfer.identity(source, copied=copied) == identity

    candidate, number = folder, 1
    while True:
        in_use = partial(_in_use, ctx, candidate)
        try:
            stored = transfer.fetch(
                source, candidate, progress, read_only=True, in_use=in_use, is_same=is_same
            )
            delivered = deliver(ctx, stored, in_use)
            return stored._replace(reused=stored.reused and not delivered)
        except transfer.InUseError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")


def _in_use(ctx: MachineContext, folder: Path) -> bool:
    """Whether a training that may still run uses a folder: then it must not be overwritten."""
    return any(_trains_on(other, folder) for other in ctx.driver.runs(ctx.target))


def _trains_on(ctx: RunContext, folder: Path) -> bool:
    """Whether a run's present attempt uses a folder and has not ended; true if that cannot be seen."""
    try:
        entry = ctx.ledger.read()
        handle = ctx.driver.present_handle(ctx, entry)
        if handle is None:
            return False
        attempt = entry.described(handle.attempt)
        used = [Path(path) for path in (attempt.data, attempt.model, attempt.code) if path]
        is_used = any(path.is_relative_to(folder) for path in used)
        return is_used and not attempt_status(ctx, handle, entry).state.terminal
    except RunGoneError:
        return False
    except ManycpuError:  # only another host can see whether it runs
        return True
