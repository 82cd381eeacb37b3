"""Copy a source to a folder on disk that appears complete or not at all."""

import glob
import logging
import os
import re
import shutil
import stat
import uuid
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
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
    json_lines,
    read_lines,
    verify,
)
from manycpu.pipeline.transfer.partial import Source, TakenOverError, copy, delete_broken_copies

Lock = Callable[[Path], AbstractContextManager[int | None]]
"""Holds a lock on a path during a ``with`` block.

Yields a descriptor by which the holder shows that it works (:func:`signs`); None: a thread does so.
"""
log = logging.getLogger(__name__)
_MARKER: Final = ".manifest.json"
_DIGEST: Final = f"[0-9a-f]{{{DIGITS}}}"
_NAME_OF_COPY: Final = re.compile(rf"({_DIGEST}(?:-\d+)?)(\.partial)?")
"""Matches the name of a copy, and of a broken copy of 0.1.0; group 1 is the name of the whole copy."""
_NAME_BESIDE_COPY: Final = re.compile(
    rf"{_DIGEST}(-\d+)?\.({_DIGEST}\.[0-9a-f]+\.partial|manifest\.json|manifest\.([0-9a-f]+\.)?partial)"
)
"""Matches the name of a broken copy, and of a marker: no other program gives such names."""
_ABANDONED_S: Final = 86_400.0
_NO_VALID_MARKER: Final = FileNotFoundError, IsADirectoryError, ValueError
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
    """List files in a fetched folder that :func:`fetch` did not write, except bytecode (``__pycache__``).

    Empty also if the folder is not complete: then nothing says what was fetched.

    Args:
        destination: The fetched folder.
        copy: A copy of the fetched folder. If it is given, the parent of the copy is searched instead, as a
            program may write there too. None: the fetched folder itself is searched.
    """
    manifest = staged(destination)
    if manifest is None:
        return []
    folder, prefix = destination, ""
    if copy:
        folder, prefix = copy.parent, f"{copy.name}/"
    fetched = {prefix + file.path for file in manifest.files}
    # Links, and what is no file, are skipped.
    paths = [item.path for item in below(str(folder), left_out=lambda *_: None, follow=False)]
    return [folder / path for path in paths if path not in fetched and "__pycache__" not in path]


