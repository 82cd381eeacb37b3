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
from manycpu.pipeline.pod.channel import Channel, Incoming, LostError, pour, say_rows, take_rows, take_starts
from manycpu.pipeline.spec.exit_records import finished_round
from manycpu.pipeline.transfer import Lock, Manifest, Progress

_PROGRESS_INTERVAL_S: Final = 0.5


def answer(channel: Channel, command: str) -> int:
    """Run a command for the other end.

    Returns:
        The exit code: 0; 1: the other end has received the error; EX_TEMPFAIL: try again.
    """
    logger = logging.getLogger("manycpu")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Notes(channel))
    try:
        request = channel.hear("request")
        COMMANDS[command](channel, **{name: value for name, value in request.items() if name != "kind"})
    except LostError:
        return os.EX_TEMPFAIL  # the other end is gone
    except transfer.TakenOverError:
        return os.EX_TEMPFAIL  # the next try waits for the other copy
    except Exception as error:  # noqa: BLE001 - every protocol of fsspec has errors of its own
        with suppress(LostError):
            channel.say("error", text=_text(error), reason=_reason(error))
        return 1
    return os.EX_OK


class _Notes(logging.Handler):
    """Sends log records to the other end, which logs them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.say("note", level=record.levelno, text=record.getMessage())


def receive(channel: Channel, folder: str, **listed: Any) -> None:
    """Receive a folder from the other end, and store it under the digest of its content."""
    source = Incoming(channel, take_rows(channel, listed, Item))

    def digest() -> str:
        channel.say("alike")
        return str(channel.hear("digest")["sha256"])

    stored = transfer.store(
        source, Path(folder), digest, _progress(channel), _lock(channel), tick=channel.tick
    )
    channel.say("done", sha256=stored.manifest.digest, path=str(stored.path), reused=stored.reused)


def send(channel: Channel, source: str) -> None:
    """Send a folder to the other end."""
    location = transfer.written(source)
    items = location.items(channel.tick) if location.exists() else Rows(Item)
    say_rows(channel, "files", items)
    if any(not item.is_folder for item in items):
        pour(
            channel,
            transfer.Hashing(location, channel.tick),
            items,
            take_starts(channel, channel.hear("have")),
        )


def fetch(channel: Channel, url: str, folder: str, field: str) -> None:
    """Copy a URL to a folder that is named by the digest of its content."""
    source = Location.of(url, field)
    identity = transfer.identity(source, channel.tick)
    destination = Path(folder) / identity[: transfer.DIGITS]
    stored = transfer.fetch(
        source,
        destination,
        _progress(channel),
        _lock(channel),
        tick=channel.tick,
        is_same=lambda copied: transfer.identity(source, channel.tick, copied) == identity,
    )
    path = destination / source.root.rsplit("/", 1)[-1] if source.is_file() else destination
    channel.say("done", sha256=stored.manifest.digest, path=str(path), reused=stored.reused)


def publish(channel: Channel, source: str, url: str, key: str) -> None:
    """Copy a folder to a URL."""
    manifest = Manifest()
    items = transfer.written(source).items(channel.tick) if Path(source).exists() else ()
    if any(not item.is_folder for item in items):
        target = Location.of(url, "run.output")
        manifest = transfer.publish(Path(source), target, key, _progress(channel), channel.tick)
    say_rows(channel, "done", manifest.files)


def claim(channel: Channel, url: str, **claimant: Any) -> None:
    """Claim an output for a run; the answer names another run that holds it, if there is one."""
    other = fix = None
    try:
        transfer.claim(Location.of(url, "run.output"), transfer.Claimant(**claimant))
    except transfer.ClaimedError as error:
        other, fix = str(error), error.fix
    channel.say("done", other=other, fix=fix)


def release(channel: Channel, url: str, key: str) -> None:
    """Delete a run's claim of an output."""
    transfer.release(Location.of(url, "run.output"), key)
    channel.say("done")


def write(channel: Channel, url: str, name: str, text: str) -> None:
    """Write a small file to a URL."""
    Location.of(url, "run.output").write_text(name, text)
    channel.say("done")


def read(channel: Channel, url: str, name: str) -> None:
    """Read a small file from a URL, and list two of the files in its folder."""
    location = Location.of(url, "run.output")
    items = location.without_odd(lambda *_: None).items() if location.exists() else ()
    names = [item.path for item in islice((i for i in items if not i.is_folder), 2)]
    channel.say("done", text=location.read_text(name), names=names)


def exits(channel: Channel, folder: str) -> None:
    """Read the exit records of the round of an attempt that all of its ranks finished."""
    channel.say("done", records=finished_round(Path(folder)))


def remove(channel: Channel, folder: str) -> None:
    """Delete a folder of the volume."""
    if Path(folder).exists():
        disk.remove(folder, channel.tick)
    channel.say("done")


def trim(channel: Channel, folder: str, within: str) -> None:
    """Delete everything in a folder except a run's outputs and checkpoints; answer which of these have files.

    Args:
        channel: The other end.
        folder: The run's folder.
        within: The folder to clear: the run's, or one around it that belongs to the run alone.
    """
    run = Path(folder)
    candidates = [run / "checkpoints", *sorted(run.glob("attempts/*/output"))]
    results = [
        path for path in candidates if any(each.is_symlink() or not each.is_dir() for each in path.rglob("*"))
    ]
    _delete_others(Path(within), results, channel.tick)
    channel.say("done", results=[path.relative_to(run).as_posix() for path in results])


def _delete_others(folder: Path, kept: list[Path], tick: Callable[[], None]) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path in kept:
            continue
        if any(each.is_relative_to(path) for each in kept):
            _delete_others(path, kept, tick)
        else:
            disk.remove(str(path), tick) if path.is_dir() and not path.is_symlink() else path.unlink()


COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "receive": receive,
    "send": send,
    "fetch": fetch,
    "publish": publish,
    "claim": claim,
    "release": release,
    "write": write,
    "read": read,
    "exits": exits,
    "remove": remove,
    "trim": trim,
}


def _lock(channel: Channel) -> Lock:
    """Lock with leases that are renewed during the work; waiting for the other end counts as work."""
    return partial(leased, alive=lambda: channel.works, tick=channel.tick)


def _progress(channel: Channel) -> Progress:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        channel.tick()
        if time.monotonic() - last > _PROGRESS_INTERVAL_S:
            last = time.monotonic()
            channel.say("progress", done=done, total=total)

    return report


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and error.filename:
        return f"{error.filename}: {error.strerror or os.strerror(error.errno)}"
    return str(error) or type(error).__name__


def _reason(error: Exception) -> str:
    if isinstance(error, transfer.TransferError):
        return "changed"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    if isinstance(error, PermissionError):
        return "forbidden"
    return "other"
