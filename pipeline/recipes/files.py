"""Find the files of a data set, by the standard library alone: preflight does so too, before a run starts."""

from collections.abc import Iterator
from pathlib import Path


def below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, sorted by path; also those of linked folders, as staging copies them.

    Hidden files and folders are left out: ``.ipynb_checkpoints`` holds copies of data.

    Args:
        folder: The folder; nothing is yielded if it does not exist.
        above: The resolved folders that contain it in this search, to detect links that lead back to them.
    """
    resolved = folder.resolve()
    if resolved in above or not resolved.is_dir():  # a link to a folder around it, which preflight refuses
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from below(path, (*above, resolved))
        elif path.is_file():
            yield path
