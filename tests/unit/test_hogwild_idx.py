"""MNIST's files are found by their names, and what cannot be used is said before anything starts."""

import gzip
from pathlib import Path

import pytest
from support.idx_files import idx, write_bars

from manycpu.pipeline.recipes.hogwild.files import find
from manycpu.pipeline.recipes.hogwild.images import Array, read
from manycpu.pipeline.spec.errors import BadInputError


def test_files_are_found_packed_or_not_and_in_folders_below(tmp_path: Path) -> None:
    folder = write_bars(tmp_path / "MNIST" / "raw", 3, 2)
    files = find(tmp_path)
    assert {name: path.name for name, path in files.items()} == {
        "train-images": "train-images-idx3-ubyte",
        "train-labels": "train-labels-idx1-ubyte",
        "t10k-images": "t10k-images-idx3-ubyte.gz",
        "t10k-labels": "t10k-labels-idx1-ubyte.gz",
    }
    assert read(files["t10k-labels"]) == Array((2,), b"\0\1")
    assert read(files["train-images"]).shape == (3, 28, 28)
    assert {path.parent for path in files.values()} == {folder}


def test_names_with_a_dot_are_those_of_other_copies(tmp_path: Path) -> None:
    for path in write_bars(tmp_path / "data", 1, 1).iterdir():
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert len(find(tmp_path)) == 4


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_bars(tmp_path / "data", 1, 1)
    (folder / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(BadInputError, match="has no file train-labels-idx1-ubyte") as raised:
        find(folder)
    assert raised.value.field == "run.data"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train-labels-idx1-ubyte", b"<html>no such page</html>", "no IDX file of bytes with 1 dimensions"),
        ("train-labels-idx1-ubyte", idx((2, 2), b"abcd"), "no IDX file of bytes with 1 dimensions"),
        ("train-labels-idx1-ubyte", b"\0\0\x08\x01\0", "no IDX file of bytes"),
        ("train-labels-idx1-ubyte", idx((5,), b"abc"), "has 3 values, and promises 5"),
        ("train-images-idx3-ubyte", idx((1, 28, 28), b"abc"), "has 3 values, and promises 1 x 28 x 28"),
        ("train-labels-idx1-ubyte.gz", b"not packed", "cannot be read: Not a gzipped file"),
        ("train-labels-idx1-ubyte.gz", gzip.compress(idx((3,), b"abc"), mtime=0)[:-9], "cannot be read"),
    ],
    ids=[
        "a page",
        "two dimensions",
        "no sizes",
        "too few labels",
        "too few images",
        "not packed",
        "cut short",
    ],
)
def test_what_is_no_such_file_is_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=said) as raised:
        read(path)
    assert raised.value.field == "run.data"
