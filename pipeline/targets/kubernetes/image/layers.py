"""The layers that every run appends to its base image: manycpu itself, and the program's code.

Only blobs that the registry lacks are pushed.
"""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from manycpu.pipeline.adapters.registry import Repository, of_blob, of_bytes
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.launchers.pod_spec import UID
from manycpu.pipeline.spec.errors import BuildError
from manycpu.pipeline.spec.image import Change, Image, Layer, Reference
from manycpu.pipeline.spec.placement import CODE, LIB
from manycpu.pipeline.targets.kubernetes.image.registries import Registries

_PACKAGE: Final = Path(__file__).resolve().parents[3]
_EXECUTABLE, _PLAIN, _LINK = 0o755, 0o644, 0o777  # modes
_DIGITS: Final = 12  # number of digits of a digest that a tag has


@dataclass(frozen=True)
class Tree:
    """A folder of an image, as a tar that has the same bytes for the same files."""

    tar: bytes
    made_by: str
    """Text about the layer in the image's history."""

    @cached_property
    def digest(self) -> str:
        """The sha256 of the tar, in hexadecimal."""
        return hashlib.sha256(self.tar).hexdigest()

    @cached_property
    def layer(self) -> Layer:
        """The compressed tar, as a layer; it contains no time, so that its bytes are always the same."""
        return Layer(gzip.compress(self.tar, 6, mtime=0), f"sha256:{self.digest}", self.made_by)


def code(source: Location) -> Tree:
    """Pack the files that ``source.chosen`` lists in a program's folder, below ``CODE`` in the image.

    Raises:
        BuildError: A file cannot be read.
    """
    root = Path(source.root)
    files = ((f"{CODE}/{path}", root / path) for path in source.chosen or ())
    return tree(files, what="code", field="run.program")


@cache
def library() -> Tree:
    """Pack the installed manycpu of this machine, for training and helper pods; once for each process."""
    files = [
        (f"{LIB}/manycpu/pipeline/{path.relative_to(_PACKAGE).as_posix()}", path)
        for path in sorted(_PACKAGE.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    ]
    # An empty folder CODE: it is the program's working folder, even without a layer with code. `tree` does
    # not read the path of an empty folder, so that any path will do.
    return tree([*files, (f"{CODE}/", _PACKAGE)], what="manycpu", field=None)


def tree(
    files: Iterable[tuple[str, Path]], what: str, field: str | None, *, keep_links: bool = False
) -> Tree:
    """Pack files under their names in an image, which are below ``/opt/manycpu``.

    The pods' user owns the code, because the folder of the code is the program's working folder.

    Args:
        files: Pairs: a name in the image, and the file to read. A name that ends with a slash is an empty
            folder; its file is not read.
        what: What the tree contains, for the image's history.
        field: The field of the run or target that an error names; None: no field.
        keep_links: True: symbolic links stay links. False: the files to which they lead are packed.

    Raises:
        BuildError: A file cannot be read.
    """
    stream = io.BytesIO()
    folders: set[str] = set()
    try:
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, path in sorted(files):
                _add_folders(tar, name.lstrip("/"), folders)
                if name.endswith("/"):  # an empty folder, which was just added
                    continue
                info = tarfile.TarInfo(name.lstrip("/"))
                if keep_links and path.is_symlink():
                    info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), _LINK
                    tar.addfile(_with_owner(info))
                    continue
                with path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    info.size = status.st_size
                    info.mode = _EXECUTABLE if status.st_mode & 0o100 else _PLAIN
                    tar.addfile(_with_owner(info), file)
    except OSError as error:
        raise BuildError(f"the code cannot be read: {error}", field=field) from error
    return Tree(stream.getvalue(), f"manycpu: {what}")


def _add_folders(tar: tarfile.TarFile, name: str, added: set[str]) -> None:
    """Add the parent folders of a file to the tar, from ``/opt/manycpu`` down, except those in ``added``.

    The new ones are put into ``added``.
    """
    parent = Path(name.rpartition("/")[0])
    for folder in reversed((parent, *parent.parents)):  # the outermost first
        path = folder.as_posix()
        if path.startswith("opt/manycpu") and path not in added:
            added.add(path)
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, _EXECUTABLE
            tar.addfile(_with_owner(info))


def _with_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return ``info``; if it is in the code's folder, its owner is now the pods' user, else it stays root."""
    if f"/{info.name}/".startswith(f"{CODE}/"):  # true for the folder itself, too
        info.uid = info.gid = UID
    return info


def append(
    base: Reference,
    push_repository: Reference,
    trees: Sequence[Tree],
    change: Callable[[], Change],
    opened: Registries,
) -> tuple[str, bool]:
    """Append trees to a base image, and push the new image unless the registry has it.

    Args:
        base: The base image.
        push_repository: The repository to push to.
        trees: The trees to append. The new image's tag has their digests.
        change: Builds the layers and settings to append; called only if the registry lacks the new image.
        opened: The run's registries.

    Returns:
        The new image's name by digest, and whether the registry had the image already.

    Raises:
        RegistryError: A registry refuses a call.
    """
    source, target = opened.repository(base), opened.repository(push_repository)
    image = source.pull(base.version)
    tag = tag_of(image.digest, trees)
    if digest := target.digest_of_whole(tag):  # None: the registry lacks the image, or a part of it
        return str(push_repository.at(digest)), True
    if (base.registry, base.repository) != (push_repository.registry, push_repository.repository):
        _copy_base(image, source, target)  # all layers of an image must be in the image's own repository
    additions = change()
    for layer in additions.layers:
        target.push(of_bytes(layer.content, layer.digest))
    return str(push_repository.at(_push(target, image.changed(additions), tag))), False


def tag_of(base: str, trees: Sequence[Tree]) -> str:
    """Build a tag from the first digits of the digests of a base image and of the trees on it."""
    parts = (base.removeprefix("sha256:"), *(tree.digest for tree in trees))
    return "-".join(part[:_DIGITS] for part in parts)


def _copy_base(image: Image, source: Repository, target: Repository) -> None:
    """Copy the base image to the run's repository, unless that repository has it already."""
    tag = f"base-{image.digest.removeprefix('sha256:')[:_DIGITS]}"
    if target.digest_of_whole(tag):
        return
    same_registry = source.connection is target.connection
    for layer in image.layers:
        digest = layer["digest"]
        if target.has(digest):
            continue
        if same_registry and target.mount(digest, source.name):  # the registry itself copies the layer
            continue
        target.push(of_blob(source, layer))
    _push(target, image, tag)


def _push(target: Repository, image: Image, tag: str) -> str:
    """Push config and manifest of an image; the repository has its layers already. Return its digest."""
    target.push(of_bytes(image.config_bytes, image.manifest["config"]["digest"]))
    return target.push_image(image, tag)
