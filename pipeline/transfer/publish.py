"""Export a folder to a path or URL: read back what was written, and write the manifest last."""

import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import Item
from manycpu.pipeline.adapters.storage import Location, is_remote
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.output import OUTDATED, REPORT, manifest_name, program_report_name, run_of
from manycpu.pipeline.transfer.claims import claimed
from manycpu.pipeline.transfer.destination import changed, earlier, put, refuse_if_any, signed, strangers
from manycpu.pipeline.transfer.manifest import File, Hashing, Manifest, Progress, Tick, TransferError, scan
from manycpu.pipeline.transfer.partial import (
    Source,
    TakenOverError,
    broken_copies,
    copy,
    delete_broken_copies,
)

log = logging.getLogger(__name__)


def written(folder: str) -> Location:
    """Open a program's output; files that cannot be copied, such as a FIFO, are skipped and logged."""
    return Location.of(folder, field="run.output").without_odd(
        left_out=lambda path, why: log.warning("%r in the output %s: it is left out of the model", path, why)
    )


def publish(
    source: Path,
    destination: Location,
    key: str,
    progress: Progress = lambda *_: None,
    tick: Tick = lambda: None,
) -> Manifest:
    """Copy a folder on disk to a path or URL, read it back, and put the manifest beside it last.

    ``key`` is the key of the run's claim.

    On disk the folder appears in one step. Object stores have no rename: there, a folder without its manifest
    is incomplete. A broken upload resumes after the last complete file.

    Raises:
        TransferError: A file reads back differently, or the destination holds files of others.
        ClaimedError: Another run has the destination.
    """
    origin = written(str(source))
    if destination.is_file():
        raise TransferError(f"{redacted(destination.url)} has become a file, and no folder")
    if destination.local is not None:
        return save(Hashing(origin, tick), destination.local, key, progress, tick)
    with claimed(destination, key) as holding:
        key = run_of(key)
        manifest = scan(origin, tick)
        files = [file for file in manifest.files if not file.path.endswith("/")]  # no empty folders in URLs
        # The names of objects are UTF-8, those of files on disk any bytes.
        escaped = Manifest(file._replace(path=_utf8_path(file.path)) for file in files)
        top_names = _top_names(escaped)
        published = _with_report_renamed(escaped, program_report_name(top_names))
        _delete_outdated(destination, published, key, tick)
        destination.delete_broken_uploads({file.path for file in published.files})
        bytes_done = 0
        for file, target in zip(files, published.files, strict=True):
            holding.check()
            _upload(origin, destination, file, target, tick)
            bytes_done += file.size
            progress(bytes_done, published.size)
        holding.check_others()
        destination.write_text(manifest_name(top_names), signed(published, key))
    return published


def save(
    source: Source,
    destination: Path,
    key: str,
    progress: Progress = lambda *_: None,
    tick: Tick = lambda: None,
) -> Manifest:
    """Copy a source to a folder on disk that appears in one step, with its manifest.

    Args:
        source: What to copy; the copy is read back and compared with it.
        destination: Its folder; only an earlier export of this run is replaced.
        key: The key of the run's claim. Its part that is the run's key names a broken copy, which is resumed.
        progress: Called with bytes done and bytes in all.
        tick: Called during the work, also while no bytes are copied.

    Raises:
        TransferError: A file changed while it was copied, or reads back differently; or the destination holds
            files that the run did not write.
        TakenOverError: Another export of the same run has taken the copy over.
        ClaimedError: Another run has the destination.
    """
    destination = destination.resolve()  # the target of a link: the link itself is the user's
    with claimed(Location.of(str(destination), field="run.output"), key) as holding:
        key = run_of(key)
        stem = _stem(destination, key)
        stem.parent.mkdir(parents=True, exist_ok=True)
        # Before the long copy, and again after it (`put`).
        refuse_if_any(strangers(Location.of(str(destination), field="run.output"), key))
        partial, manifest = copy(source, stem, progress, tick)
        manifest = _complete(partial, manifest, key)
        try:
            holding.check_others()
            put(partial, destination, key)
        except TransferError:
            # The next try may have another output, and would not delete the copy.
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return manifest


def discard_exports(outputs: Iterable[str], key: str) -> None:
    """Delete the broken copies that a run's exports left beside outputs on disk; log those that stay.

    ``outputs`` are paths and URLs; URLs are skipped.
    """
    for output in outputs:
        with suppress(OSError):  # there is no such folder, or this user may not read it
            folder = None if is_remote(output) else Location.of(output, field="run.output").local
            if folder is None:
                continue
            stem = _stem(folder.resolve(), key)
            delete_broken_copies(stem)
            for broken in broken_copies(stem):
                log.warning("%s, of an export that broke off, cannot be deleted", broken)


