"""Promotions of models to champion, in a folder: one after the other, each of them atomic.

Promotion n is the file ``promotions/n.json``. It is created atomically, and never replaced. The one with the
highest number counts. The model is copied to ``models/`` first: a crash before the file exists leaves the old
champion, and an unused copy.
"""

import errno
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, FiniteFloat

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.output import manifests
from manycpu.pipeline.transfer import Hashing, Manifest, save, scan

_PROMOTION_FILE: Final = re.compile(r"[0-9]{6,}\.json")


class SupersededError(ManycpuError):
    """The champion is no longer the one that the candidate was compared with: nothing was promoted."""


class Candidate(BaseModel):
    """A trained model that may become champion."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Made of the DAG run's name and the model's sha256, so that a retry promotes the same."""
    key: str
    """Key of the run that trained it."""
    path: str
    sha256: str
    rate: FiniteFloat
    data: str
    """Path of the version of the data set that it was trained on."""
    accuracy: FiniteFloat
    """On the rows for choosing, which it was not trained on."""
    metrics: dict[str, Any] = {}


class Champion(Candidate):
    """A model that was promoted; ``path`` is the champion's copy of it."""

    number: int
    """Number of the promotion, from 1."""


def champion(folder: Path) -> Champion | None:
    """Return the present champion, which is the last promotion; None: there was no promotion yet."""
    return next(reversed(_promotions(folder)), None)


def promote(folder: Path, candidate: Candidate, instead_of: int) -> Champion:
    """Make a candidate the champion, if the present champion is the one that it was compared with.

    The model of the previous champion is kept, because programs may still read it; older ones are deleted.
    If the candidate is the champion already, such as in a retry, nothing is done.

    Args:
        folder: Folder of the champions.
        candidate: The model.
        instead_of: Number of the promotion that it was compared with; 0: there was no champion.

    Returns:
        The new champion; its ``path`` is that of the copy.

    Raises:
        SupersededError: Another candidate was promoted meanwhile.
        ManycpuError: The model is gone, or is not what was exported.
        ValueError: A number of the candidate is missing or not finite.
    """
    # Validated again: pydantic does not check what model_copy(update=...) makes.
    candidate = Candidate.model_validate(candidate.model_dump())
    last = champion(folder)
    if last and last.name == candidate.name:
        return last
    if instead_of != (last.number if last else 0):
        raise _superseded(last, instead_of)
    model = folder / "models" / candidate.name
    _copy_once(candidate, model)
    fields = candidate.model_dump() | {"path": str(model), "number": instead_of + 1}
    _write_once(folder / "promotions", Champion(**fields))
    promotions = _promotions(folder)
    last = promotions[-1]
    if last.name != candidate.name:  # another process has created the file of this number
        raise _superseded(last, instead_of)
    names_to_keep = {promoted.name for promoted in promotions[-2:]}
    for name in {promoted.name for promoted in promotions} - names_to_keep:
        with suppress(OSError):  # such as another process that deletes it too: the promotion counts already
            _remove(folder / "models" / name)
    return last


def _write_once(promotions_folder: Path, promotion: Champion) -> None:
    """Write the file of a promotion atomically; do nothing if there is a promotion of this number already."""
    promotions_folder.mkdir(parents=True, exist_ok=True)
    partial_file = promotions_folder / f".{promotion.name}.{uuid.uuid4().hex}"
    partial_file.write_text(promotion.model_dump_json(indent=1) + "\n")
    disk.sync(promotions_folder)  # first the content: a crash must not leave an empty promotion
    with suppress(FileExistsError):  # unlike a rename, a link replaces no file
        os.link(partial_file, promotions_folder / f"{promotion.number:06}.json")
    partial_file.unlink()
    disk.sync(promotions_folder)  # then the name


