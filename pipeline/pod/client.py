"""What the worker asks a helper pod for."""

from pathlib import Path
from typing import Any

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod.channel import Channel, Message
from manycpu.pipeline.pod.stream import Incoming, items_of, pour
from manycpu.pipeline.transfer import Manifest, Progress

__all__ = ["ask", "pull", "push"]


def push(channel: Channel, source: Location, folder: str) -> Message:
    """Send a folder to the volume; the answer tells its ``path``, and whether it was there (``reused``).

    Raises:
        TransferError: The source changed.
        RemoteError: The pod could not write it.
        LostError: The pod is gone: ask another.
    """
    items = source.items()
    channel.say("request", folder=folder, files=items)
    said = channel.hear("alike", "have")
    if said["kind"] == "alike":
        channel.say("digest", sha256=transfer.scan(source).digest)
        said = channel.hear("have", "done")
    if said["kind"] == "have":
        pour(channel, transfer.Hashing(source), items, said)
        said = channel.hear("done")
    return said


def pull(channel: Channel, source: str, destination: Path, key: str, progress: Progress) -> Manifest:
    """Copy a folder of the volume to this machine's disk; see :func:`transfer.save`.

    Raises:
        TransferError: A file reads back otherwise than the pod read it.
        RemoteError: The pod could not read it, or it changed meanwhile.
        LostError: The pod is gone: ask another.
        OSError: The destination cannot be written.
    """
    channel.say("request", source=source)
    items = items_of(channel.hear("files"))
    if not items:
        return Manifest(files=())
    return transfer.save(Incoming(channel, items), destination, key, progress)


def ask(channel: Channel, **request: Any) -> Message:
    """Have the pod do something by itself, and wait for its answer.

    Raises:
        RemoteError: The pod could not do it.
        LostError: The pod is gone: ask another.
    """
    channel.say("request", **request)
    return channel.hear("done")