def _stem(destination: Path, key: str) -> Path:
    """Return the path with which the names of a run's unfinished copies to ``destination`` begin."""
    return destination.with_name(f".{destination.name}.{key}")


def _utf8_path(path: str) -> str:
    r"""Return a path in which each byte that is no UTF-8 is escaped, as in ``\xff``."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _complete(partial: Path, manifest: Manifest, key: str) -> Manifest:
    """Write the manifest into a copy, and rename a report.json of the program; return the manifest.

    Raises:
        TakenOverError: Another export of this run has adopted the copy.
    """
    top_names = _top_names(manifest)
    try:
        if REPORT in top_names:
            name = program_report_name(top_names)
            (partial / REPORT).rename(partial / name)
            manifest = _with_report_renamed(manifest, name)
        with (partial / manifest_name(top_names)).open("w") as file:
            file.writelines(manifest.lines(run=key))
        disk.sync(partial)
    except FileNotFoundError as error:
        raise TakenOverError("another export of this run has taken this copy over") from error
    return manifest


def _top_names(manifest: Manifest) -> set[str]:
    """Return the names of the files and folders directly in the root folder."""
    return {file.path.split("/", 1)[0] for file in manifest.files}


def _with_report_renamed(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest with the program's report.json renamed to ``name``, and log a warning.

    The run needs the name report.json. A manifest without such a file is returned unchanged.
    """
    if REPORT not in _top_names(manifest):
        return manifest
    log.warning("the program wrote a %s of its own: it is kept as %s", REPORT, name)

    def renamed(path: str) -> str:
        top, slash, rest = path.partition("/")
        return f"{name}{slash}{rest}" if top == REPORT else path

    return Manifest(file._replace(path=renamed(file.path)) for file in manifest.files)


def _delete_outdated(destination: Location, manifest: Manifest, key: str, tick: Tick) -> None:
    """Delete files of an earlier export that this one does not contain.

    Before the first file is deleted, the earlier manifest gets the name ``OUTDATED``: only a complete folder
    may have a manifest of the usual name.

    Raises:
        TransferError: The destination holds files of others, or files that changed after the earlier export.
    """
    new_files = {(file.path, file.sha256) for file in manifest.files}
    # A file of this export may be there from a broken upload: _upload compares its content.
    refuse_if_any(set(strangers(destination, key)) - {path for path, _ in new_files})
    old_export = earlier(destination, key)
    refuse_if_any(changed(destination, old_export, tick))
    if old_export is None:
        return
    if old_export.name != OUTDATED:  # else an earlier try, which was killed, has renamed it
        destination.write_text(OUTDATED, signed(old_export.manifest, key))
        destination.remove(old_export.name)
    for file in old_export.manifest.files:
        if (file.path, file.sha256) not in new_files and destination.has(file.path):
            destination.remove(file.path)
    destination.remove(OUTDATED)


def _upload(origin: Location, destination: Location, file: File, target: File, tick: Tick) -> None:
    """Upload a file and read it back, unless a complete copy exists.

    Args:
        origin: The folder on disk.
        destination: The folder behind a URL.
        file: The file, with its path in ``origin``.
        target: The same file, with its path in ``destination``.
        tick: Called for each block.

    Raises:
        TransferError: It reads back differently, or another file is at its path.
    """
    if _is_uploaded(origin, destination, file, target, tick):
        return
    for new in (True, False):  # new: the storage refuses to replace a file
        try:
            with origin.open(file.path) as reader, destination.writing(target.path, new=new) as writer:
                while block := reader.read(1 << 20):
                    writer.write(block)
                    tick()
            break
        except FileExistsError:
            # Written meanwhile: by this upload, whose answer was lost, or by the same run on another machine.
            if _is_uploaded(origin, destination, file, target, tick):
                return
            # Else only a deleted version exists, which some servers count (versitygw 1.8): replace it.
    sha256 = destination.sha256(_item(target), tick)
    if sha256 != file.sha256:
        raise TransferError(f"{file.path} reads back as sha256 {sha256}, written was {file.sha256}")


def _is_uploaded(origin: Location, destination: Location, file: File, target: File, tick: Tick) -> bool:
    """Whether a complete copy of a file exists; False also if a broken upload of this run left a part of it.

    Raises:
        TransferError: Another file exists there: neither this file nor a first part of it.
    """
    destination.fs.invalidate_cache()  # a cached list would lack new files
    if not destination.has(target.path):
        return False
    size, sha256 = destination.hashed(_item(target), tick=tick)
    if (size, sha256) == (file.size, file.sha256):
        return True
    # In a bucket a broken upload leaves no part of a file: what exists is another file.
    if destination.in_bucket or origin.hashed(_item(file), size, tick) != (size, sha256):
        refuse_if_any([target.path])  # raises, as there is one
    return False


def _item(file: File) -> Item:
    return Item(file.path, file.size, version="", executable=file.executable)