def discard(folder: Path, prefix: str) -> list[str]:
    """Delete the copies named ``prefix*`` of models that were not promoted.

    Also deletes partial files that killed promotions of such models left. Returns the names of what was
    deleted.
    """
    promoted = {promotion.name for promotion in _promotions(folder)}
    # Partial files, and folders of partial copies, begin with a dot.
    unused = [path for part in ("models", "promotions") for path in (folder / part).glob(f".{prefix}*")]
    unused += [model for model in (folder / "models").glob(f"{prefix}*") if model.name not in promoted]
    for path in unused:
        _remove(path)
    return [path.name for path in unused]


def _promotions(folder: Path) -> list[Champion]:
    """Read all promotions in the order of their numbers; other files are ignored."""
    files = [file for file in (folder / "promotions").glob("*.json") if _PROMOTION_FILE.fullmatch(file.name)]
    promotions = [Champion.model_validate_json(file.read_text()) for file in files]
    return sorted(promotions, key=lambda promotion: promotion.number)


def _superseded(last: Champion | None, instead_of: int) -> SupersededError:
    """Make the error: the present promotion is ``last`` (None: none), but was ``instead_of`` (0: none)."""
    number = last.number if last else 0
    return SupersededError(
        f"the candidate was compared with promotion {instead_of}, and there is promotion {number} by now",
        fix="Start the DAG again: it compares with the present champion",
    )


def _remove(path: Path) -> None:
    """Delete a file, a folder or a link, but not the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy_once(candidate: Candidate, model: Path) -> None:
    """Copy the exported files of a candidate to the folder ``model``, unless a complete copy exists.

    Each process copies to its own folder, and then renames the copy; only the first rename succeeds.

    Raises:
        ManycpuError: The exported files are gone or changed, or ``model`` exists with other content.
    """
    if _is_complete_copy(model, candidate.sha256):
        return  # it was champion before, or an earlier try has copied it
    # The copy is inside of it, because `save` writes unfinished files beside the copy.
    own_folder = model.with_name(f".{model.name}.{uuid.uuid4().hex}")
    try:
        _copy_files_of_export(candidate, own_folder / model.name)
        try:
            (own_folder / model.name).rename(model)
        except OSError as error:
            # These three mean that the name is taken.
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise
            if not _is_complete_copy(model, candidate.sha256):
                message = f"{model} is not the model that was evaluated: nothing was promoted"
                raise ManycpuError(message, fix="Remove it, and run again") from error
    except Exception:  # discard() deletes what a killed process leaves
        shutil.rmtree(own_folder, ignore_errors=True)
        raise
    shutil.rmtree(own_folder, ignore_errors=True)


def _copy_files_of_export(candidate: Candidate, copy: Path) -> None:
    """Copy a candidate's exported files to ``copy``; raise ManycpuError if they are gone or changed."""
    source = Location.of(candidate.path, "candidate")
    manifest = _manifest_of_export(source, candidate.sha256)
    if manifest is None:
        fix = "It is deleted at the end of its DAG run: start another one"
        raise ManycpuError(f"the model that was evaluated is not at {candidate.path}", fix=fix)
    copied = save(Hashing(source.only(file.path for file in manifest.files)), copy, candidate.name)
    if copied.digest != candidate.sha256:
        raise ManycpuError(f"{candidate.path} has changed since it was evaluated: nothing was promoted")


def _is_complete_copy(model: Path, sha256: str) -> bool:
    """Whether the folder ``model`` has all files of the export with this digest, unchanged."""
    if model.is_symlink() or not model.is_dir():
        return False
    copy = Location.of(str(model), "model")
    manifest = _manifest_of_export(copy, sha256)
    if manifest is None:
        return False
    try:
        return scan(copy.only(file.path for file in manifest.files)).digest == sha256
    except FileNotFoundError:
        return False


def _manifest_of_export(folder: Location, sha256: str) -> Manifest | None:
    """Find the manifest of an export by its digest; None: the folder has none with this digest.

    The folder may hold several manifests, because a program may have written a manifest.json itself.
    """
    for name in manifests(folder.has):
        with suppress(ValueError):
            manifest, _ = Manifest.parse(folder.read_text(name) or "")
            if manifest.digest == sha256:
                return manifest
    return None
