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

Lock = Callable[[Path], AbstractContextManager[int | None]]
"""Yields a descriptor for :func:`signs`; None: the lock gives its signs of life by itself."""
log = logging.getLogger(__name__)
_MARKER: Final = ".manifest.json"
_NO_MARKER: Final = (
    FileNotFoundError,
    IsADirectoryError,
    ValueError,
)  # errors of a missing or invalid marker
_WRITABLE: Final = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class InUseError(TransferError):
    """A folder has changed since it was copied, and is in use: it is not replaced."""


class Stored(NamedTuple):
    """A complete folder on disk."""

    path: Path
    manifest: Manifest
    reused: bool
    """Whether it existed before."""


def strays(destination: Path, copy: Path | None = None) -> list[Path]:
    """List files in a fetched folder that :func:`fetch` did not write, bytecode aside.

    Args:
        destination: The fetched folder.
        copy: A copy of it to search, together with the copy's parent; None: search the fetched folder.
    """
    manifest = staged(destination)
    if manifest is None:
        return []
    folder, prefix = (copy.parent, f"{copy.name}/") if copy else (destination, "")
    listed = {prefix + file.path for file in manifest.files}
    paths = [item.path for item in below(str(folder), lambda *_: None, follow=False)]
    return [folder / path for path in paths if path not in listed and "__pycache__" not in path]


def staged(destination: Path) -> Manifest | None:
    """Read the manifest of a folder that :func:`fetch` completed; None: it is not complete."""
    try:
        return Manifest(file_of(fields) for fields in read_lines(_marker(destination)))
    except _NO_MARKER:
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

    A copy that broke is resumed. Two callers that fetch the same at once share one copy. An existing copy is
    used while it is unchanged; else it is replaced.

    Args:
        source: What to copy.
        destination: Its folder; beside it are a marker with the manifest and, during the copy, ``.partial``.
        progress: Called with bytes done and bytes in all.
        lock: Keeps other callers from the same copy: ``leased`` if they may be on other machines.
        tick: Called during the work, also while no bytes are copied.
        read_only: Whether to remove the write permissions of its files.
        in_use: Whether a training uses the existing copy, and may have written to it.
        is_same: Whether a copy is of the intended version: if files are replaced meanwhile, it may have some
            of each version.

    Raises:
        InUseError: The existing copy has changed, and is in use.
        TransferError: A file changed while it was copied.
        TakenOverError: Another process took the copy over.
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

    The copy hashes the source. Hash the source first only if a copy with the same paths and sizes exists: so
    a new source is read once, and an existing one is not sent.

    Args:
        source: What to copy.
        folder: The parent of such folders.
        digest: Computes the source's digest, which reads all of it.
        progress: Called with bytes done and bytes in all.
        lock: As of :func:`fetch`.
        tick: As of :func:`fetch`.

    Raises:
        TransferError: A file changed while it was copied.
        TakenOverError: Another process took the copy over.
        OSError: The disk is full, or the source cannot be read.
    """
    items = source.items()
    listing = folder / items.digest[:DIGITS]
    folder.mkdir(parents=True, exist_ok=True)
    with lock(_lock(listing)) as held:
        progress, tick = _with_signs(held, progress, tick)
        markers = [marker for marker in folder.glob(f"*{_MARKER}") if _matches(marker, items)]
        if alike := [folder / marker.name.removesuffix(_MARKER) for marker in markers]:
            expected = digest()
            for candidate in alike:
                recorded = staged(candidate)
                if recorded is None or recorded.digest != expected:
                    continue
                if existing := _verified(candidate, tick):
                    return Stored(candidate, existing, reused=True)
        partial, manifest = copy(source, listing, progress, tick)
        destination = folder / manifest.digest[:DIGITS]
        with lock(_lock(destination)):
            # Another process finished first, and its copy may be in use.
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


def _matches(marker: Path, items: Rows[Item]) -> bool:
    """Whether a complete folder has these paths and sizes."""
    try:
        files = map(file_of, read_lines(marker))
        return all(
            item
            and file
            and (item.path, item.size, item.executable) == (file.path, file.size, file.executable)
            for item, file in zip_longest(items, files)
        )
    except _NO_MARKER:
        return False


def _verified(destination: Path, tick: Tick, in_use: Callable[[], bool] = lambda: False) -> Manifest | None:
    """Verify a complete folder and return its manifest; a folder that has changed loses its marker."""
    manifest = staged(destination)
    if manifest is None or not destination.is_dir():
        return None
    recorded: Iterator[Any] = (fields.get("mtime_ns") for fields in read_lines(_marker(destination)))
    try:
        times: array[int] | None = array("q", recorded)
    except TypeError:  # the marker of an earlier version has no times
        times = None
    verdict = verify(destination, manifest, times, tick, keep=True)
    if verdict.fault and in_use():
        log.warning("%s is in use, and not what was staged: %s", destination, verdict.fault)
        raise InUseError(f"{destination} is in use, and not what was staged: {verdict.fault}")
    if verdict.fault:
        verdict = verify(destination, manifest, times, tick)
    if verdict.fault:
        log.warning("%s is not what was staged (%s): it is staged again", destination, verdict.fault)
        _marker(destination).unlink(missing_ok=True)
        return None
    if verdict.read:
        log.info("%s: %d files were written to, and are what was staged", destination, verdict.read)
        _write_marker(destination, manifest, tick)
    return manifest


def _complete(
    partial: Path, destination: Path, manifest: Manifest, tick: Tick, *, read_only: bool = False
) -> None:
    """Rename a finished copy to its destination, and write the marker that makes it complete."""
    disk.sync(partial)
    # A folder without its marker cannot be trusted. Processes that still read it find the new one.
    aside = destination.with_name(f"{destination.name}.{'0' * DIGITS}{partial.suffixes[-2]}.partial")
    if destination.exists():
        destination.rename(aside)
    try:
        partial.rename(destination)
        if read_only:  # not before: a process that resumes a partial copy writes to it
            for file in manifest.files:
                if not file.path.endswith("/"):
                    path = f"{destination}/{file.path}"
                    os.chmod(path, os.stat(path).st_mode & ~_WRITABLE)  # noqa: PTH101, PTH116 - for speed
        _write_marker(destination, manifest, tick)
    except FileNotFoundError as error:
        raise TakenOverError("another process has taken this copy over") from error
    finally:
        with suppress(OSError):
            disk.remove(str(aside), tick)


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
    """Write the manifest, with each file's modification time, beside a complete folder."""

    def described() -> Iterator[dict[str, Any]]:
        for file in manifest.files:
            tick()
            written = os.stat(f"{destination}/{file.path}").st_mtime_ns  # noqa: PTH116 - for speed
            yield file.described() | {"mtime_ns": written}

    partial = _marker(destination).with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    with partial.open("w") as file:
        file.writelines(write_lines(described()))
    partial.replace(_marker(destination))


def _lock(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.lock")
