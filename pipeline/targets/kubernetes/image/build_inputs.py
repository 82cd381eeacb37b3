"""The inputs of an image build, the tag with their hash, and the log of the build."""

import hashlib
import logging
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from manycpu.pipeline.adapters.disk import walk
from manycpu.pipeline.ledger.file import is_run
from manycpu.pipeline.spec.errors import BadInputError, BuildError
from manycpu.pipeline.spec.image import Reference, base_images, copied_images
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets.program_code import DOCKERIGNORE, docker_ignores, docker_patterns

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

Stage = Literal["helper", "train"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
PACKAGE: Final = Path(__file__).resolve().parents[3]
OWN: Final = PACKAGE.parent / "docker"  # folder of manycpu's Dockerfile
BUILD_TIMEOUT_S: Final = 3600.0  # seconds for a build
log: Final = logging.getLogger("manycpu.build")
_KEPT_LINES: Final = 30  # number of the last lines of a build that the error message has
_DIGITS: Final = 12  # number of digits of the hash that a tag has
_SHARED: Final = ("BASE_IMAGE", "INDEX", "SYSTEM_PACKAGES", "WHEELS")
_ARGUMENTS: Final[Mapping[Stage, tuple[str, ...]]] = {
    "helper": (*_SHARED, "HELPER_REQUIREMENTS"),
    "train": (*_SHARED, "CCL", "PACKAGES", "REQUIREMENTS", "TORCH", "TORCH_INDEX", "TRANSFORMERS"),
}
"""Stage of manycpu's Dockerfile -> arguments that the stage uses. Only these are part of the image's tag."""


@dataclass(frozen=True)
class Recipe:
    """The inputs of an image build: a Dockerfile, its arguments and the files that it may copy."""

    stage: Stage
    target: str | None
    """The Dockerfile's stage to build; None: the last one."""
    text: str
    arguments: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, Path], ...]
    """Pairs: a path in the context, and the file or link to copy there; a path that ends with a slash is an
    empty folder."""

    @cached_property
    def bases(self) -> list[str]:
        """The base images in the Dockerfile's FROM lines."""
        return base_images(self.text, dict(self.arguments))

    @cached_property
    def references(self) -> dict[str, Reference]:
        """The base images: name in the Dockerfile -> reference.

        For the user's Dockerfile, invalid names are left out, such as one with a variable.

        Raises:
            BadInputError: A base of manycpu's own Dockerfile is no image's name.
        """
        if self.target:  # manycpu's own Dockerfile: only build_args can make a name wrong
            return {base: Reference.parse(base, "target.build_args") for base in self.bases}
        return _references(self.bases)

    @cached_property
    def copied(self) -> list[Reference]:
        """The images from which the Dockerfile takes files (``COPY --from``, ``RUN --mount``)."""
        return list(_references(copied_images(self.text)).values())

    def tag(self, digests: Mapping[str, str]) -> str:
        """Return the image's tag: the stage, and a hash of all inputs.

        Args:
            digests: Base image -> its present digest. If one is missing, the tag does not depend on it.
        """
        parts = [self.target or ""]
        parts += [f"{name}={value}" for name, value in self.arguments]
        parts += [f"{base} {digests.get(base, '')}" for base in self.bases]
        parts += self._contents
        # surrogateescape: file names may have bytes that are not UTF-8.
        digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()
        return f"{self.stage}-{digest[:_DIGITS]}"

    @cached_property
    def _contents(self) -> list[str]:
        """One text for each item of ``files``, made from its path and content; the tag hashes them."""
        return [_content(path, file) for path, file in self.files]

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Copy the context, with its Dockerfile, to a temporary folder, which is deleted at the end."""
        with TemporaryDirectory(prefix="manycpu-build-") as parent:
            # In a subfolder: only this user can read `parent`, and a build may run as another user.
            folder = Path(parent, "context")
            folder.mkdir()
            for path, file in self.files:
                copy = folder / path
                copy.parent.mkdir(parents=True, exist_ok=True)
                if path.endswith("/"):
                    copy.mkdir(exist_ok=True)
                else:
                    shutil.copy(file, copy, follow_symlinks=False)
            yield folder


class Build(NamedTuple):
    """An image to build, and its name."""

    recipe: Recipe
    reference: Reference
    """The image's name, with its tag."""
    from_registry: bool = False
    """Whether all base images were found in registries, so that the tag has their digests."""


