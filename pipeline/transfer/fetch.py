"""Bring a source to a folder on disk, which is there whole or not at all."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.lock import locked
from manycpu.pipeline.adapters.storage import Item
from manycpu.pipeline.transfer.manifest import DIGITS, Manifest, Progress
from manycpu.pipeline.transfer.partial import Source, copy

__all__ = ["Lock", "Stored", "discard", "fetch", "staged", "store"]

Lock = Callable[[Path], AbstractContextManager[object]]
_MARKER: Final = ".manifest.json"


class Stored(NamedTuple):
    """A complete folder on disk."""

    path: Path
    manifest: Manifest
    reused: bool
    """Whether it was there before."""


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
        _complete(partial, destination, manifest)
        return manifest


def store(
    source: Source,
    folder: Path,
    digest: Callable[[], str],
    progress: Progress = lambda *_: None,
    lock: Lock = locked,
) -> Stored:
    """Copy a source to a folder that is named by its content, unless that is there.

    The content is known once it is copied. Only where a folder with the same paths and sizes is there, the
    source's digest is asked for before that: so what is new is read once, and what is there is not sent.

    Args:
        source: What to copy.
        folder: Where such folders are.
        digest: Tells the source's digest, for which all of it has to be read.
        progress: Called with bytes done and bytes in all.
        lock: As of :func:`fetch`.

    Raises:
        TransferError: A file changed while it was copied.
        OSError: The disk is full, or the source cannot be read.
    """
    items = source.items()
    listing = folder / hashlib.sha256(json.dumps(items).encode()).hexdigest()[:DIGITS]
    partial = _partial(listing)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(_lock(listing)):
        if alike := list(_alike(folder, items)):
            wanted = digest()
            if same := next((found for found in alike if found.manifest.digest == wanted), None):
                return same
        manifest = copy(source, partial, progress)
        destination = folder / manifest.digest[:DIGITS]
        with lock(_lock(destination)):
            if there := staged(destination):  # somebody else's was ready first, and may be read already
                shutil.rmtree(partial)
                return Stored(destination, there, reused=True)
            _complete(partial, destination, manifest)
        return Stored(destination, manifest, reused=False)


def _alike(folder: Path, items: list[Item]) -> Iterator[Stored]:
    """Find complete folders with these paths and sizes."""
    wanted = sorted((item.path, item.size) for item in items)
    for marker in folder.glob(f"*{_MARKER}"):
        place = folder / marker.name.removesuffix(_MARKER)
        manifest = staged(place)
        if manifest and sorted((file.path, file.size) for file in manifest.files) == wanted:
            yield Stored(place, manifest, reused=True)


def _complete(partial: Path, destination: Path, manifest: Manifest) -> None:
    """Have a copy appear in one step: beside its marker it is whole."""
    if destination.exists():  # without its marker: whatever it is, it is not ours to trust
        shutil.rmtree(destination)
    disk.sync(partial)
    partial.rename(destination)
    _write_marker(destination, manifest)


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
    return destination.with_name(destination.name + _MARKER)


def _write_marker(destination: Path, manifest: Manifest) -> None:
    partial = _marker(destination).with_suffix(".partial")
    partial.write_text(manifest.model_dump_json())
    partial.replace(_marker(destination))


def _lock(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.lock")
