"""Copy a source to a folder on disk that appears complete or not at all."""

import logging
import os
import shutil
import stat
import uuid
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import Item, Rows, below
from manycpu.pipeline.adapters.lock import locked, signs
from manycpu.pipeline.transfer.manifest import (
    DIGITS,
    Manifest,
    Progress,
    Tick,
    TransferError,
    file_of,
    read_lines,
    verify,
    write_lines,
)
from manycpu.pipeline.transfer.partial import Source, TakenOverError, copy, drop

__all__ = ["InUseError", "Lock", "Stored", "discard", "fetch", "staged", "store", "strays"]

Lock = Callable[[Path], AbstractContextManager[int | None]]
"""Yields a descriptor for :func:`signs`; None where the lock gives its signs of life by itself."""
log = logging.getLogger(__name__)
_MARKER: Final = ".manifest.json"
_NOT_WHOLE: Final = (FileNotFoundError, IsADirectoryError, ValueError)  # such a marker counts for nothing
_WRITABLE: Final = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class InUseError(TransferError):
    """A folder has changed since it was copied, and is in use: it is left as it is."""


class Stored(NamedTuple):
    """A complete folder on disk."""

    path: Path
    manifest: Manifest
    reused: bool
    """Whether it was there before."""


def strays(destination: Path, copy: Path | None = None) -> list[Path]:
    """List files in a fetched folder that :func:`fetch` did not write, bytecode aside.

    Args:
        destination: The fetched folder.
        copy: A copy of it to look into, and around it in its parent; None: the fetched folder itself.
    """
    manifest = staged(destination)
    if manifest is None:
        return []
    folder, prefix = (copy.parent, f"{copy.name}/") if copy else (destination, "")
    listed = {prefix + file.path for file in manifest.files}
    paths = [item.path for item in below(str(folder), lambda *_: None, follow=False)]
    return [folder / path for path in paths if path not in listed and "__pycache__" not in path]


def staged(destination: Path) -> Manifest | None:
    """Read the manifest of a folder that :func:`fetch` completed; None where it is not complete."""
    try:
        return Manifest(file_of(fields) for fields in read_lines(_marker(destination)))
    except _NOT_WHOLE:
        return None


