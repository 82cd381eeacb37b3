"""What is where a model is to go: an earlier export of the same run is replaced, all else is left alone."""

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec import output
from manycpu.pipeline.transfer.manifest import File, Manifest, TransferError

__all__ = ["changed", "earlier", "put", "refuse", "strangers", "written"]

_RECORDS: Final = frozenset({output.MANIFEST, output.REPORT})


class _Signed(Manifest):
    run: str = ""


def written(manifest: Manifest, key: str) -> str:
    """Give the content of an export's manifest.json: what was written, and by which run."""
    return _Signed(files=manifest.files, run=key).model_dump_json(indent=1)


def earlier(destination: Location, key: str) -> Manifest | None:
    """Read what an earlier export of the same run wrote; None where there was none."""
    text = destination.read_text(output.MANIFEST)
    try:
        manifest = _Signed.model_validate_json(text or "")
    except ValidationError:
        return None
    report = output.fields_of(destination.read_text(output.REPORT))
    return manifest if key in (manifest.run, report.get("key")) else None


def strangers(destination: Location, key: str) -> list[str]:
    """List what is at a destination that a run did not write, as far as names and sizes tell."""
    # Object stores are listed once otherwise, and what has come since then is not seen.
    destination.fs.invalidate_cache()
    if not destination.exists():
        return []
    before = earlier(destination, key)
    known = {(file.path, file.size) for file in before.files} if before else set()
    found = [item.path for item in destination.items() if (item.path, item.size) not in known]
    mine = [output.MANIFEST] if before else []
    if output.replaceable(destination.read_text(output.REPORT), key):
        mine.append(output.REPORT)
    empty = _empty_folders(destination.local) if destination.local else ()
    return [*(path for path in found if path not in mine), *empty]


def changed(destination: Location, files: Iterable[File]) -> Iterator[str]:
    """Read files, and name those whose content is another than was written; one that is gone is none."""
    for file in files:
        name = file.path
        if name not in _RECORDS and destination.has(name) and destination.sha256(name) != file.sha256:
            yield name


def refuse(names: Iterable[str]) -> None:
    """Leave a destination alone that holds what the run did not write.

    Raises:
        TransferError: There are such names.
    """
    found = sorted(names)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise TransferError(
            f"it holds {found[0]}{more}, which this run did not write, and nothing was changed there; a "
            "program saves to {output}, or $MANYCPU_OUTPUT, and not to run.output itself"
        )


def put(partial: Path, destination: Path, key: str) -> None:
    """Give a finished folder its name, in one step.

    What is there goes only where it is empty, or an earlier export of the same run and still what that wrote.

    Raises:
        TransferError: It holds anything else.
    """
    before = destination.with_name(f".{destination.name}.{key}.before")
    _make_up(before, destination)
    if _renamed(partial, destination):
        return
    there = Location.of(str(destination), "run.output")
    refuse(strangers(there, key))
    manifest = earlier(there, key)
    refuse(changed(there, manifest.files if manifest else ()))
    destination.rename(before)
    if not strangers(Location.of(str(before), "run.output"), key) and _renamed(partial, destination):
        _remove(before)
        return
    before.rename(destination)  # something came at the last moment: all of it stays where it is
    refuse(strangers(there, key))


def _renamed(partial: Path, destination: Path) -> bool:
    """Rename a folder; False where there is something, for which the system does not replace it."""
    try:
        partial.rename(destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _make_up(before: Path, destination: Path) -> None:
    """Go on where an earlier try was killed while it replaced an export."""
    if not before.exists():
        return
    if destination.exists():
        _remove(before)
    else:
        before.rename(destination)


def _remove(before: Path) -> None:
    """Delete what an export wrote, file by file: what nobody has seen stays.

    Raises:
        TransferError: Something else is there.
    """
    text = (before / output.MANIFEST).read_text() if (before / output.MANIFEST).exists() else '{"files": []}'
    for file in Manifest.model_validate_json(text).files:
        (before / file.path).unlink(missing_ok=True)
    for name in (output.REPORT, output.MANIFEST):
        (before / name).unlink(missing_ok=True)
    try:
        for folder, _, _ in os.walk(before, topdown=False):
            Path(folder).rmdir()
    except OSError as error:
        raise TransferError(
            f"{error.filename} came while an earlier export was replaced, and is kept"
        ) from error


def _empty_folders(root: Path) -> list[str]:
    return [
        f"{Path(folder).relative_to(root).as_posix()}/"
        for folder, folders, files in os.walk(root)
        if not folders and not files and Path(folder) != root
    ]
