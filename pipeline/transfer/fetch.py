"""Bring a source to a folder on disk, which is there whole or not at all."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.lock import locked
from manycpu.pipeline.transfer.manifest import Manifest, Progress
from manycpu.pipeline.transfer.partial import Source, copy

__all__ = ["Lock", "discard", "fetch", "staged"]

Lock = Callable[[Path], AbstractContextManager[object]]


def staged(destination: Path) -> Manifest | None:
    """Read the manifest of a folder that :func:`fetch` completed; None where it did not."""
    try:
        return Manifest.model_validate_json(_marker(destination).read_text())
    except FileNotFoundError:
        return None


def fetch(
    source: Source, destination: Path, progress: Progress = lambda *_: None, lock: Lock = locked
) -> Manifest:
    """Copy a source to a folder on disk, which is there whole or not at all.

    A copy that broke is taken up where it stopped. Two who fetch the same at once share one copy.

    Args:
        source: What to copy.
        destination: Its folder; beside it stand the marker with its manifest and, meanwhile, ``.partial``.
        progress: Called with bytes done and bytes in all.
        lock: Keeps others from the same copy: ``leased`` where they may be on other machines.

    Raises:
        TransferError: A file changed while it was copied.
        OSError: The disk is full, or the source cannot be read.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with lock(_lock(destination)):
        complete = staged(destination)
        if complete is not None:
            return complete
        partial = _partial(destination)
        manifest = copy(source, partial, progress)
        if destination.exists():  # without its marker: whatever it is, it is not ours to trust
            shutil.rmtree(destination)
        disk.sync(partial)
        partial.rename(destination)
        _write_marker(destination, manifest)
        return manifest


def discard(destination: Path) -> None:
    """Delete what :func:`fetch` made, its marker first, so that half of it never looks whole."""
    with locked(_lock(destination)):
        _marker(destination).unlink(missing_ok=True)
        shutil.rmtree(destination, ignore_errors=True)
        shutil.rmtree(_partial(destination), ignore_errors=True)
        _lock(destination).unlink()


def _partial(destination: Path) -> Path:
    return destination.with_name(destination.name + ".partial")


def _marker(destination: Path) -> Path:
    return destination.with_name(destination.name + ".manifest.json")


def _write_marker(destination: Path, manifest: Manifest) -> None:
    partial = _marker(destination).with_suffix(".partial")
    partial.write_text(manifest.model_dump_json())
    partial.replace(_marker(destination))


def _lock(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.lock")
