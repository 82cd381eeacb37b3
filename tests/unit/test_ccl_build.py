"""What the backend is built of and for, where it is kept, and what is said where it cannot be."""

import re
import resource
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from manycpu.pipeline.node.backends import BACKENDS, UnavailableError, awaited, why_unavailable
from manycpu.pipeline.node.ccl import build
from manycpu.pipeline.node.ccl.build import Compiler, OneCcl

HERE = OneCcl("2022.1.2", Path("/include"), Path("/libccl.a"))
GCC = Compiler("/usr/bin/g++", "g++ 12.2.0")


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCPU_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def oneccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a oneCCL that is installed, as far as anybody looks before compiling."""
    monkeypatch.setattr(build, "find_oneccl", lambda: HERE)


def test_a_build_is_known_by_what_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.folder_of(tmp_path, HERE, GCC)
    assert folder == build.folder_of(tmp_path, HERE, GCC)
    others = [
        build.folder_of(tmp_path, HERE._replace(version="2021.17.2"), GCC),
        build.folder_of(tmp_path, HERE, GCC._replace(version="g++ 13.1.0")),
    ]
    monkeypatch.setattr("torch.__version__", "2.6.0")
    assert len({folder, *others, build.folder_of(tmp_path, HERE, GCC)}) == 4


@pytest.mark.usefixtures("oneccl")
def test_without_a_compiler_what_another_built_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build.folder_of(tmp_path / "cache", HERE, GCC) / f"{build.NAME}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.built() == library


@pytest.mark.usefixtures("oneccl")
def test_a_build_is_announced_where_it_is_still_to_be_made_and_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: GCC)
    assert re.search(r"the backend ccl \(built once .*, in half a minute to .* minutes\)", awaited("ccl"))
    library = build.folder_of(tmp_path / "cache", HERE, GCC) / f"{build.NAME}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert awaited("ccl") == "the backend ccl"
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert awaited("ccl") == "the backend ccl"
    assert awaited("gloo") == ""


@pytest.mark.usefixtures("oneccl")
def test_where_it_can_be_neither_found_nor_built_nothing_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert awaited("auto") == ""


def test_where_oneccl_is_not_installed_nothing_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> OneCcl:
        raise UnavailableError("oneCCL is not installed")

    monkeypatch.setattr(build, "find_oneccl", missing)
    assert awaited("auto") == ""


@pytest.mark.usefixtures("oneccl")
def test_without_a_compiler_and_a_build_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler.*apt-get install g\+\+.*node\.ccl"):
        build.built()


def _set_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, *, fails: str) -> None:
    """Make CXX a compiler that has a version, and else fails after these words of a shell."""
    compiler = folder / "cxx"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo old; exit; }}\n{fails}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.usefixtures("oneccl")
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_compiler(monkeypatch, tmp_path, fails='echo "error: C++20?" >&2')
    with pytest.raises(UnavailableError, match=r"cannot compile it \(C\+\+20 is needed\): error: C\+\+20\?"):
        build.built()
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["lock"]


@pytest.mark.usefixtures("oneccl")
def test_a_cache_that_is_not_writable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr(build, "find_compiler", lambda: GCC)
    with pytest.raises(UnavailableError, match="set MANYCPU_CACHE to a folder that is writable"):
        build.built()


def test_without_oneccl_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        UnavailableError, match=r"oneCCL is not installed; install it: pip install 'manycpu\[ccl\]'"
    ):
        build.find_oneccl()
    with pytest.raises(UnavailableError, match=r"there is no libfabric\.so\.1"):
        build.find_library("libfabric.so.1")


@pytest.mark.usefixtures("oneccl")
def test_a_build_that_failed_is_not_tried_again_by_the_other_ranks_of_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    _set_compiler(monkeypatch, tmp_path, fails=f'echo >>{runs}; echo "error: too old" >&2')
    monkeypatch.setenv("MANYCPU_RUN", "a-run")
    for attempt, tries in (("1", 1), ("1", 1), ("2", 2)):
        monkeypatch.setenv("MANYCPU_ATTEMPT", attempt)
        with pytest.raises(UnavailableError, match="too old"):
            build.built()
        assert len(runs.read_text().splitlines()) == tries


@pytest.mark.usefixtures("oneccl")
def test_a_disk_that_was_full_while_a_build_failed_keeps_no_later_one_from_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_compiler(monkeypatch, tmp_path, fails='echo "error: no space" >&2')
    monkeypatch.setenv("MANYCPU_RUN", "a-run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt, largest_file in (("1", 0), ("2", soft)):
        monkeypatch.setenv("MANYCPU_ATTEMPT", attempt)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
        try:
            with pytest.raises(UnavailableError, match="no space"):
                build.built()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_whatever_keeps_a_backend_from_being_built_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fills_the_disk() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(BACKENDS, "ccl", fills_the_disk)
    assert why_unavailable("ccl") == "OSError: [Errno 28] No space left on device"
