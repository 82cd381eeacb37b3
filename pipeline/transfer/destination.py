"""Replace a run's own earlier export at a destination; refuse to change anything else there."""

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from manycpu.pipeline.adapters.listing import Item
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec import output
from manycpu.pipeline.spec.words import first_of
from manycpu.pipeline.transfer.manifest import Manifest, Tick, TransferError


class Earlier(NamedTuple):
    """An earlier export of the same run: its manifest and the name of that."""

    name: str
    manifest: Manifest


def signed(manifest: Manifest, key: str) -> str:
    """Serialise an export's manifest, with the key of the run that wrote it."""
    return "".join(manifest.lines(run=key))


def earlier(destination: Location, key: str) -> Earlier | None:
    """Read the manifest of an earlier export of the same run; None: there is none."""
    report = output.fields_of(destination.read_text(output.REPORT))
    for name in output.manifests(destination.has):
        try:
            manifest, run = Manifest.parse(destination.read_text(name) or "")
        except ValueError:
            continue
        if key in (run, report.get("key")):
            return Earlier(name, manifest)
    return None


def strangers(destination: Location, key: str) -> list[str]:
    """List files at a destination that the run did not write, judged by names and sizes."""
    # The list of an object store is cached, and would lack new files.
    destination.fs.invalidate_cache()
    if not destination.exists():
        return []
    before = earlier(destination, key)
    exported = {(file.path, file.size) for file in before.manifest.files} if before else set()
    odd: list[str] = []
    items = destination.without_odd(lambda path, _: odd.append(path)).items()
    mine = [*output.PARTIALS, *([before.name] if before else [])]
    if output.replaceable(destination.read_text(output.REPORT), key):
        mine += [output.REPORT, *([output.PAGE] if has_page(destination) else [])]
    unknown = [item.path for item in items if (item.path, item.size) not in exported]
    return [*odd, *(path for path in unknown if path not in mine)]


def has_page(destination: Location) -> bool:
    """Whether a run's report.html is at a destination; only folders on disk have one."""
    return destination.local is not None and output.is_page(destination.read_text(output.PAGE))


def changed(destination: Location, before: Earlier | None, tick: Tick = lambda: None) -> Iterator[str]:
    """Yield the files of an earlier export whose content has changed; missing files are no change."""
    for path, size, sha256, _ in before.manifest.files if before else ():
        if path == output.REPORT or path.endswith("/") or not destination.has(path):
            continue
        if destination.sha256(Item(path, size, ""), tick) != sha256:
            yield path


def refuse(names: Iterable[str]) -> None:
    """Raise if a destination holds files that the run did not write.

    Raises:
        TransferError: There are such names.
    """
    foreign = sorted(names)
    if foreign:
        raise TransferError(
            f"it holds {first_of(foreign)}, which this run did not write, and nothing was changed there; a "
            "program saves to {output}, or $MANYCPU_OUTPUT, and not to run.output itself"
        )


def put(partial: Path, destination: Path, key: str) -> None:
    """Rename a finished folder to its destination, in one step.

    It replaces only an empty folder, or an unchanged earlier export of the same run.

    Raises:
        TransferError: The destination holds anything else.
    """
    before = destination.with_name(f".{destination.name}.{key}.before")
    _finish_earlier_try(before, destination, key)
    if _rename(partial, destination):
        return
    location = Location.of(str(destination), "run.output")
    refuse(strangers(location, key))
    refuse(changed(location, earlier(location, key)))
    destination.rename(before)
    if not strangers(Location.of(str(before), "run.output"), key) and _rename(partial, destination):
        _remove(before, key)
        return
    if not _rename(before, destination):  # a new file has appeared there: both stay
        raise _both(before, destination)
    refuse(strangers(location, key))
    raise TransferError(f"something came to {destination} and went, and nothing was changed there; try again")


def _rename(partial: Path, destination: Path) -> bool:
    """Rename a folder; False: the destination exists, and the system does not replace it."""
    try:
        partial.rename(destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _finish_earlier_try(before: Path, destination: Path, key: str) -> None:
    """Finish or undo a replacement that an earlier, killed try began."""
    if not before.exists():
        return
    if destination.is_file():
        raise _both(before, destination)
    if _rename(before, destination):
        return
    location = Location.of(str(destination), "run.output")
    if any(strangers(location, key)):
        raise _both(before, destination)
    export = earlier(location, key)
    if any(changed(location, export)):
        raise _both(before, destination)
    if export:
        _remove(before, key)
    else:  # only the report of a run that left no model
        _remove(destination, key)
        before.rename(destination)


def _both(before: Path, destination: Path) -> TransferError:
    return TransferError(
        f"{destination} holds what this run did not write, and {before} holds an earlier export of this run; "
        "both are kept: move one of them away, and run again with the same run id"
    )


def _remove(before: Path, key: str) -> None:
    """Delete an earlier export file by file; files that it did not write stay."""
    location = Location.of(str(before), "run.output")
    export, page = earlier(location, key), [output.PAGE] if has_page(location) else []
    for file in export.manifest.files if export else ():
        if not file.path.endswith("/"):
            (before / file.path).unlink(missing_ok=True)
    for record in (output.REPORT, *page, *output.PARTIALS, *([export.name] if export else [])):
        (before / record).unlink(missing_ok=True)
    try:
        for folder, _, _ in os.walk(before, topdown=False):
            Path(folder).rmdir()
    except OSError as error:
        raise TransferError(
            f"{error.filename} came while an earlier export was replaced, and is kept"
        ) from error
