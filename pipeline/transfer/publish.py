"""Bring a folder to its readers: what was read back is what was written, and the manifest comes last."""

import logging
import shutil
from pathlib import Path

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import Item, Rows
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.transfer.hashing import Hashing
from manycpu.pipeline.transfer.manifest import (
    MANIFEST,
    File,
    Manifest,
    Progress,
    Tick,
    TransferError,
    scan,
)
from manycpu.pipeline.transfer.partial import Source, TakenOverError, copy

__all__ = ["OTHER_MANIFEST", "manifest_name", "publish", "save", "written"]

OTHER_MANIFEST = "manifest.manycpu.json"
_REPORT, _PROGRAMS_REPORT = "report.json", "report.program.json"
log = logging.getLogger(__name__)


def written(folder: str) -> Location:
    """Open what a program wrote; what can be no part of a model, such as a FIFO, is left out, and named."""
    return Location.of(folder, "run.output").without_odd(
        lambda path, why: log.warning("%r in the output %s: it is left out of the model", path, why)
    )


def manifest_name(manifest: Manifest) -> str:
    """Name the manifest's file: ``manifest.json``, unless the program wrote one of its own."""
    return OTHER_MANIFEST if any(file.path == MANIFEST for file in manifest.files) else MANIFEST


def publish(
    source: Path,
    destination: Location,
    key: str,
    progress: Progress = lambda *_: None,
    tick: Tick = lambda: None,
) -> Manifest:
    """Copy a folder on disk to a path or URL, read it back, and put the manifest beside it last.

    On disk the folder appears in one step. Object stores have no rename: there, a folder without
    ``manifest.json`` is incomplete. A publication that broke goes on after the last file that was whole.

    Raises:
        TransferError: What was read back is not what was written.
    """
    origin = written(str(source))
    if destination.local is not None:
        return save(Hashing(origin), destination.local, key, progress, tick)
    manifest = scan(origin, tick)
    there = {item.path: item.size for item in destination.items()} if destination.exists() else {}
    name = manifest_name(manifest)
    if name in there:  # of an earlier export of this run: incomplete until the new one stands there
        destination.remove(name)
    done, uploaded = 0, Rows(File)
    for file in manifest.files:
        if file.path.endswith("/"):  # behind URLs there are no empty folders
            continue
        named = Item(_in_output(_spelled(file.path)), file.size, "", file.executable)
        if there.get(named.path) != file.size or destination.sha256(named, tick) != file.sha256:
            _upload(origin, destination, file, named, tick)
        uploaded.append(File(named.path, file.size, file.sha256, file.executable))
        done += file.size
        progress(done, manifest.size)
    published = Manifest(uploaded)
    destination.write_text(name, "".join(published.lines()))
    return published


def _in_output(path: str) -> str:
    """Name a file of the model in the output: the run's own report.json comes beside it."""
    if path != _REPORT:
        return path
    log.warning("the program wrote a %s of its own: it is kept as %s", _REPORT, _PROGRAMS_REPORT)
    return _PROGRAMS_REPORT


def _spelled(path: str) -> str:
    """Spell a name that is not UTF-8 as Python does in a text: URLs have no other names."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def save(
    source: Source,
    destination: Path,
    key: str,
    progress: Progress = lambda *_: None,
    tick: Tick = lambda: None,
) -> Manifest:
    """Copy a source to a folder on disk, and have it appear in one step with its manifest.

    Args:
        source: What to copy; what is read back is compared with what it tells.
        destination: Its folder; what is there is replaced.
        key: The run's key: a copy of this run that broke is taken up where it stopped.
        progress: Called with bytes done and bytes in all.
        tick: Called while the work goes on, also where no bytes are copied.

    Raises:
        TransferError: A file changed while it was copied, or reads back otherwise.
        TakenOverError: Another export of the same run goes on with it.
    """
    stem = destination.with_name(f".{destination.name}.{key}")
    stem.parent.mkdir(parents=True, exist_ok=True)
    partial, manifest = copy(source, stem, progress, tick)
    try:
        if (partial / _REPORT).exists():
            (partial / _REPORT).rename(partial / _PROGRAMS_REPORT)
            manifest = Manifest(file._replace(path=_in_output(file.path)) for file in manifest.files)
        with (partial / manifest_name(manifest)).open("w") as file:
            file.writelines(manifest.lines())
        disk.sync(partial)
    except FileNotFoundError as error:
        raise TakenOverError("another export of this run goes on with this copy") from error
    if destination.exists():  # empty, or an earlier export of this run: preflight has seen to that
        shutil.rmtree(destination)
    partial.rename(destination)
    return manifest


def _upload(origin: Location, destination: Location, file: File, named: Item, tick: Tick) -> None:
    destination.fs.makedirs(f"{destination.root}/{named.path}".rsplit("/", 1)[0], exist_ok=True)
    with origin.open(file.path) as read, destination.open(named.path, "wb") as write:
        while block := read.read(1 << 20):
            write.write(block)
            tick()
    seen = destination.sha256(named, tick)
    if seen != file.sha256:
        raise TransferError(f"{file.path} reads back as sha256 {seen}, written was {file.sha256}")
