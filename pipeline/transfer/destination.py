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
from manycpu.pipeline.transfer.claims import refuse_if_held
from manycpu.pipeline.transfer.manifest import Manifest, Tick, TransferError


class Earlier(NamedTuple):
    """An earlier export of the same run: its manifest, and the file name of the manifest."""

    name: str
    manifest: Manifest


def signed(manifest: Manifest, key: str) -> str:
    """Return an export's manifest as JSON text, with the key of the run that wrote it."""
    return "".join(manifest.lines(run=key))


def earlier(destination: Location, key: str) -> Earlier | None:
    """Read the manifest of an earlier export of the same run; None: there is none.

    The key in the manifest shows whose export it is. Earlier versions wrote no key into it: then the key in
    the report beside it decides.
    """
    key_in_report = _key_in_report(destination)
    for name in (*output.manifests(destination.has), output.OUTDATED):
        try:
            manifest, key_in_manifest = Manifest.parse(destination.read_text(name) or "")
        except ValueError:
            continue
        if key == (key_in_manifest or key_in_report):
            return Earlier(name, manifest)
    return None


def _key_in_report(destination: Location) -> str | None:
    """Return the key of the run whose report is at a destination; None: there is no run's report."""
    return output.fields_of(destination.read_text(output.REPORT)).get("key")


def strangers(destination: Location, key: str) -> list[str]:
    """List the paths at a destination that the run did not write; only names and sizes are compared."""
    # The list of an object store is cached, and would lack new files.
    destination.fs.invalidate_cache()
    if not destination.exists():
        return []
    odd: list[str] = []  # what no export writes, such as a FIFO
    items = destination.without_odd(left_out=lambda path, _: odd.append(path)).items()
    exported: set[tuple[str, int]] = set()  # path and size of each file of the model
    own_names = [*output.PARTIALS]  # files of manycpu beside them
    export = earlier(destination, key)
    if export:
        exported = {(file.path, file.size) for file in export.manifest.files}
        own_names.append(export.name)
    if output.replaceable(destination.read_text(output.REPORT), key):  # this run may write its own there
        own_names += [output.REPORT, *for_people(destination)]
    unknown = [item.path for item in items if (item.path, item.size) not in exported]
    return [*odd, *(path for path in unknown if path not in own_names)]


def why_not_exported(
    destination: Location, digest: str, tick: Tick = lambda: None, *, sizes: bool = True
) -> str | None:
    """Say why an export is not at a destination with all of its files; None: it is.

    Contents are not compared: the export itself has read each file back.

    Args:
        destination: The output.
        digest: The digest of the export's manifest. A manifest with another digest is of another model.
        tick: Called for each file that is listed.
        sizes: Whether the sizes of files are compared, too.
    """
    names = output.manifests(destination.has)
    texts = [text for name in names if (text := destination.read_text(name)) is not None]
    for text in texts:
        try:
            manifest, _ = Manifest.parse(text)
        except ValueError:  # a file of the program, which has the same name
            continue
        if manifest.digest == digest:
            return _why_incomplete(destination, manifest, tick, sizes=sizes)
    return f"its {output.MANIFEST} is of another model" if texts else f"there is no {output.MANIFEST}"


def _why_incomplete(destination: Location, manifest: Manifest, tick: Tick, *, sizes: bool) -> str | None:
    """Say which file of an export is gone or has another size; None: all are there."""
    found = {item.path: item.size for item in destination.without_odd(left_out=lambda *_: None).items(tick)}
    for file in manifest.files:
        # No storage of objects has empty folders. And with early versions the report replaced such a file.
        if file.path.endswith("/") or file.path == output.REPORT:
            continue
        size = found.get(file.path)
        if size is None:
            return f"{file.path} is gone"
        if sizes and size != file.size:
            return f"{file.path} has {size} bytes, and {file.size} were exported"
    return None


def for_people(destination: Location) -> list[str]:
    """List which of a run's report.html and run.log are at a destination."""
    return [name for name, start in output.FOR_PEOPLE.items() if destination.begins(name, start.encode())]


def write_report(destination: Location, key: str, text: str) -> None:
    """Write a run's report.json: over its own earlier report, or if no other run holds the output.

    ``key`` is the key of the run's claim: the report of a run with the same id in another place looks like an
    own one.

    Raises:
        ClaimedError: Another run holds the output, and this run has no report there.
    """
    is_own = _key_in_report(destination) == output.run_of(key)
    refuse_if_held(destination, key, same_id=is_own)
    destination.write_text(output.REPORT, text)