def staged(destination: Path) -> Manifest | None:
    """Read the manifest of a folder that :func:`fetch` completed; None: it is not complete."""
    try:
        return Manifest.read(_marker(destination))
    except _NO_VALID_MARKER:
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
        in_use: Returns whether a training uses the existing copy; then a changed copy is not replaced.
        is_same: Called with the manifest of a new copy; returns whether it is the intended version. If files
            of the source are replaced during the copy, it may be a mixture of two versions.

    Raises:
        InUseError: The existing copy has changed, and is in use.
        TransferError: A file changed while it was copied, or ``is_same`` returned False.
        TakenOverError: Another process took the copy over.
        OSError: The disk is full, or the source cannot be read.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with lock(_lock_path(destination)) as descriptor:
        progress, tick = _with_signs_of_life(descriptor, progress, tick)
        _delete_abandoned(destination, tick)
        existing = _verified(destination, tick, in_use)
        if existing is not None:
            return Stored(destination, existing, reused=True)
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

    The copy itself hashes the source, so that a new source is read only once. The source is hashed before
    only if a copy with the same paths and sizes exists: if the digests are equal, nothing is copied.

    Args:
        source: What to copy.
        folder: The parent of such folders.
        digest: Computes the source's digest, which reads all of it.
        progress: Called with bytes done and bytes in all.
        lock: Keeps other callers from the same copy: ``leased`` if they may be on other machines.
        tick: Called during the work, also while no bytes are copied.

    Raises:
        TransferError: A file changed while it was copied.
        TakenOverError: Another process took the copy over.
        OSError: The disk is full, or the source cannot be read.
    """
    items = source.items()
    # The digest of the content is unknown before the copy, so copies of the same list of files share a lock.
    stem = folder / items.digest[:DIGITS]

    def lock_unless_held(path: Path) -> AbstractContextManager[int | None]:
        # Without any file, stem and destination are both the digest of nothing: its lock is held already.
        return lock(_lock_path(path)) if path != stem else nullcontext()

    folder.mkdir(parents=True, exist_ok=True)
    with lock(_lock_path(stem)) as descriptor:
        progress, tick = _with_signs_of_life(descriptor, progress, tick)
        _delete_abandoned(stem, tick)
        markers = [marker for marker in folder.glob(f"*{_MARKER}") if _lists_same_files(marker, items)]
        expected = digest() if markers else ""
        for marker in markers:
            candidate = folder / marker.name.removesuffix(_MARKER)
            recorded = staged(candidate)
            if recorded is None or recorded.digest != expected:
                continue
            with lock_unless_held(candidate):  # this also takes away the lock that a killed process left
                existing = _verified(candidate, tick)
            if existing:
                return Stored(candidate, existing, reused=True)
        partial, manifest = copy(source, stem, progress, tick)
        destination = folder / manifest.digest[:DIGITS]
        with lock_unless_held(destination):
            existing = _verified(destination, tick)
            if existing:  # another process finished first, and its copy may be in use
                disk.remove(str(partial), tick)
                return Stored(destination, existing, reused=True)
            _complete(partial, destination, manifest, tick)
        return Stored(destination, manifest, reused=False)


def _with_signs_of_life(descriptor: int | None, progress: Progress, tick: Tick) -> tuple[Progress, Tick]:
    """Extend both callbacks: each call also shows other processes, which wait, that this one works.

    ``descriptor`` is what the lock yielded; None: a thread shows that already, and nothing is changed.
    """
    if descriptor is None:
        return progress, tick
    sign = signs(descriptor)

    def signing_progress(done: int, total: int) -> None:
        sign()
        progress(done, total)

    def signing_tick() -> None:
        sign()
        tick()

    return signing_progress, signing_tick


def _delete_abandoned(own: Path, tick: Tick) -> None:
    """Delete broken copies beside ``own`` that no process has worked on for a day.

    A copy stays broken if its source has changed: the copy of the new content has another name. The caller
    holds the lock of ``own``, whose file gives the present time by the clock of the disk.
    """
    _lock_path(own).touch()  # its time is now, by the clock of the disk
    digits = "[0-9a-f]" * DIGITS
    for broken in own.parent.glob(f"{digits}.{digits}.*.partial"):
        lock = _lock_path(own.with_name(broken.name[:DIGITS]))
        with suppress(OSError):  # such as one that another process adopts
            # The holder of the lock touches it as a sign of life.
            last_work = max(path.stat().st_mtime for path in (broken, lock) if path.exists())
            a_day_ago = _lock_path(own).stat().st_mtime - _ABANDONED_S
            # Writing a large file changes the time of that file, and not of its folder.
            if last_work < a_day_ago and all(path.lstat().st_mtime < a_day_ago for path in broken.rglob("*")):
                disk.remove(str(broken), tick)


def _lists_same_files(marker: Path, items: Rows[Item]) -> bool:
    """Whether the marker of a complete folder lists exactly these paths, sizes and executable flags."""
    listed = ((item.path, item.size, item.executable) for item in items)
    try:
        marked = ((file.path, file.size, file.executable) for file in map(file_of, read_lines(marker)))
        return all(item_row == marker_row for item_row, marker_row in zip_longest(listed, marked))
    except _NO_VALID_MARKER:
        return False


def _verified(destination: Path, tick: Tick, in_use: Callable[[], bool] = lambda: False) -> Manifest | None:
    """Return the manifest of a folder if the folder is complete and unchanged; else None.

    Files that the manifest does not list are deleted. If a listed file is missing or changed, the marker is
    deleted, so that the caller copies the folder again.

    Raises:
        InUseError: The folder has changed, and ``in_use()`` is true: then nothing is deleted.
    """
    manifest = staged(destination)
    if manifest is None or not destination.is_dir():
        return None
    recorded: Iterator[Any] = (fields.get("mtime_ns") for fields in read_lines(_marker(destination)))
    try:
        mtimes_ns: array[int] | None = array("q", recorded)
    except TypeError:  # the marker of an earlier version has no times
        mtimes_ns = None
    # At first without deleting anything, as a training may use the folder.
    verdict = verify(destination, manifest, mtimes_ns, tick, keep_unlisted=True)
    if verdict.fault and in_use():
        log.warning("%s is in use, and not what was staged: %s", destination, verdict.fault)
        raise InUseError(f"{destination} is in use, and not what was staged: {verdict.fault}")
    if verdict.fault:  # unlisted files alone are no reason to copy again: delete them
        verdict = verify(destination, manifest, mtimes_ns, tick)
    if verdict.fault:
        log.warning("%s is not what was staged (%s): it is staged again", destination, verdict.fault)
        _marker(destination).unlink(missing_ok=True)
        return None
    if verdict.files_read:
        log.info("%s: %d files were written to, and are what was staged", destination, verdict.files_read)
        _write_marker(destination, manifest, tick)  # with the new times: they are not hashed again next time
    return manifest


def _complete(
    partial: Path, destination: Path, manifest: Manifest, tick: Tick, *, read_only: bool = False
) -> None:
    """Rename a finished copy to its destination, and write the marker that makes it complete.

    If the destination exists, it has no valid marker, and is deleted.

    Raises:
        TakenOverError: Another process has adopted the partial copy.
    """
    disk.sync(partial)
    # A folder without its marker cannot be trusted: move it aside. Processes that read it find the new one.
    # Its name aside is that of a broken copy, which the next copy deletes if this process is killed.
    token = partial.suffixes[-2]  # with its dot
    aside = destination.with_name(f"{destination.name}.{'0' * DIGITS}{token}.partial")
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


def is_copy(path: Path) -> bool:
    """Whether :func:`fetch` or :func:`store` made a path: a copy named by a digest, or what belongs to one.

    To a copy belong its marker and its broken copies. A folder of another program may have the name of a
    digest too: a copy has a marker or a lock beside it.
    """
    match = _NAME_OF_COPY.fullmatch(path.name)
    if match is None:
        return _NAME_BESIDE_COPY.fullmatch(path.name) is not None
    copy = path.with_name(match[1])
    delivery_lock = copy.with_name(f".{copy.name}.delivery.lock")  # of a copy that came from another machine
    return any(sign.exists() for sign in (_marker(copy), _lock_path(copy), delivery_lock))


def discard(destination: Path, in_use: Callable[[], bool] = lambda: False) -> None:
    """Delete a fetched folder, and what broken copies of it left.

    Its marker is deleted first, so that half of the folder never looks complete.

    Args:
        destination: The folder.
        in_use: Returns whether a run may use the folder; then it stays. Called while the lock is held, so
            that no other process fetches the folder.
    """
    with locked(_lock_path(destination)):
        if in_use():
            return
        _marker(destination).unlink(missing_ok=True)
        shutil.rmtree(destination, ignore_errors=True)
        delete_broken_copies(destination)
        _lock_path(destination).unlink()


def _marker(destination: Path) -> Path:
    """Return the path of the file with a folder's manifest; it exists only if the folder is complete."""
    return destination.with_name(destination.name + _MARKER)


def _write_marker(destination: Path, manifest: Manifest, tick: Tick) -> None:
    """Write the manifest, with each file's modification time, beside a complete folder."""

    def fields_with_mtime() -> Iterator[dict[str, Any]]:
        for file in manifest.files:
            tick()
            mtime_ns = os.stat(f"{destination}/{file.path}").st_mtime_ns  # noqa: PTH116 - for speed
            yield file.json_fields() | {"mtime_ns": mtime_ns}

    marker = _marker(destination)
    # Processes that were killed while they wrote it have left partial files.
    for leftover in marker.parent.glob(f"{glob.escape(marker.stem)}.*.partial"):
        leftover.unlink(missing_ok=True)
    partial = marker.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    with partial.open("w") as file:
        file.writelines(json_lines(fields_with_mtime()))
    partial.replace(marker)


def _lock_path(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.lock")
