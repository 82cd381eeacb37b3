"""The program of a helper pod as a process of this machine, with the same streams as in a pod."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.folder_contents import location
from support.killable_programs import Program

from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import Channel
from manycpu.pipeline.transfer import Manifest

LARGE = 8 << 20
"""Bytes of the largest file of the fixture `source`."""


@contextmanager
def pod(command: str, code: str | None = None, **options: object) -> Iterator[tuple[Channel, Program[bytes]]]:
    """Start the program that an exec into a helper pod starts, or ``code``; yield its channel and process."""
    words = [sys.executable, *(("-c", code) if code else ("-m", "manycpu.pipeline.pod")), command]
    program: Program[bytes] = Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with program as process:
        assert process.stdin
        assert process.stdout
        try:
            with Channel(process.stdout, process.stdin, process.kill, **options) as channel:  # type: ignore[arg-type]
                yield channel, process
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # data on its way to an ended process is lost
                process.stdin.close()


def helper_here(mounted: str, volume: str) -> Callable[..., AbstractContextManager[Any]]:
    """Return a replacement of `helper` that runs a local process instead of a pod.

    In paths, the volume's mount ``mounted`` is replaced by the folder ``volume``.
    """

    @contextmanager
    def helper(*_: object, **__: object) -> Iterator[Any]:
        def ask(command: str, **request: str) -> dict[str, Any]:
            here = {name: value.replace(mounted, volume, 1) for name, value in request.items()}
            with pod(command) as (channel, _):
                return client.ask(channel, **here)

        yield SimpleNamespace(ask=ask)

    return helper


def push(source: Path, folder: Path) -> dict[str, Any]:
    with pod("receive") as (channel, _):
        return client.push(channel, location(source), str(folder))


def pull(source: Path, destination: Path) -> Manifest:
    with pod("send") as (channel, _):
        return client.pull(channel, str(source), destination, "key", lambda *_: None)