def write_beside(destination: Location, key: str, name: str, text: str) -> None:
    """Write a run's report.html or run.log, unless the program wrote a file of that name.

    Nothing is written beside the report of another run.
    """
    if _key_in_report(destination) != key and destination.has(output.REPORT):
        return
    export = earlier(destination, key)
    is_of_program = export is not None and any(file.path == name for file in export.manifest.files)
    if not is_of_program and (name in for_people(destination) or not destination.has(name)):
        destination.write_text(name, text)


def changed(destination: Location, before: Earlier | None, tick: Tick = lambda: None) -> Iterator[str]:
    """Yield the paths of an earlier export whose content has changed; a missing file is no change.

    ``before`` None: there is no earlier export, and nothing is yielded.
    """
    if before is None:
        return
    for file in before.manifest.files:
        # Not compared: report.json, which the run replaces after each export, and folders.
        if file.path == output.REPORT or file.path.endswith("/") or not destination.has(file.path):
            continue
        if destination.sha256(Item(file.path, file.size, version=""), tick) != file.sha256:
            yield file.path


def refuse_if_any(paths: Iterable[str]) -> None:
    """Refuse a destination if it has ``paths``, which the run did not write.

    Raises:
        TransferError: ``paths`` is not empty; the message names the first of them.
    """
    not_ours = sorted(paths)
    if not_ours:
        raise TransferError(
            f"it holds {first_of(not_ours)}, which this run did not write, and nothing was changed there; a "
            "program saves to {output}, or $MANYCPU_OUTPUT, and not to run.output itself"
        )


def put(partial: Path, destination: Path, key: str) -> None:
    """Rename a finished folder to its destination, in one step.

    It replaces only an empty folder, or an unchanged earlier export of the same run.

    Raises:
        TransferError: The destination holds anything else.
    """
    aside = destination.with_name(f".{destination.name}.{key}.before")  # where the earlier export goes
    _finish_earlier_try(aside, destination, key)
    if _rename(partial, destination):  # there was nothing, or an empty folder
        return
    location = Location.of(str(destination), field="run.output")
    refuse_if_any(strangers(location, key))
    refuse_if_any(changed(location, earlier(location, key)))
    destination.rename(aside)
    # Another process may have written to the folder until it was renamed: check it once more.
    if not strangers(Location.of(str(aside), field="run.output"), key) and _rename(partial, destination):
        _delete_export(aside, key)
        return
    if not _rename(aside, destination):  # a new file has appeared there: both stay
        raise _both_kept_error(aside, destination)
    refuse_if_any(strangers(location, key))
    raise TransferError(f"something came to {destination} and went, and nothing was changed there; try again")


def _rename(folder: Path, destination: Path) -> bool:
    """Rename a folder; False: the destination exists, and the system does not replace it."""
    try:
        folder.rename(destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _finish_earlier_try(aside: Path, destination: Path, key: str) -> None:
    """Finish or undo a replacement that an earlier, killed try began.

    ``aside`` holds the old export. If the destination is free, the old export returns there, and :func:`put`
    begins once more. If the new export has come there, the old one is deleted. If only a report has come
    there, the old export replaces it.

    Raises:
        TransferError: The destination has what this run did not write: both are kept.
    """
    if not aside.exists():
        return
    if destination.is_file():
        raise _both_kept_error(aside, destination)
    if _rename(aside, destination):
        return
    # The destination is in use: by the new export, or by what this run did not write.
    location = Location.of(str(destination), field="run.output")
    export = earlier(location, key)
    if any(strangers(location, key)) or any(changed(location, export)):
        raise _both_kept_error(aside, destination)
    if export:
        _delete_export(aside, key)
    else:  # only the report of a run that left no model
        _delete_export(destination, key)
        aside.rename(destination)


def _both_kept_error(aside: Path, destination: Path) -> TransferError:
    """Make the error for two folders that cannot be merged without deleting a file of the user."""
    return TransferError(
        f"{destination} holds what this run did not write, and {aside} holds an earlier export of this run; "
        "both are kept: move one of them away, and run again with the same run id"
    )


def _delete_export(folder: Path, key: str) -> None:
    """Delete an earlier export of a run file by file, so that no file of another writer is deleted.

    Raises:
        TransferError: Another process has added a file, which stays.
    """
    location = Location.of(str(folder), field="run.output")
    paths = [output.REPORT, *output.PARTIALS, *for_people(location)]
    export = earlier(location, key)
    if export:
        paths.append(export.name)
        paths += [file.path for file in export.manifest.files if not file.path.endswith("/")]
    for path in paths:
        (folder / path).unlink(missing_ok=True)
    try:
        for empty, _, _ in os.walk(folder, topdown=False):
            Path(empty).rmdir()
    except OSError as error:
        raise TransferError(
            f"{error.filename} came while an earlier export was replaced, and is kept"
        ) from error