class LastLines:
    """Logs the lines of a build, and keeps the last ones for an error message."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def __call__(self, line: str) -> None:
        """Log a line."""
        self._lines.append(line)
        log.info(line)

    def failed(self, build: Build, why: str) -> BuildError:
        """Return the error to raise for a failed build, with ``why`` and the build's last lines."""
        text = "\n".join(self._lines)
        # Only the user's Dockerfile is built without a target stage.
        field = "target.image" if build.recipe.target else "target.dockerfile"
        return BuildError(f"image {build.reference} could not be built: {why}\n{text}", field=field)


def recipe(ctx: "ClusterContext", stage: Stage) -> Recipe:
    """Collect the inputs of a stage's image, from manycpu's Dockerfile or, for training, the user's own.

    Raises:
        BadInputError: A file or folder does not exist, or manycpu's Dockerfile lacks a given argument.
        BuildError: A folder of the context cannot be listed.
    """
    if stage == "train" and ctx.target.dockerfile:
        return _recipe_of_user(ctx.target, ctx.target.dockerfile)
    return _own_recipe(ctx.target, stage)


def _recipe_of_user(target: Kubernetes, dockerfile: str) -> Recipe:
    """Collect the inputs of the training image that the user's Dockerfile describes.

    In the context, the Dockerfile and its ignore file get their usual names, which every builder reads.
    """
    file = _existing_path(dockerfile, "target.dockerfile")
    context = Path(target.context) if target.context else file.parent
    # As with BuildKit, the Dockerfile's own ignore file wins over that of the context.
    own_ignore_file = file.with_name(f"{file.name}{DOCKERIGNORE}")
    ignore_file = own_ignore_file if own_ignore_file.is_file() else context / DOCKERIGNORE
    files = {**_files_below(context, ignore_file), "Dockerfile": file.resolve()}
    if ignore_file.is_file():
        files[DOCKERIGNORE] = ignore_file.resolve()
    return Recipe(
        stage="train",
        target=None,
        text=file.read_text(),
        arguments=tuple(sorted(target.build_args.items())),
        files=tuple(sorted(files.items())),
    )


def _own_recipe(target: Kubernetes, stage: Stage) -> Recipe:
    """Collect the inputs of a stage of manycpu's own Dockerfile.

    If the user has a Dockerfile for the training image, this is only called for the helper image. Then
    ``target.build_args`` apply to both images, but ``target.context`` is not used here.

    Raises:
        BadInputError: ``target.build_args`` has an unknown argument, and the user has no Dockerfile.
    """
    own_arguments = {name for names in _ARGUMENTS.values() for name in names}
    unknown = set(target.build_args) - own_arguments
    if unknown and not target.dockerfile:  # else they may be arguments of the user's Dockerfile
        raise BadInputError(
            f"manycpu's Dockerfile has no argument {', '.join(sorted(unknown))}",
            field="target.build_args",
            fix=f"Use {', '.join(sorted(own_arguments))}, or a Dockerfile of your own in target.dockerfile",
        )
    arguments = {name: value for name, value in target.build_args.items() if name in _ARGUMENTS[stage]}
    given = {}
    if target.context and not target.dockerfile:
        given = _files_below(Path(target.context))
        given.pop(DOCKERIGNORE, None)  # it could make builders leave out files of manycpu
    own = _files_below(OWN)
    if arguments.get("CCL"):
        own |= _ccl_sources()
    own = {path: file.resolve() for path, file in own.items()}  # installers may link manycpu's files
    taken = own.keys() | _parents(own)  # the user's context must not replace these paths
    files = {path: file for path, file in given.items() if path.removesuffix("/") not in taken} | own
    return Recipe(
        stage=stage,
        target=stage,  # the Dockerfile has a stage of this name
        text=(OWN / "Dockerfile").read_text(),
        arguments=tuple(sorted(arguments.items())),
        files=tuple(sorted(files.items())),
    )


