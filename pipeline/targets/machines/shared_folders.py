"""Copy sources to folders that runs share. A folder that a training uses is never overwritten."""

from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.errors import ManycpuError, RunGoneError
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.machines.context import MachineContext
from manycpu.pipeline.targets.machines.hosts import deliver
from manycpu.pipeline.transfer import Manifest, Progress, Stored

__all__ = ["bring"]


def bring(
    ctx: MachineContext, source: Location, folder: Path, identity: str, progress: Progress = lambda *_: None
) -> Stored:
    """Copy a source to a folder, here and on the hosts; if that is in use, beside it (``-2``, ``-3``).

    Args:
        ctx: The run.
        source: What to copy.
        folder: The folder to copy to.
        identity: Digest of the source: see :func:`transfer.identity`.
        progress: Called with the bytes that are done, and the bytes in total.

    Raises:
        TransferError: A file changed during the copy.
        OSError: The disk is full, or the source cannot be read.
        LaunchError: A host cannot be reached.
        StageError: A copy on a host differs from the source.
    """
    names = (folder.name if number == 1 else f"{folder.name}-{number}" for number in count(1))

    def is_same(copied: Manifest) -> bool:
        return transfer.identity(source, copied=copied) == identity

    def bring_to(folder: Path) -> Stored | None:
        in_use = partial(_in_use, ctx, folder)
        with suppress(transfer.InUseError):
            stored = transfer.fetch(source, folder, progress, read_only=True, in_use=in_use, is_same=is_same)
            delivered = deliver(ctx, stored, in_use)
            return stored._replace(reused=stored.reused and not delivered)
        return None

    return next(stored for name in names if (stored := bring_to(folder.with_name(name))))


def _in_use(ctx: MachineContext, folder: Path) -> bool:
    """Whether a running training uses a folder."""
    return any(_trains_on(other, folder) for other in ctx.driver.runs(ctx.target))


def _trains_on(ctx: RunContext, folder: Path) -> bool:
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
