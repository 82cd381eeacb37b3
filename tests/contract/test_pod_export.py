"""Models on their way back from a volume through a helper pod, which is a process of this machine here."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.folder_contents import contents, location
from support.helper_process import LARGE, pod, pull

from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import Channel, Content, LostError, RemoteError
from manycpu.pipeline.targets.kubernetes import export
from manycpu.pipeline.targets.kubernetes.volume import helper_pod
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import Helper
from manycpu.pipeline.targets.kubernetes.volume.way_to_pod import WayToPod
from manycpu.pipeline.transfer import Manifest, Progress, TransferError

AHEAD = 64 << 20  # more than is under way between both ends
DIGEST = 32


def test_a_folder_comes_back_whole_with_its_manifest(source: Path, tmp_path: Path) -> None:
    manifest = pull(source, tmp_path / "out" / "model")
    found = contents(tmp_path / "out" / "model")
    assert Manifest.read(tmp_path / "out" / "model" / "manifest.json") == manifest
    assert found.pop("manifest.json")
    assert found == contents(source)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_coming_back_goes_on_after_a_break(source: Path, tmp_path: Path) -> None:
    with pod("send") as (channel, _), pytest.raises(LostError):
        client.pull(channel, str(source), tmp_path / "model", "key", _break_at(LARGE // 2))
    (large,) = tmp_path.glob(".model.key.*.partial/deep er/große\nDatei.bin")
    kept = large.stat()
    assert kept.st_size > 0
    assert not (tmp_path / "model").exists()
    pull(source, tmp_path / "model")
    assert (tmp_path / "model" / "deep er" / "große\nDatei.bin").stat().st_ino == kept.st_ino
    assert contents(tmp_path / "model").items() >= contents(source).items()


def test_only_what_is_missing_comes_after_a_break(source: Path, tmp_path: Path) -> None:
    with pod("send") as (channel, _), pytest.raises(LostError):
        client.pull(channel, str(source), tmp_path / "model", "key", _break_at(LARGE // 2))
    (partial,) = tmp_path.glob(".model.key.*.partial")
    kept = sum(map(len, contents(partial).values()))
    came = 0
    with pod("send") as (channel, _):
        whole = channel.receive_content

        def counting() -> Content:
            nonlocal came
            content = whole()
            came += len(content)
            return content

        channel.receive_content = counting  # type: ignore[method-assign]
        manifest = client.pull(channel, str(source), tmp_path / "model", "key", lambda *_: None)
    listed = len(location(source).items().content)
    assert came == listed + manifest.size - kept + DIGEST * len(manifest.files)


class Losing(Helper):
    """A helper that is lost, ten minutes later, after each two megabytes that came."""

    def __init__(self, clock: list[float]) -> None:
        self.name, self._progress, self._owned = "x", lambda *_: None, False
        self._way = WayToPod(SimpleNamespace(), "x", direct=False)  # type: ignore[arg-type]
        self._clock, self.losses = clock, 0

    def wait_ready(self) -> None:
        """Be ready at once."""

    def _talk(self, command: str, talk: Callable[[Channel], Any]) -> Any:
        with pod(command, progress=self.report) as (channel, _):
            whole, came = channel.receive_content, 0

            def losing() -> Content:
                nonlocal came
                content = whole()
                came += len(content)
                if came > LARGE // 4:
                    raise LostError("gone")
                return content

            channel.receive_content = losing  # type: ignore[method-assign]
            try:
                return talk(channel)
            except LostError:
                self._clock[0] += 600
                self.losses += 1
                raise


def test_an_export_that_gets_on_is_not_given_up_however_often_it_breaks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    stand_in = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: None)
    monkeypatch.setattr(helper_pod, "time", stand_in)
    ctx = SimpleNamespace(output=location(tmp_path / "out"), key="key", claim_key="key")
    helper = Losing(clock)
    export._pull(ctx, helper, str(source))  # type: ignore[arg-type]  # noqa: SLF001 - all but the cluster
    assert helper.losses > 2
    assert contents(tmp_path / "out").items() >= contents(source).items()


def _break_at(size: int) -> Progress:
    def breaking(done: int, _: int) -> None:
        if done > size:
            raise LostError

    return breaking


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_append, f"had {AHEAD} bytes when it was listed"),
        (lambda path: os.truncate(path, AHEAD - 1), "was written to after it had been listed"),
        (_overwrite, "was written to after it had been listed"),
    ],
    ids=["longer", "shorter", "other"],
)
def test_a_file_that_changes_while_it_comes_is_refused(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    (tmp_path / "source").mkdir()
    large = tmp_path / "source" / "large.bin"
    large.touch()
    os.truncate(large, AHEAD)
    changed: list[int] = []

    def meanwhile(done: int, _: int) -> None:
        if not changed and done:
            changed.append(done)
            change(large)

    with pod("send") as (channel, _), pytest.raises(RemoteError, match=rf"large\.bin {said}"):
        client.pull(channel, str(large.parent), tmp_path / "model", "key", meanwhile)
    assert not (tmp_path / "model").exists()


def test_what_changes_on_its_way_is_refused(source: Path, tmp_path: Path) -> None:
    with pod("send") as (channel, _):
        whole = channel.receive_content

        def other() -> bytes:
            return bytes(whole()).replace(b"alpha", b"ALPHA")

        channel.receive_content = other  # type: ignore[method-assign]
        with pytest.raises(TransferError, match=r"a\.txt had sha256"):
            client.pull(channel, str(source), tmp_path / "model", "key", lambda *_: None)
    assert not (tmp_path / "model").exists()


def test_a_folder_that_nobody_wrote_has_no_files(tmp_path: Path) -> None:
    assert len(pull(tmp_path / "none", tmp_path / "model").files) == 0
    assert not (tmp_path / "model").exists()


STALE_ONCE = """
import errno, os, sys
from manycpu.pipeline.pod.__main__ import main

stat, stale = os.stat, [{path!r}]

def stat_once_stale(path, *args, **more):
    if str(path) in stale:
        stale.remove(str(path))
        raise OSError(errno.ESTALE, "Stale file handle", str(path))
    return stat(path, *args, **more)

os.stat = stat_once_stale
sys.exit(main("send"))
"""


def test_a_volume_that_does_not_answer_is_an_error_and_no_folder_without_files(
    source: Path, tmp_path: Path
) -> None:
    code = STALE_ONCE.format(path=str(source))
    with pod("send", code) as (channel, _), pytest.raises(RemoteError, match="Stale file handle"):
        client.pull(channel, str(source), tmp_path / "model", "key", lambda *_: None)


def test_what_can_be_no_part_of_a_model_is_left_out_of_it_and_named(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source / "broken").symlink_to(source / "broken")
    os.mkfifo(source / "pipe")
    pull(source, tmp_path / "model")
    assert "'broken' in the output is a link that leads nowhere" in caplog.text
    assert "'pipe' in the output is a FIFO (named pipe): it is left out of the model" in caplog.text
    (source / "broken").unlink()
    (source / "pipe").unlink()
    found = contents(tmp_path / "model")
    assert found.pop("manifest.json")
    assert found == contents(source)
