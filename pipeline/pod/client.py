"""Requests that the worker sends to a helper pod."""

from pathlib import Path
from typing import Any

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.listing import Item
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod.channel import (
    Channel,
    Incoming,
    Message,
    receive_rows,
    receive_starts,
    send_files,
    send_rows,
)
from manycpu.pipeline.transfer import File, Manifest, Progress


def push(channel: Channel, source: Location, folder: str) -> Message:
    """Send a folder to the volume; returns a message with its ``path``, and whether it existed (``reused``).

    Raises:
        TransferError: The source changed.
        RemoteError: The pod could not write it.
        LostError: The pod is gone: try another.
    """
    items = source.items(channel.tick)
    send_rows(channel, "request", items, folder=folder)
    # alike: the volume has a copy with the same list of files, and asks for the digest; have: how many bytes
    # of each file it has.
    answer = channel.receive_message("alike", "have", "done")
    if answer["kind"] == "alike":
        channel.send_message("digest", sha256=transfer.scan(source, channel.tick).digest)
        answer = channel.receive_message("have", "done")
    if answer["kind"] == "have":
        send_files(channel, transfer.Hashing(source, channel.tick), items, receive_starts(channel, answer))
        answer = channel.receive_message("done")
    return answer


def pull(channel: Channel, source: str, destination: Path, key: str, progress: Progress) -> Manifest:
    """Copy a folder of the volume to a folder on this machine's disk, which appears in one step.

    ``key`` is the run's: only an earlier export of this run is replaced. Returns the manifest of the copy. If
    the folder has no file, the manifest is empty, and nothing is written.

    Raises:
        TransferError: A file reads back differently than the pod read it.
        RemoteError: The pod could not read it, or it changed meanwhile.
        LostError: The pod is gone: try another.
        OSError: The destination cannot be written.
    """
    channel.send_message("request", source=source)
    items = receive_rows(channel, channel.receive_message("files"), Item)
    if all(item.is_folder for item in items):
        return Manifest()
    return transfer.save(Incoming(channel, items), destination, key, progress, channel.tick)


def publish(channel: Channel, **request: str) -> Manifest:
    """Let the pod copy a folder of the volume to a URL; returns the manifest of the copy.

    ``request`` has the fields of the command ``publish``: ``source``, ``url`` and ``key``.

    Raises:
        RemoteError: The pod failed.
        LostError: The pod is gone: try another.
    """
    return Manifest(receive_rows(channel, ask(channel, **request), File))


def ask(channel: Channel, **request: Any) -> Message:
    """Send a request without file contents, and return the fields of the answer.

    Raises:
        RemoteError: The pod failed.
        LostError: The pod is gone: try another.
    """
    channel.send_message("request", **request)
    return channel.receive_message("done")
