"""What tests of real processes share."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import namespace_hosts as made_hosts
from support.fake_api_server import ApiServer, running
from support.helper_process import LARGE
from support.recipe_ranks import WarmNode, warm_node
from support.waiting import processes_of, until

from manycpu.pipeline import cli


@pytest.fixture
def nothing_runs_afterwards(tmp_path: Path) -> Iterator[None]:
    """See that the test leaves no process; an mpirun may end a moment before its ranks."""
    yield
    until(lambda: not list(processes_of(tmp_path)))


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmNode]:
    """Start ranks that need not import torch and transformers: it takes ten seconds of a core each."""
    with warm_node(tmp_path_factory.mktemp("caches")) as node:
        yield node


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a folder with all kinds of files, to be copied."""
    folder = tmp_path / "source"
    (folder / "deep er").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"alpha")
    (folder / "deep er" / "große\nDatei.bin").write_bytes(os.urandom(LARGE))
    (folder / "deep er" / "z.bin").write_bytes(os.urandom(LARGE // 2))
    (folder / "empty").write_bytes(b"")
    (folder / "link").symlink_to(folder / "a.txt")
    (folder / "nothing in it").mkdir()
    return folder


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """Run an API server whose watches are silent until the test speaks."""
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder that host node-b has of its own: what is put into it here is not seen there."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, hidden: Path) -> Iterator[made_hosts.Hosts]:
    """Make two hosts; nothing of them may be left."""
    folder = tmp_path_factory.mktemp("hosts")
    with made_hosts.made(folder, ["node-a", "node-b"], {"node-b": [str(hidden)]}) as made:
        yield made
    assert made.leftovers() == []


@pytest.fixture
def manycpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Type a command, in this process: its exit code, and everything it printed."""

    def type_(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["manycpu", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return type_
