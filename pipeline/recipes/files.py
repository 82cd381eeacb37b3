"""Find the files of a data set, by the standard library alone: preflight does so too, before a run starts."""

from collections.abc import Iterator
from pathlib import Path


def below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """List the files below a folder, sorted by path; those of linked folders too, as staging copies them.

    What is hidden is left out: ``.ipynb_checkpoints`` holds copies of data.

    Args:
        folder: The folder.
        above: The folders that it is in.
    """
    place = folder.resolve()
    if place in above or not place.is_dir():  # a link to a folder around it, which preflight refuses
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from below(path, (*above, place))
        elif path.is_file():
            yield path
