"""What a helper pod can be asked to do; each function is given the fields of the request."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.lock import leased
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod.channel import Channel
from manycpu.pipeline.pod.stream import Incoming, items_of, pour, spelled
from manycpu.pipeline.transfer import Manifest, Progress

__all__ = ["COMMANDS", "answer"]

_TELL_EVERY: Final = 0.5  # seconds


def answer(channel: Channel, command: str) -> bool:
    """Do what the other end asks for; whether it could be done."""
    try:
        request = channel.hear("request")
        COMMANDS[command](channel, **{name: value for name, value in request.items() if name != "kind"})
    except ConnectionError:
        return False  # nobody is there to be told
    except Exception as error:  # noqa: BLE001 - every protocol of fsspec has errors of its own
        with suppress(ConnectionError):
            channel.say("error", text=_text(error), reason=_reason(error))
        return False
    return True


def receive(channel: Channel, folder: str, files: list[list[Any]]) -> None:
    """Take a folder from the other end, into one that is named by its content."""

    def digest() -> str:
        channel.say("alike")
        return str(channel.hear("digest")["sha256"])

    source = Incoming(channel, items_of({"files": files}))
    path, manifest, reused = transfer.store(source, Path(folder), digest, _progress(channel), leased)
    _done(channel, manifest, path=str(path), reused=reused)


def send(channel: Channel, source: str) -> None:
    """Give a folder to the other end."""
    location = Location.of(source, "run.output")
    items = location.items() if location.exists() else []
    channel.say("files", files=items)
    if items:
        pour(channel, transfer.Hashing(location), items, channel.hear("have"))


def fetch(channel: Channel, url: str, folder: str, field: str) -> None:
    """Copy a URL to a folder that is named by its content."""
    source = Location.of(url, field)
    destination = Path(folder) / transfer.identity(source)[: transfer.DIGITS]
    reused = transfer.staged(destination) is not None
    manifest = transfer.fetch(source, destination, _progress(channel), leased)
    path = destination / source.root.rsplit("/", 1)[-1] if source.is_file() else destination
    _done(channel, manifest, reused=reused, path=str(path))


def publish(channel: Channel, source: str, url: str, key: str) -> None:
    """Copy a folder to a URL."""
    if not Location.of(source, "run.output").exists():
        return _done(channel, Manifest(files=()))
    manifest = transfer.publish(Path(source), Location.of(url, "run.output"), key, _progress(channel))
    return _done(channel, manifest)


def write(channel: Channel, url: str, name: str, text: str) -> None:
    """Write a small file to a URL."""
    Location.of(url, "run.output").write_text(name, text)
    channel.say("done")


def read(channel: Channel, url: str, name: str) -> None:
    """Read a small file from a URL, and name two of the files that are there."""
    location = Location.of(url, "run.output")
    names = [item.path for item in location.items()[:2]] if location.exists() else []
    channel.say("done", text=location.read_text(name), names=names)


def remove(channel: Channel, folder: str) -> None:
    """Delete a folder of the volume."""
    if Path(folder).exists():
        shutil.rmtree(folder)
    channel.say("done")


COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "receive": receive,
    "send": send,
    "fetch": fetch,
    "publish": publish,
    "write": write,
    "read": read,
    "remove": remove,
}


def _done(channel: Channel, manifest: Manifest, **fields: Any) -> None:
    channel.say("done", sha256=manifest.digest, files=spelled(manifest), **fields)


def _progress(channel: Channel) -> Progress:
    said = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > _TELL_EVERY:
            said = time.monotonic()
            channel.say("progress", done=done, total=total)

    return tell


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
