"""Commands of a helper pod; each function takes the fields of its request."""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import Item, Rows
from manycpu.pipeline.adapters.lock import leased
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod.channel import (
    Channel,
    Incoming,
    LostError,
    receive_rows,
    receive_starts,
    send_files,
    send_rows,
)
from manycpu.pipeline.spec import rank_logs
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.exit_records import finished_round
from manycpu.pipeline.spec.output import METRICS
from manycpu.pipeline.transfer import Lock, Manifest, Progress

_PROGRESS_INTERVAL_S: Final = 0.5


def answer(channel: Channel, command: str) -> int:
    """Run a command for the other end.

    Returns:
        The exit code. 0: it is done. 1: it failed, and the error was sent. EX_TEMPFAIL: try again.
    """
    logger = logging.getLogger("manycpu")
    logger.setLevel(logging.INFO)
    logger.addHandler(_LogSender(channel))
    try:
        request = channel.receive_message("request")
        COMMANDS[command](channel, **{name: value for name, value in request.items() if name != "kind"})
    except LostError:
        return os.EX_TEMPFAIL  # the other end is gone
    except transfer.TakenOverError:
        return os.EX_TEMPFAIL  # another process makes the copy now: the next try waits for that
    except Exception as error:  # noqa: BLE001 - every protocol of fsspec has errors of its own
        with suppress(LostError):
            channel.send_message("error", text=_error_text(error), reason=_error_reason(error))
        return 1
    return os.EX_OK


class _LogSender(logging.Handler):
    """Sends log records to the other end, which logs them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send_message("note", level=record.levelno, text=record.getMessage())


def receive(channel: Channel, folder: str, **request: Any) -> None:
    """Receive a folder from the other end, and store it under the digest of its content.

    The list of files follows the request, whose field ``bytes`` has the list's size.
    """
    source = Incoming(channel, receive_rows(channel, request, Item))

    def ask_for_digest() -> str:  # called if the volume has a copy of the same list of files
        channel.send_message("alike")
        return str(channel.receive_message("digest")["sha256"])

    stored = transfer.store(
        source,
        Path(folder),
        digest=ask_for_digest,
        progress=_progress_sender(channel),
        lock=_leases(channel),
        tick=channel.tick,
    )
    channel.send_message("done", sha256=stored.manifest.digest, path=str(stored.path), reused=stored.reused)


def send(channel: Channel, source: str) -> None:
    """Send a folder to the other end: the list of its files, then what the other end lacks of each file.

    If there is no file, only the list is sent.
    """
    location = transfer.written(source)  # without files that cannot be copied
    items = location.items(channel.tick) if location.exists() else Rows(Item)
    send_rows(channel, "files", items)
    if any(not item.is_folder for item in items):
        starts = receive_starts(channel, channel.receive_message("have"))
        send_files(channel, transfer.Hashing(location, channel.tick), items, starts)


def fetch(channel: Channel, url: str, folder: str, field: str) -> None:
    """Copy what is at a URL to a folder below ``folder``, named by a digest that changes with the content.

    ``field``: the field of the run that has the URL, for errors.
    """
    source = Location.of(url, field).at_commit()
    identity = transfer.identity(source, channel.tick)
    destination = Path(folder) / identity[: transfer.DIGITS]
    stored = transfer.fetch(
        source,
        destination,
        progress=_progress_sender(channel),
        lock=_leases(channel),
        tick=channel.tick,
        # The source may have changed during the copy.
        is_same=lambda copied: transfer.identity(source, channel.tick, copied) == identity,
    )
    # Of a single file, the answer names the file in the folder.
    path = destination / source.name if source.is_file() else destination
    channel.send_message("done", sha256=stored.manifest.digest, path=str(path), reused=stored.reused)


def publish(channel: Channel, source: str, url: str, key: str) -> None:
    """Copy a folder of the volume to a URL; answer with the list of files; empty: the folder has none."""
    manifest = Manifest()
    location = transfer.written(source)
    items = location.items(channel.tick) if location.exists() else ()
    if any(not item.is_folder for item in items):
        target = Location.of(url, field="run.output")
        manifest = transfer.publish(Path(source), target, key, _progress_sender(channel), channel.tick)
    send_rows(channel, "done", manifest.files)


def claim(channel: Channel, url: str, **claimant: Any) -> None:
    """Claim an output for a run; if another run holds it, the answer names that run."""
    output = Location.of(url, field="run.output")
    _answer_with_holder(channel, transfer.claim, output, transfer.Claimant(**claimant))


def release(channel: Channel, url: str, key: str) -> None:
    """Delete a run's claim of an output."""
    transfer.release(Location.of(url, field="run.output"), key)
    channel.send_message("done")


def write_report(channel: Channel, url: str, key: str, text: str) -> None:
    """Write a run's report.json to a URL; if another run holds the output, the answer names that run."""
    _answer_with_holder(channel, transfer.write_report, Location.of(url, field="run.output"), key, text)


def _answer_with_holder(channel: Channel, act: Callable[..., None], *arguments: Any) -> None:
    """Call ``act``, which changes an output; answer with the run that holds the output and prevents that.

    ``other`` in the answer describes that run, and ``fix`` says what to do. Both are None after a success.
    """
    other = fix = None
    try:
        act(*arguments)
    except transfer.ClaimedError as error:
        other, fix = str(error), error.fix
    channel.send_message("done", other=other, fix=fix)


def write_beside(channel: Channel, url: str, key: str, name: str, text: str) -> None:
    """Write a run's report.html or run.log to a URL, unless the program wrote a file of that name."""
    transfer.write_beside(Location.of(url, field="run.output"), key, name, text)
    channel.send_message("done")


