"""Trees of every name that a file system allows: copied byte for byte, or refused by name."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.drawn import drawn
from support.folder_contents import location
from support.helper_process import pull, push

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.listing import OddFileError
from manycpu.pipeline.adapters.storage import Location

NAMES = (
    b"a", b"a.txt", b"a.partial", b".journal", b"-rf", b"--", b"a\nb", b"\n", b"'", b'"', b"a b", b" ", b"\\",
    b"$HOME", b"*", b"\xff", b"caf\xe9", "\u65e5".encode(), b"x" * 255, b"\x01\x1b[31m", b"a:b", b"::",
    b"...", b"manifest.json", b"{data}", b"~", b"#", b"%2e%2e", b"a\r", b"__pycache__", b".manifest.json",
    b"\xed\xa0\x80",
)  # fmt: skip
names = st.sampled_from(NAMES) | st.binary(min_size=1, max_size=4).filter(
    lambda name: name not in (b".", b"..") and not set(name) & {0, 47}
)
files = st.tuples(
    st.binary(max_size=20) | st.just(200_000).map(bytes),
    st.sampled_from([0o644, 0o755, 0o400, 0o666, 0o4711]),
)
links = st.sampled_from(
    [b"nowhere", b".", b"..", b"../outside", b"../outside/file", b"/dev/null", b"a" * 200]
)
inner = st.recursive(
    files | links | st.just("fifo") | files, lambda drawn: st.dictionaries(names, drawn, max_size=3)
)
trees = st.dictionaries(names, inner, max_size=3)


def plant(folder: bytes, tree: object) -> None:
    """Make what was drawn at a path."""
    match tree:
        case dict():
            os.mkdir(folder)  # noqa: PTH102 - here and below: names are bytes
            for name, inner in tree.items():
                plant(folder + b"/" + name, inner)
        case bytes():
            os.symlink(tree, folder)  # noqa: PTH211
        case (bytes() as content, int() as mode):
            with os.fdopen(os.open(folder, os.O_CREAT | os.O_WRONLY), "wb") as file:
                file.write(content)
            os.chmod(folder, mode)  # noqa: PTH101
        case _:
            os.mkfifo(folder)


Seen = dict[bytes, tuple[bytes, bool] | None]


def seen(folder: bytes) -> Seen:
    """Read a tree through its links: path -> content and whether it is executable; None: an empty folder.

    Raises:
        ValueError: Some are no files and no folders; with their paths.
    """
    odd = list[bytes]()
    found = _seen(folder, (), odd)
    if odd:
        raise ValueError(*odd)
    return found


def _seen(folder: bytes, above: tuple[bytes, ...], odd: list[bytes]) -> Seen:
    real = os.path.realpath(folder)
    if real in above:
        odd.append(folder)
        return {}
    found: Seen = {}
    for name in os.listdir(folder):  # noqa: PTH208
        path = folder + b"/" + name
        if os.path.isdir(path):  # noqa: PTH112
            inner = _seen(path, (*above, real), odd)
            found |= {name + b"/" + key: value for key, value in inner.items()} or {name + b"/": None}
        elif os.path.isfile(path):  # noqa: PTH113
            with open(path, "rb") as file:  # noqa: PTH123
                found[name] = file.read(), bool(os.stat(path).st_mode & 0o100)  # noqa: PTH116
        else:
            odd.append(path)
    return found


def fetched(source: Path, place: Path) -> Path:
    return transfer.fetch(location(source), place / "copy").path


def stored(source: Path, place: Path) -> Path:
    return transfer.store(location(source), place / "data", lambda: "").path


def pushed(source: Path, place: Path) -> Path:
    return Path(push(source, place / "volume")["path"])


def published(source: Path, place: Path) -> Path:
    transfer.publish(source, location(place / "out"), "key")
    return place / "out"


def pulled(source: Path, place: Path) -> Path:
    pull(source, place / "out")
    return place / "out"


Copy = Callable[[Path, Path], Path]


def planted(place: Path, tree: object) -> Path:
    """Make a tree beside a folder that its links may lead to."""
    (place / "outside").mkdir()
    (place / "outside" / "file").write_bytes(b"out")
    plant(bytes(place / "source"), tree)
    return place / "source"


def is_staged_or_refused(place: Path, tree: object, copy: Copy) -> None:
    source = planted(place, tree)
    try:
        expected = seen(bytes(source))
    except ValueError as odd:
        paths = [os.fsdecode(path.removeprefix(bytes(source) + b"/")) for path in odd.args]
        event("refused")
        with pytest.raises(OddFileError) as caught:
            copy(source, place)
        # Which of them it meets first is the file system's order.
        assert any(f"{path!r} is " in str(caught.value) for path in paths)
        return
    event("copied")
    copied = copy(source, place)
    assert seen(bytes(copied)) == expected
    assert copy(source, place) == copied, "it is found again"


def is_exported(place: Path, tree: object, copy: Copy) -> None:
    """Check that an export has each file of a tree; what can be no part of a model is left out."""
    source = planted(place, tree)
    try:
        expected = seen(bytes(source))
    except ValueError:
        event("with something odd")
        copy(source, place)
        return
    event("copied")
    if not any(expected.values()):
        return
    copied = seen(bytes(copy(source, place)))
    ours = {b"manifest.json", b"manifest.manycpu.json"} - expected.keys()
    assert {path: found for path, found in copied.items() if path not in ours} == expected


@drawn(60)
@given(trees, st.sampled_from([fetched, stored]))
def test_a_tree_is_staged_byte_for_byte_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, tree: object, copy: Copy
) -> None:
    is_staged_or_refused(tmp_path_factory.mktemp("tree"), tree, copy)


@drawn(60)
@given(trees)
def test_a_tree_is_exported_byte_for_byte(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    is_exported(tmp_path_factory.mktemp("tree"), tree, published)


@drawn(4, shrink=False)
@given(trees)
def test_a_tree_goes_to_a_volume_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, tree: object
) -> None:
    is_staged_or_refused(tmp_path_factory.mktemp("tree"), tree, pushed)


@drawn(4, shrink=False)
@given(trees)
def test_a_tree_comes_from_a_volume_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, tree: object
) -> None:
    is_exported(tmp_path_factory.mktemp("tree"), tree, pulled)


members = (
    st.lists(st.sampled_from(["a", "b", "..", ".", "", "a\n", "\\", "C:", "-x"]), min_size=1, max_size=4)
    .map("/".join)
    .filter(bool)
)


@drawn(60)
@given(st.lists(members, min_size=1, max_size=3, unique=True))
def test_an_archive_is_unpacked_inside_of_its_folder_or_refused(
    tmp_path_factory: pytest.TempPathFactory, members: list[str]
) -> None:
    place = tmp_path_factory.mktemp("archive")
    with zipfile.ZipFile(place / "set.zip", "w") as archive:
        for member in members:
            archive.writestr(member, member)
    before = set(place.rglob("*"))
    try:
        transfer.fetch(Location.of(f"zip://::file://{place}/set.zip", "run.data"), place / "in" / "copy")
    except (OSError, transfer.TransferError):
        event("refused")
    event("done")
    inside = place / "in"
    assert {path for path in place.rglob("*") if inside not in (path, *path.parents)} == before