def _references(names: Iterable[str]) -> dict[str, Reference]:
    """Parse the names of images, and leave out invalid ones, such as a name with a variable."""
    references = {}
    for name in names:
        with suppress(BadInputError):
            references[name] = Reference.parse(name, "target.dockerfile")
    return references


def _ccl_sources() -> dict[str, Path]:
    """List the sources that an image with ccl (Intel oneCCL) needs: path in the context -> file."""
    parts = [PACKAGE / "__init__.py", *(PACKAGE / "node").rglob("*"), *(PACKAGE / "spec").rglob("*.py")]
    files = (path for path in parts if path.is_file() and path.suffix != ".pyc")
    return {f"lib/manycpu/pipeline/{path.relative_to(PACKAGE).as_posix()}": path for path in files}


def _files_below(folder: Path, ignore_file: Path | None = None) -> dict[str, Path]:
    """Find files, links and empty folders of a context, but not .git, caches, runs and ignored paths.

    Args:
        folder: The context.
        ignore_file: The file that lists ignored paths; None: ``.dockerignore`` of the context, if it exists.

    Returns:
        Path in the context -> path on this machine. A path that ends with a slash is an empty folder.
    """
    _existing_path(str(folder), "target.context")
    patterns = docker_patterns(ignore_file or folder / DOCKERIGNORE)
    # With exceptions (``!``), an ignored folder may have files that are not ignored: enter it.
    has_exceptions = any(pattern.include is False for pattern in patterns.patterns)
    paths: list[str] = []
    for parent, folders, files in walk(folder, "target.context"):
        below = Path(parent).relative_to(folder)
        entered = [name for name in folders if name not in (".git", "__pycache__")]
        entered = [name for name in entered if not is_run(Path(parent, name))]  # its ledger may hold secrets
        if not has_exceptions:
            entered = [name for name in entered if not docker_ignores(patterns, (below / name).as_posix())]
        folders[:] = sorted(entered)  # `walk` enters only the folders that stay in its list
        paths += ((below / name).as_posix() for name in (*files, *folders))
    by_path = {path: folder / path for path in paths if not docker_ignores(patterns, path)}
    # In the context, the run's Dockerfile is ``Dockerfile``: builders would take this for its ignore file.
    by_path.pop(f"Dockerfile{DOCKERIGNORE}", None)
    found = {path: file for path, file in by_path.items() if file.is_symlink() or file.is_file()}
    # The others are folders, sockets and so on. A folder with files needs no entry of its own.
    others = by_path.keys() - found.keys() - _parents(found)
    empty_folders = {f"{path}/": folder / path for path in others if by_path[path].is_dir()}
    return found | empty_folders


def _parents(paths: Iterable[str]) -> set[str]:
    """Return the paths of the folders above some paths."""
    return {parent.as_posix() for path in paths for parent in PurePath(path).parents}


def _existing_path(path: str, field: str) -> Path:
    """Return the path; raise BadInputError if it does not exist."""
    if not Path(path).exists():
        raise BadInputError(f"there is nothing at {path}", field=field, fix="Give a path that exists")
    return Path(path)


def _content(path: str, file: Path) -> str:
    """Describe an item of a context for the image's tag.

    A file: its path, mode and sha256. A link: its path and target. An empty folder: its path.
    """
    if path.endswith("/"):
        return path
    if file.is_symlink():
        return f"{path} -> {file.readlink()}"
    mode = 0o755 if file.stat().st_mode & 0o100 else 0o644  # other bits depend on the machine's umask
    with file.open("rb") as stream:
        return f"{path} {mode:o} {hashlib.file_digest(stream, 'sha256').hexdigest()}"
