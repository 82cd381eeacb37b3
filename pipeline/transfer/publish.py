"""Export a folder to a path or URL: read back what was written, and write the manifest last."""

import logging
import shutil
from pathlib import Path

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import Item
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.output import REPORT, manifest_name, programs_report
from manycpu.pipeline.transfer.claims import claimed
from manycpu.pipeline.transfer.destination import changed, earlier, put, refuse, signed, strangers
from manycpu.pipeline.transfer.manifest import File, Hashing, Manifest, Progress, Tick, TransferError, scan
from manycpu.pipeline.transfer.partial import Source, TakenOverError, copy

__all__ = ["publish", "save", "written"]

log = logging.getLogger(__name__)


def written(folder: str) -> Location:
    """Open a program's output; what cannot be copied, such as a FIFO, is skipped and logged."""
    return Location.of(folder, "run.output").without_odd(
        lambda path, why: log.warning("%r in the output %s: it is left out of the model", path, why)
    )


def publish(
    source: Path,
    destination: Location,
    key: str,
    progress: Progress = lambda *_: None,
    tick: Tick = lambda: None,
) -> Manifest:
    """Copy a folder on disk to a path or URL, read it back, and put the manifest beside it last.

    On disk the folder appears in one step. Object stores have no rename: there, a folder without its manifest
    is incomplete. A publication that broke goes on after the last file that was whole.

    Raises:
        TransferError: What was read back is not what was written, or the destination holds what the run did
            not write.
        ClaimedError: Another run has the destination.
    """
    origin = written(str(source))
    if destination.local is not None:
        if destination.local.is_file():
            raise TransferError(f"{destination.local} has become a file, and no folder")
        return save(Hashing(origin, tick), destination.local, key, progress, tick)
    with claimed(destination, key) as holding:
        manifest = scan(origin, tick)
        # Behind URLs there are no empty folders, and no names that are not UTF-8.
        files = [file for file in manifest.files if not file.path.endswith("/")]
        spelled = Manifest(file._replace(path=_escaped(file.path)) for file in files)
        taken = _top_names(spelled)
        published = _in_output(spelled, programs_report(taken))
        _delete_outdated(destination, published, key, tick)
        done = 0
        for file, named in zip(files, published.files, strict=True):
            holding.check()
            _upload(origin, destination, file, named, tick)
            done += file.size
            progress(done, published.size)
        holding.check_others()
        destination.write_text(manifest_name(taken), signed(published, key))
    return published


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
        destination: Its folder; an earlier export of this run is replaced, and nothing else.
        key: The run's key: a copy of this run that broke is taken up where it stopped.
        progress: Called with bytes done and bytes in all.
        tick: Called while the work goes on, also where no bytes are copied.

    Raises:
        TransferError: A file changed while it was copied, or reads back otherwise; or the destination holds
            what the run did not write.
        TakenOverError: Another export of the same run goes on with it.
        ClaimedError: Another run has the destination.
    """
    destination = destination.resolve()  # where a link leads: the link itself is the user's
    with claimed(Location.of(str(destination), "run.output"), key) as holding:
        stem = destination.with_name(f".{destination.name}.{key}")
        stem.parent.mkdir(parents=True, exist_ok=True)
        refuse(strangers(Location.of(str(destination), "run.output"), key))  # before all of it is copied
        partial, manifest = copy(source, stem, progress, tick)
        manifest = _completed(partial, manifest, key)
        try:
            holding.check_others()
            put(partial, destination, key)
        except TransferError:
            shutil.rmtree(
                partial, ignore_errors=True
            )  # the next try may go elsewhere: nobody would delete it
            raise
    return manifest


def _completed(partial: Path, manifest: Manifest, key: str) -> Manifest:
    """Put the manifest into a copy, and give a report.json of the program's own another name.

    Raises:
        TakenOverError: Another export of the same run goes on with the copy.
    """
    taken = _top_names(manifest)
    try:
        if REPORT in taken:
            (partial / REPORT).rename(partial / programs_report(taken))
            manifest = _in_output(manifest, programs_report(taken))
        with (partial / manifest_name(taken)).open("w") as file:
            file.writelines(manifest.lines(run=key))
        disk.sync(partial)
    except FileNotFoundError as error:
        raise TakenOverError("another export of this run goes on with this copy") from error
    return manifest


def _top_names(manifest: Manifest) -> set[str]:
    """Name the files and folders at the top."""
    return {file.path.split("/", 1)[0] for file in manifest.files}


def _in_output(manifest: Manifest, name: str) -> Manifest:
    """Rename a report.json of the program's own, file or folder: the run's report has that name."""
    if REPORT not in _top_names(manifest):
        return manifest
    log.warning("the program wrote a %s of its own: it is kept as %s", REPORT, name)
    return Manifest(file._replace(path=_renamed(file.path, name)) for file in manifest.files)


def _renamed(path: str, name: str) -> str:
    top, slash, rest = path.partition("/")
    return f"{name}{slash}{rest}" if top == REPORT else path


def _escaped(path: str) -> str:
    """Escape a name that is not UTF-8 as Python does in a text: URLs have no other names."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _delete_outdated(destination: Location, manifest: Manifest, key: str, tick: Tick) -> None:
    """Delete files of an earlier export that this one does not contain, its manifest last.

    Raises:
        TransferError: The destination holds what the run did not write.
    """
    same = {(file.path, file.sha256) for file in manifest.files}
    refuse(set(strangers(destination, key)) - {path for path, _ in same})
    before = earlier(destination, key)
    refuse(changed(destination, before, tick))
    if before is None:
        return
    for file in before.manifest.files:
        if (file.path, file.sha256) not in same and destination.has(file.path):
            destination.remove(file.path)
    destination.remove(before.name)


def _upload(origin: Location, destination: Location, file: File, named: File, tick: Tick) -> None:
    """Upload a file, unless it is there completely.

    Raises:
        TransferError: It reads back otherwise, or there is another file of that name.
    """
    if _is_uploaded(origin, destination, file, named, tick):
        return
    destination.fs.makedirs(f"{destination.root}/{named.path}".rsplit("/", 1)[0], exist_ok=True)
    with origin.open(file.path) as read, destination.open(named.path, "wb") as write:
        while block := read.read(1 << 20):
            write.write(block)
            tick()
    sha256 = destination.sha256(_item(named), tick)
    if sha256 != file.sha256:
        raise TransferError(f"{file.path} reads back as sha256 {sha256}, written was {file.sha256}")


def _is_uploaded(origin: Location, destination: Location, file: File, named: File, tick: Tick) -> bool:
    """Whether a file is there completely; the beginning of it, from a broken upload, is this run's own.

    Raises:
        TransferError: There is another file of that name.
    """
    destination.fs.invalidate_cache()
    if not destination.has(named.path):
        return False
    size, digest = destination.hashed(_item(named), tick=tick)
    whole = (size, digest) == (file.size, file.sha256)
    if not whole and origin.hashed(_item(file), size, tick) != (size, digest):
        refuse([named.path])
    return whole


def _item(file: File) -> Item:
    return Item(file.path, file.size, "", file.executable)
