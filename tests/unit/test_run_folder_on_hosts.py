"""A run's folder on hosts: whose it is, its output, its removal, also where hosts share one folder."""

import os
from pathlib import Path

import pytest

from manycpu.pipeline.adapters import ssh, ssh_copies
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal

FOUR = [Host(name) for name in "abcd"]


@pytest.fixture
def target(tmp_path: Path) -> BareMetal:
    """Describe hosts that are all this machine: the ssh command runs the last of its words here.

    Their folder ``own`` is the folder ``there`` of this machine.
    """
    here = tmp_path / "ssh"
    own = f"s|{tmp_path}/own|{tmp_path}/there|g"
    here.write_text(f'#!/bin/sh\nfor last; do :; done\nexec sh -c "$(printf %s "$last" | sed "{own}")"\n')
    here.chmod(0o755)
    return BareMetal(hostfile="hosts", ssh=(str(here),))


@pytest.fixture
def folder(tmp_path: Path) -> ssh.RunFolder:
    path = tmp_path / "a [b] *'c" / "runs" / "x"
    return ssh.RunFolder(path, path / "owner", "0f of host-a")


def claim(target: BareMetal, folder: ssh.RunFolder, known: str = "") -> dict[Host, str]:
    return ssh.claim(target, FOUR, folder, known)


def remove(target: BareMetal, folder: ssh.RunFolder) -> list[str]:
    return ssh.remove_folder(target, FOUR, folder, 60)


def test_hosts_that_share_a_folder_claim_and_remove_it_at_once(
    target: BareMetal, folder: ssh.RunFolder
) -> None:
    for _ in range(10):
        assert claim(target, folder) == {}
        assert folder.mark.read_text() == folder.owner
        (folder.path / "attempts" / "1").mkdir(parents=True)
        (folder.path / ".hidden").touch()
        assert [path.name for path in folder.path.glob("owner*")] == ["owner"]
        assert remove(target, folder) == []
        assert not folder.path.exists()


def test_a_folder_of_another_run_is_neither_claimed_nor_emptied(
    target: BareMetal, folder: ssh.RunFolder
) -> None:
    claim(target, folder)
    (folder.path / "attempts").mkdir()
    other = folder._replace(owner="9c of host-b")
    assert claim(target, other) == dict.fromkeys(FOUR, folder.owner)
    assert remove(target, other) == []
    ssh.keep_only(target, FOUR, other, ["owner"])
    assert sorted(path.name for path in folder.path.iterdir()) == ["attempts", "owner"]


def test_a_folder_without_a_mark_is_claimed_only_where_the_run_was_before(
    target: BareMetal, folder: ssh.RunFolder
) -> None:
    (folder.path / "attempts").mkdir(parents=True)
    assert claim(target, folder) == dict.fromkeys(FOUR, "an earlier version of manycpu")
    assert remove(target, folder) == [f"{host.name}:{folder.path}" for host in FOUR]
    folder.mark.touch()  # as a loss of power leaves it
    assert claim(target, folder, known="abcd") == {}
    assert folder.mark.read_text() == folder.owner
    assert remove(target, folder) == []
    assert not folder.path.exists()


def test_a_run_of_an_older_version_has_no_marks(target: BareMetal, folder: ssh.RunFolder) -> None:
    old = folder._replace(owner="")
    (folder.path / "attempts" / "1" / "work").mkdir(parents=True)
    (folder.path / "checkpoints").mkdir()
    ssh.keep_only(target, FOUR, old, ["attempts", "checkpoints"])
    assert not (folder.path / "attempts" / "1" / "work").exists()
    assert (folder.path / "checkpoints").exists()
    assert remove(target, old) == []
    assert not folder.path.exists()


@pytest.mark.parametrize(("folder", "copied"), [("shared", []), ("own", ["a"])])
def test_output_whose_name_is_not_utf8_keeps_it(
    folder: str, copied: list[str], target: BareMetal, tmp_path: Path
) -> None:
    on_host = tmp_path / {"own": "there"}.get(folder, folder)
    for path in {on_host, tmp_path / folder}:
        path.mkdir()
    for name in (b"caf\xe9", b"caf\xe8"):
        Path(os.fsdecode(os.fsencode(on_host) + b"/" + name)).write_bytes(name)
    assert ssh_copies.collect(target, FOUR, tmp_path / folder) == copied
    assert {os.fsencode(path.name) for path in (tmp_path / folder).iterdir()} == {b"caf\xe9", b"caf\xe8"}


def test_a_file_and_a_folder_of_one_name_are_a_conflict(target: BareMetal, tmp_path: Path) -> None:
    for file in ("own/x/shard", "there/x"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    with pytest.raises(ExportError, match=r"^run\.output: this machine and host a .* in .*/own/x,"):
        ssh_copies.collect(target, FOUR, tmp_path / "own")


def test_the_time_to_hash_files_grows_with_their_size(
    target: BareMetal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk takes longer for 100 MiB than any command may without them."""
    slow, folder = tmp_path / "bin" / "sha256sum", tmp_path / "output"
    for path in (slow.parent, folder):
        path.mkdir()
    slow.write_text('#!/bin/sh\nsleep 2\nPATH=${PATH#*:} exec sha256sum "$@"\n')
    slow.chmod(0o755)
    (folder / "model").touch()
    os.truncate(folder / "model", 100 << 20)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(ssh, "COPY_TIMEOUT_S", 1.5)
    assert ssh_copies.collect(target, FOUR[:1], folder) == []
