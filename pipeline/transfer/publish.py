"""Bring a folder to its readers: what was read back is what was written, and the manifest comes last."""

import shutil
from pathlib import Path

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.transfer.hashing import Hashing
from manycpu.pipeline.transfer.manifest import MANIFEST, File, Manifest, Progress, TransferError, scan
from manycpu.pipeline.transfer.partial import Source, copy

__all__ = ["publish", "save"]


def publish(source: Path, destination: Location, key: str, progress: Progress = lambda *_: None) -> Manifest:
    """Copy a folder on disk to a path or URL, read it back, and put the manifest beside it last.

    On disk the folder appears in one step. Object stores have no rename: there, a folder without
    ``manifest.json`` is incomplete. A publication that broke goes on after the last file that was whole.

    Raises:
        TransferError: What was read back is not what was written.
    """
    origin = Location.of(str(source), "run.output")
    if destination.local is not None:
        return save(Hashing(origin), destination.local, key, progress)
    manifest = scan(origin)
    there = {item.path: item.size for item in destination.items()} if destination.exists() else {}
    if MANIFEST in there:  # of an earlier export of this run: incomplete until the new one stands there
        destination.remove(MANIFEST)
    done = 0
    for file in manifest.files:
        if there.get(file.path) != file.size or destination.sha256(file.path) != file.sha256:
            _upload(origin, destination, file)
        done += file.size
        progress(done, manifest.size)
    destination.write_text(MANIFEST, manifest.model_dump_json(indent=1))
    return manifest


def save(source: Source, destination: Path, key: str, progress: Progress = lambda *_: None) -> Manifest:
    """Copy a source to a folder on disk, and have it appear in one step with its manifest.

    Args:
        source: What to copy; what is read back is compared with what it tells.
        destination: Its folder; what is there is replaced.
        key: The run's key: a copy of this run that broke is taken up where it stopped.
        progress: Called with bytes done and bytes in all.

    Raises:
        TransferError: A file changed while it was copied, or reads back otherwise.
    """
    partial = destination.with_name(f".{destination.name}.{key}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    manifest = copy(source, partial, progress)
    (partial / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    disk.sync(partial)
    if destination.exists():  # empty, or an earlier export of this run: preflight has seen to that
        shutil.rmtree(destination)
    partial.rename(destination)
    return manifest


def _upload(origin: Location, destination: Location, file: File) -> None:
    destination.fs.makedirs(f"{destination.root}/{file.path}".rsplit("/", 1)[0], exist_ok=True)
    with origin.open(file.path) as read, destination.open(file.path, "wb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
    seen = destination.sha256(file.path)
    if seen != file.sha256:
        raise TransferError(f"{file.path} reads back as sha256 {seen}, written was {file.sha256}")
