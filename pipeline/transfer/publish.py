"""Bring a folder to its readers: what was read back is what was written, and the manifest comes last."""

import shutil
from pathlib import Path

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.transfer.destination import changed, earlier, put, refuse, strangers, written
from manycpu.pipeline.transfer.hashing import Hashing
from manycpu.pipeline.transfer.manifest import MANIFEST, File, Manifest, Progress, TransferError, scan
from manycpu.pipeline.transfer.partial import Source, copy

__all__ = ["publish", "save"]


def publish(source: Path, destination: Location, key: str, progress: Progress = lambda *_: None) -> Manifest:
    """Copy a folder on disk to a path or URL, read it back, and put the manifest beside it last.

    On disk the folder appears in one step. Object stores have no rename: there, a folder without
    ``manifest.json`` is incomplete. A publication that broke goes on after the last file that was whole.

    Raises:
        TransferError: What was read back is not what was written, or the destination holds what the run did
            not write.
    """
    origin = Location.of(str(source), "run.output")
    if destination.local is not None:
        return save(Hashing(origin), destination.local, key, progress)
    manifest = scan(origin)
    _upload_all(origin, destination, manifest, key, progress)
    return manifest


def save(source: Source, destination: Path, key: str, progress: Progress = lambda *_: None) -> Manifest:
    """Copy a source to a folder on disk, and have it appear in one step with its manifest.

    Args:
        source: What to copy; what is read back is compared with what it tells.
        destination: Its folder; an earlier export of this run is replaced, and nothing else.
        key: The run's key: a copy of this run that broke is taken up where it stopped.
        progress: Called with bytes done and bytes in all.

    Raises:
        TransferError: A file changed while it was copied, or reads back otherwise; or the destination holds
            what the run did not write.
    """
    destination = destination.resolve()  # where a link leads: the link itself is the user's
    partial = destination.with_name(f".{destination.name}.{key}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    manifest = copy(source, partial, progress)
    (partial / MANIFEST).write_text(written(manifest, key))
    disk.sync(partial)
    put(partial, destination, key)
    return manifest


def _upload_all(
    origin: Location, destination: Location, manifest: Manifest, key: str, progress: Progress
) -> None:
    unknown = set(strangers(destination, key))
    refuse(unknown - {file.path for file in manifest.files})
    before = earlier(destination, key)
    old = {file.path: file for file in before.files if destination.has(file.path)} if before else {}
    refuse(changed(destination, old.values()))
    if before:  # incomplete until the new manifest stands there
        destination.remove(MANIFEST)
    for path in old.keys() - {file.path for file in manifest.files}:
        destination.remove(path)
    done = 0
    for file in manifest.files:
        if file != old.get(file.path) and not _is_there(origin, destination, file, set(old)):
            _upload(origin, destination, file)
        done += file.size
        progress(done, manifest.size)
    destination.write_text(MANIFEST, written(manifest, key))


def _is_there(origin: Location, destination: Location, file: File, mine: set[str]) -> bool:
    """Whether a file is there whole; of this run's too is the beginning of it, from an upload that broke.

    Raises:
        TransferError: There is another file of that name.
    """
    destination.fs.invalidate_cache()
    if file.path in mine or not destination.has(file.path):
        return False
    size, digest = destination.hashed(file.path)
    if (size, digest) != (file.size, file.sha256) and origin.hashed(file.path, size) != (size, digest):
        refuse([file.path])
    return size == file.size


def _upload(origin: Location, destination: Location, file: File) -> None:
    destination.fs.makedirs(f"{destination.root}/{file.path}".rsplit("/", 1)[0], exist_ok=True)
    with origin.open(file.path) as read, destination.open(file.path, "wb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
    seen = destination.sha256(file.path)
    if seen != file.sha256:
        raise TransferError(f"{file.path} reads back as sha256 {seen}, written was {file.sha256}")
