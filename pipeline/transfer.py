"""Verified copies: a manifest with sha256, resume after a break, atomic rename. Used by stage and export."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline.adapters.lock import locked
from manycpu.pipeline.adapters.storage import Item, Location, blocks

__all__ = [
    "MANIFEST",
    "File",
    "Manifest",
    "TransferError",
    "discard",
    "fetch",
    "identity",
    "publish",
    "scan",
    "staged",
]

MANIFEST = "manifest.json"
Progress = Callable[[int, int], None]


class TransferError(Exception):
    """The copy is not what the source is."""


class File(BaseModel):
    """One file of a manifest: path relative to its root, size in bytes, sha256 in hexadecimal."""

    model_config = ConfigDict(frozen=True)

    path: str
    size: int
    sha256: str


class Manifest(BaseModel):
    """What a folder holds."""

    model_config = ConfigDict(frozen=True)

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """The sha256 of the paths and digests: equal exactly where the contents are."""
        lines = "".join(f"{file.sha256}  {file.path}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()


def scan(source: Location) -> Manifest:
    """Read every file of a folder and hash it."""
    items = source.items()
    return Manifest(files=tuple(File(path=i.path, size=i.size, sha256=source.sha256(i.path)) for i in items))


def identity(source: Location) -> str:
    """Tell a source's present content from any other, reading it only where it is on disk."""
    if source.local is not None:
        return scan(source).digest
    listing = json.dumps([[item.path, item.size, item.version] for item in source.items()])
    return hashlib.sha256(f"{source.url}\n{listing}".encode()).hexdigest()


def staged(destination: Path) -> Manifest | None:
    """Read the manifest of a folder that :func:`fetch` completed; None where it did not."""
    try:
        return Manifest.model_validate_json(_marker(destination).read_text())
    except FileNotFoundError:
        return None


def fetch(source: Location, destination: Path, progress: Progress = lambda *_: None) -> Manifest:
    """Copy a source to a folder on disk, which is there whole or not at all.

    A copy that broke is taken up where it stopped. Two who fetch the same at once share one copy.

    Args:
        source: What to copy.
        destination: Its folder; beside it stand the marker with its manifest and, meanwhile, ``.partial``.
        progress: Called with bytes done and bytes in all.

    Raises:
        TransferError: A file changed while it was copied.
        OSError: The disk is full, or the source cannot be read.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with locked(_lock(destination)):
        complete = staged(destination)
        if complete is not None:
            return complete
        partial = _partial(destination)
        manifest = _copy(source, partial, progress)
        if destination.exists():  # without its marker: whatever it is, it is not ours to trust
            shutil.rmtree(destination)
        _sync(partial)
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


def publish(source: Path, destination: Location, key: str, progress: Progress = lambda *_: None) -> Manifest:
    """Copy a folder on disk to a path or URL, read it back, and put the manifest beside it last.

    On disk the folder appears in one step. Object stores have no rename: there, a folder without
    ``manifest.json`` is incomplete.

    Raises:
        TransferError: What was read back is not what was written.
    """
    origin = Location.of(str(source), "run.output")
    manifest = scan(origin)
    if destination.local is not None:
        return _publish_on_disk(origin, destination.local, manifest, key, progress)
    done = 0
    for file in manifest.files:
        destination.fs.makedirs(f"{destination.root}/{file.path}".rsplit("/", 1)[0], exist_ok=True)
        with origin.open(file.path) as read, destination.open(file.path, "wb") as write:
            shutil.copyfileobj(read, write, 1 << 20)
        _verify(destination, file)
        done += file.size
        progress(done, manifest.size)
    destination.write_text(MANIFEST, manifest.model_dump_json(indent=1))
    return manifest


def _publish_on_disk(
    origin: Location, destination: Path, manifest: Manifest, key: str, progress: Progress
) -> Manifest:
    partial = destination.with_name(f".{destination.name}.{key}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    _copy(origin, partial, progress)
    copy = Location.of(str(partial), "run.output")
    for file in manifest.files:
        _verify(copy, file)
    (partial / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    _sync(partial)
    if destination.exists():  # empty, or an earlier export of this run: preflight has seen to that
        shutil.rmtree(destination)
    partial.rename(destination)
    return manifest


def _verify(where: Location, file: File) -> None:
    seen = where.sha256(file.path)
    if seen != file.sha256:
        raise TransferError(f"{file.path} reads back as sha256 {seen}, written was {file.sha256}")


def _copy(source: Location, partial: Path, progress: Progress) -> Manifest:
    items = source.items()
    total, done, files = sum(item.size for item in items), 0, []
    journal = _Journal(partial)
    journal.drop_strangers(items)
    for item in items:
        path = partial / item.path
        if not journal.knows(item):
            path.unlink(missing_ok=True)
            journal.begin(item)
        files.append(_copy_file(source, item, path))
        done += item.size
        progress(done, total)
    journal.end()
    return Manifest(files=tuple(files))


def _copy_file(source: Location, item: Item, path: Path) -> File:
    """Copy one file; bytes that a broken copy of the same version left are hashed and kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open(item.path) as read, path.open("a+b") as write:
        write.seek(0)
        for block in blocks(write):
            digest.update(block)
        read.seek(write.tell())
        for block in blocks(read):
            digest.update(block)
            write.write(block)
        size = write.tell()
    if size != item.size:
        path.unlink()
        raise TransferError(
            f"{item.path} had {item.size} bytes when it was listed and {size} when it was copied"
        )
    return File(path=item.path, size=size, sha256=digest.hexdigest())


class _Journal:
    """Which version of each file a partial copy holds, written before the file's first byte."""

    def __init__(self, partial: Path) -> None:
        partial.mkdir(parents=True, exist_ok=True)
        self._folder, self._path = partial, partial / ".journal"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._known = set(lines)

    def knows(self, item: Item) -> bool:
        return self._line(item) in self._known

    def drop_strangers(self, items: list[Item]) -> None:
        wanted = {self._folder / item.path for item in items} | {self._path}
        for path in self._folder.rglob("*"):
            if path.is_file() and path not in wanted:
                path.unlink()

    def begin(self, item: Item) -> None:
        with self._path.open("a") as file:
            file.write(self._line(item) + "\n")

    def end(self) -> None:
        self._path.unlink()

    @staticmethod
    def _line(item: Item) -> str:
        return json.dumps([item.path, item.size, item.version])


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


def _sync(folder: Path) -> None:
    """Have every file of a folder on disk before its rename says that it is complete."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