def read(channel: Channel, url: str, name: str) -> None:
    """Read a small file of the folder at a URL, and list the first two files there.

    The text is None if there is no such file. The list is without a run's report.html and run.log. Two names
    are enough to judge whether the folder is in use.
    """
    location = Location.of(url, field="run.output")
    # A file that cannot be copied, such as a FIFO, does not count, and is not reported.
    items = location.without_odd(left_out=lambda *_: None).items() if location.exists() else ()
    own_files = transfer.for_people(location)
    files = (item.path for item in items if not item.is_folder and item.path not in own_files)
    names = list(islice(files, 2))
    channel.send_message("done", text=location.read_text(name), names=names)


def compare(channel: Channel, url: str, digest: str, sizes: bool) -> None:
    """Look for an export at a URL: the answer's ``reason`` says why it is not there; None: it is.

    ``digest``: of its manifest. ``sizes``: whether the sizes of files are compared, too.
    """
    output = Location.of(url, field="run.output")
    channel.send_message("done", reason=transfer.why_not_exported(output, digest, channel.tick, sizes=sizes))


def exits(channel: Channel, folder: str) -> None:
    """Read an attempt's exit records of the last round in which every rank succeeded; empty: there is none.

    A round is one start of all ranks.
    """
    channel.send_message("done", records=finished_round(Path(folder)))


def logs(channel: Channel, folder: str) -> None:
    """Read the last lines of all ranks of an attempt, in the order of time."""
    channel.send_message("done", lines=rank_logs.merged(Path(folder)))


def remove(channel: Channel, folder: str) -> None:
    """Delete a folder of the volume.

    The folder is renamed first. So after a kill of this process, no half of it looks like the whole folder.
    """
    trash = Path(folder).with_name(f".{Path(folder).name}.removed")
    if trash.exists():  # left by a process that was killed
        disk.remove(str(trash), channel.tick)
    if Path(folder).exists():
        Path(folder).rename(trash)
        disk.remove(str(trash), channel.tick)
    channel.send_message("done")


def trim(channel: Channel, folder: str, within: str, checkpoints: bool = True) -> None:
    """Delete everything in a folder except a run's outputs and checkpoints; answer which of these are left.

    Those without any file are deleted too.

    Args:
        channel: The other end.
        folder: The run's folder.
        within: The folder to clear: the run's, or one around it that belongs to the run alone.
        checkpoints: Whether to keep the checkpoints. If not, an output that has only the metrics is deleted
            too.
    """
    run = Path(folder)
    candidates = _outputs(run)
    if checkpoints:
        candidates.insert(0, run / "checkpoints")
    results = [path for path in candidates if disk.may_hold_files(path)]
    if not checkpoints:  # the metrics alone are no result to keep: the report has them
        results = [path for path in results if not disk.holds_only(path, METRICS)]
    _delete_others(Path(within), results, channel.tick)
    channel.send_message("done", results=[path.relative_to(run).as_posix() for path in results])


def _outputs(run: Path) -> list[Path]:
    """List where the attempts of a run have their outputs; links, which a program may have made, are skipped.

    Raises:
        OSError: The attempts cannot be listed, which is no proof that there are none.
    """
    try:
        with os.scandir(run / "attempts") as entries:
            return sorted(Path(entry, "output") for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:  # nothing was launched
        return []


def _delete_others(folder: Path, kept: list[Path], tick: Callable[[], None]) -> None:
    """Delete everything below a folder except the paths in ``kept`` and the folders that they are in."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path in kept:
            continue
        if any(path_to_keep.is_relative_to(path) for path_to_keep in kept):
            _delete_others(path, kept, tick)
        elif path.is_dir() and not path.is_symlink():
            disk.remove(str(path), tick)
        else:
            path.unlink()


COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "receive": receive,
    "send": send,
    "fetch": fetch,
    "publish": publish,
    "claim": claim,
    "release": release,
    "write_report": write_report,
    "write_beside": write_beside,
    "read": read,
    "compare": compare,
    "exits": exits,
    "logs": logs,
    "remove": remove,
    "trim": trim,
}


def _leases(channel: Channel) -> Lock:
    """Return the lock for copies: a lease that is renewed while this end works or waits for the other end."""
    return partial(leased, alive=lambda: channel.is_progressing, tick=channel.tick)


def _progress_sender(channel: Channel) -> Progress:
    """Return a callback that sends the other end bytes done and bytes in all, at most twice a second.

    Each call of it also records that this end's work makes progress.
    """
    last = 0.0

    def report(done: int, total: int) -> None:
        """Record progress; send it, unless this is less than half a second after the last time."""
        nonlocal last
        channel.tick()
        if time.monotonic() - last > _PROGRESS_INTERVAL_S:
            last = time.monotonic()
            channel.send_message("progress", done=done, total=total)

    return report


def _error_text(error: Exception) -> str:
    """Describe an error for the other end: the file and the system's reason, or the error's own text.

    The other end adds the field of the run that is wrong, and what to do.
    """
    if isinstance(error, BadInputError):
        return error.message
    if isinstance(error, OSError) and error.errno and error.filename:
        return f"{error.filename}: {error.strerror or os.strerror(error.errno)}"
    return str(error) or type(error).__name__


def _error_reason(error: Exception) -> str:
    """Classify an error, so that the other end can say what to do: input, changed, full, forbidden, other."""
    if isinstance(error, BadInputError):
        return "input"
    if isinstance(error, transfer.TransferError):
        return "changed"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    if isinstance(error, PermissionError):
        return "forbidden"
    return "other"