def fetch(  # noqa: PLR0913 - the last ones are seldom given
    source: Source,
    destination: Path,
    progress: Progress = lambda *_: None,
    lock: Lock = locked,
    *,
    tick: Tick = lambda: None,
    read_only: bool = False,
    in_use: Callable[[], bool] = lambda: False,
    is_same: Callable[[Manifest], bool] = lambda _: True,
) -> Stored:
    """Copy a source to a folder on disk that appears complete or not at all.

    A copy that broke is taken up where it stopped. Two who fetch the same at once share one copy. One that is
    there is used as long as it is what was copied; else it is copied anew.

    Args:
        source: What to copy.
        destination: Its folder; beside it stand the marker with its manifest and, meanwhile, ``.partial``.
        progress: Called with bytes done and bytes in all.
        lock: Keeps others from the same copy: ``leased`` where they may be on other machines.
        tick: Called while the work goes on, also where no bytes are copied.
        read_only: Whether its files have no permission to be written to.
        in_use: Tells whether somebody works with what is there, and may have written to it.
        is_same: Tells of a copy whether it is of what was meant: of files that are replaced meanwhile it may
            have some of each version.

    Raises:
        InUseError: What is there is not what was copied, and is in use.
        TransferError: A file changed while it was copied.
        TakenOverError: Somebody else took the copy over.
        OSError: The disk is full, or the source cannot be read.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with lock(_lock(destination)) as held:
        progress, tick = _with_signs(held, progress, tick)
        if (complete := _verified(destination, tick, in_use)) is not None:
            return Stored(destination, complete, reused=True)
        partial, manifest = copy(source, destination, progress, tick)
        if not is_same(manifest):
            disk.remove(str(partial), tick)
            raise TransferError("it changed while it was copied")
        _complete(partial, destination, manifest, tick, read_only=read_only)
        return Stored(destination, manifest, reused=False)


def store(  # noqa: PLR0913 - the last two are seldom given
    source: Source,
    folder: Path,
    digest: Callable[[], str],
    progress: Progress = lambda *_: None,
    lock: Lock = locked,
    *,
    tick: Tick = lambda: None,
) -> Stored:
    """Copy a source to a folder named by its content, unless that folder exists.

    The content is known once it is copied. Only where a folder with the same paths and sizes is there, the
    source's digest is asked for before that: so what is new is read once, and what is there is not sent.

    Args:
        source: What to copy.
        folder: Where such folders are.
        digest: Tells the source's digest, for which all of it has to be read.
        progress: Called with bytes done and bytes in all.
        lock: As of :func:`fetch`.
        tick: As of :func:`fetch`.

    Raises:
        TransferError: A file changed while it was copied.
        TakenOverError: Somebody else took the copy over.
        OSError: The disk is full, or the source cannot be read.
    """
    items = source.items()
    listing = folder / items.digest[:DIGITS]
    folder.mkdir(parents=True, exist_ok=True)
    with lock(_lock(listing)) as held:
        progress, tick = _with_signs(held, progress, tick)
        if alike := list(_same_listing(folder, items)):
            expected = digest()
            for candidate in alike:
                if _digest(candidate) == expected and (existing := _verified(candidate, tick)):
                    return Stored(candidate, existing, reused=True)
        partial, manifest = copy(source, listing, progress, tick)
        destination = folder / manifest.digest[:DIGITS]
        with lock(_lock(destination)):
            # Somebody else's was ready first, and may be read already.
            if existing := _verified(destination, tick):
                disk.remove(str(partial), tick)
                return Stored(destination, existing, reused=True)
            _complete(partial, destination, manifest, tick)
        return Stored(destination, manifest, reused=False)


def _with_signs(held: int | None, progress: Progress, tick: Tick) -> tuple[Progress, Tick]:
    """Give the lock a sign of life with every progress report and tick."""
    if held is None:
        return progress, tick
    sign = signs(held)

    def signing_progress(done: int, total: int) -> None:
        sign()
        progress(done, total)

    def signing_tick() -> None:
        sign()
        tick()

    return signing_progress, signing_tick


def _same_listing(folder: Path, items: Rows[Item]) -> Iterator[Path]:
    """Find complete folders with these paths and sizes."""
    for marker in folder.glob(f"*{_MARKER}"):
        if _matches(marker, items):
            yield folder / marker.name.removesuffix(_MARKER)


def _matches(marker: Path, items: Rows[Item]) -> bool:
    try:
        files = map(file_of, read_lines(marker))
        return all(
            item
            and file
            and (item.path, item.size, item.executable) == (file.path, file.size, file.executable)
            for item, file in zip_longest(items, files)
        )
    except _NOT_WHOLE:
        return False


def _digest(destination: Path) -> str:
    manifest = staged(destination)
    return manifest.digest if manifest else ""


def _verified(destination: Path, tick: Tick, in_use: Callable[[], bool] = lambda: False) -> Manifest | None:
    """Verify a complete folder and return its manifest; a folder that has changed loses its marker."""
    manifest = staged(destination)
    if manifest is None or not destination.is_dir():
        return None
    times = _modification_times(destination)
    verdict = verify(destination, manifest, times, tick, keep=True)
    if verdict.fault and in_use():
        log.warning("%s is in use, and not what was staged: %s", destination, verdict.fault)
        raise InUseError(f"{destination} is in use, and not what was staged: {verdict.fault}")
    if verdict.fault:
        verdict = verify(destination, manifest, times, tick)
    if verdict.fault:
        log.warning("%s is not what was staged (%s): it is staged anew", destination, verdict.fault)
        _marker(destination).unlink(missing_ok=True)
        return None
    if verdict.read:
        log.info("%s: %d files were written to, and are what was staged", destination, verdict.read)
        _write_marker(destination, manifest, tick)
    return manifest


def _modification_times(destination: Path) -> "array[int] | None":
    """Read the modification time of each file from the marker; None where the marker has none."""
    times: Iterator[Any] = (fields.get("mtime_ns") for fields in read_lines(_marker(destination)))
    try:
        return array("q", times)
    except TypeError:  # an earlier version's
        return None


def _complete(
    partial: Path, destination: Path, manifest: Manifest, tick: Tick, *, read_only: bool = False
) -> None:
    """Rename a finished copy to its destination, and write the marker that makes it complete."""
    disk.sync(partial)
    # Without its marker, whatever is there is not ours to trust. Who still reads it finds the new one.
    aside = destination.with_name(f"{destination.name}.{'0' * DIGITS}{partial.suffixes[-2]}.partial")
    if destination.exists():
        destination.rename(aside)
    try:
        partial.rename(destination)
        if read_only:  # not before: who takes up a partial copy has to write to it
            _protect(destination, manifest)
        _write_marker(destination, manifest, tick)
    except FileNotFoundError as error:
        raise TakenOverError("somebody else goes on with this copy") from error
    finally:
        with suppress(OSError):
            disk.remove(str(aside), tick)


def _protect(folder: Path, manifest: Manifest) -> None:
    for path in (f"{folder}/{file.path}" for file in manifest.files if not file.path.endswith("/")):
        os.chmod(path, os.stat(path).st_mode & ~_WRITABLE)  # noqa: PTH101, PTH116 - one for each of many


def discard(destination: Path) -> None:
    """Delete a fetched folder, its marker first, so that half of it never looks complete."""
    with locked(_lock(destination)):
        _marker(destination).unlink(missing_ok=True)
        shutil.rmtree(destination, ignore_errors=True)
        drop(destination)
        _lock(destination).unlink()


def _marker(destination: Path) -> Path:
    return destination.with_name(destination.name + _MARKER)


def _write_marker(destination: Path, manifest: Manifest, tick: Tick) -> None:
    partial = _marker(destination).with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    with partial.open("w") as file:
        file.writelines(write_lines(_with_times(destination, manifest, tick)))
    partial.replace(_marker(destination))


def _with_times(destination: Path, manifest: Manifest, tick: Tick) -> Iterator[dict[str, Any]]:
    """Add each file's modification time to its fields."""
    for file in manifest.files:
        tick()
        written = os.stat(f"{destination}/{file.path}").st_mtime_ns  # noqa: PTH116 - one for each of many
        yield file.described() | {"mtime_ns": written}


def _lock(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.lock")
