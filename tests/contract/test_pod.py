"""What a helper pod does, here as a process of this machine: the same program over the same streams."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers import until

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Block, Location
from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import BLOCK, Channel, Content, LostError, RemoteError
from manycpu.pipeline.transfer import Manifest, Progress, TransferError

LARGE = 8 << 20
AHEAD = 64 << 20  # more than is under way between both ends
DIGEST = 32


@contextmanager
def pod(command: str, **options: object) -> Iterator[tuple[Channel, "subprocess.Popen[bytes]"]]:
    """Start what an exec into a helper pod starts."""
    words = [sys.executable, "-m", "manycpu.pipeline.pod", command]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        try:
            with Channel(process.stdout, process.stdin, process.kill, **options) as channel:  # type: ignore[arg-type]
                yield channel, process
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # what was on its way to a pod that is gone
                process.stdin.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep er").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"alpha")
    (folder / "deep er" / "große\nDatei.bin").write_bytes(os.urandom(LARGE))
    (folder / "deep er" / "z.bin").write_bytes(os.urandom(LARGE // 2))
    (folder / "empty").write_bytes(b"")
    (folder / "link").symlink_to(folder / "a.txt")
    (folder / "nothing in it").mkdir()
    return folder


def location(path: Path) -> Location:
    return Location.of(str(path), "run.data")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def push(source: Path, destination: Path, manifest: Manifest | None = None) -> dict[str, object]:
    manifest = manifest or transfer.scan(location(source))
    with pod("receive") as (channel, _):
        return client.push(channel, location(source), manifest, str(destination))


def pull(source: Path, destination: Path) -> Manifest:
    with pod("send") as (channel, _):
        return client.pull(channel, str(source), destination, "key", lambda *_: None)


def test_a_folder_reaches_the_volume_whole_with_its_marker(source: Path, tmp_path: Path) -> None:
    done = push(source, tmp_path / "volume" / "data" / "x")
    manifest = transfer.scan(location(source))
    assert (done["sha256"], done["reused"]) == (manifest.digest, False)
    assert contents(tmp_path / "volume" / "data" / "x") == contents(source)
    assert transfer.staged(tmp_path / "volume" / "data" / "x") == manifest
    assert {path.name for path in (tmp_path / "volume" / "data").iterdir()} == {"x", "x.manifest.json"}


def test_the_volume_holds_what_a_copy_on_this_machine_would_hold(source: Path, tmp_path: Path) -> None:
    push(source, tmp_path / "there")
    transfer.fetch(location(source), tmp_path / "here")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_what_is_there_is_not_sent_again(source: Path, tmp_path: Path) -> None:
    push(source, tmp_path / "x")
    before = (tmp_path / "x" / "a.txt").stat().st_ino
    manifest = transfer.scan(location(source))
    (source / "a.txt").unlink()  # whoever sent it again would fail
    assert push(source, tmp_path / "x", manifest)["reused"] is True
    assert (tmp_path / "x" / "a.txt").stat().st_ino == before


def test_a_break_in_the_middle_of_a_file_is_taken_up_there(source: Path, tmp_path: Path) -> None:
    manifest, volume = transfer.scan(location(source)), tmp_path / "volume"
    large = volume / "x.partial" / "deep er" / "große\nDatei.bin"
    with pod("receive") as (channel, process):
        whole = channel.pour

        def breaking(block: Block) -> None:
            whole(block)
            if len(block) == BLOCK:
                channel.flush()
                until(lambda: large.exists() and large.stat().st_size)
                process.kill()
                process.wait()

        channel.pour = breaking  # type: ignore[method-assign]
        with pytest.raises(LostError):
            client.push(channel, location(source), manifest, str(volume / "x"))
    kept = large.stat()
    assert 0 < kept.st_size < LARGE
    assert transfer.staged(volume / "x") is None
    sent = 0
    with pod("receive") as (channel, _):
        whole = channel.pour

        def counting(block: Block) -> None:
            nonlocal sent
            sent += len(block)
            whole(block)

        channel.pour = counting  # type: ignore[method-assign]
        client.push(channel, location(source), manifest, str(volume / "x"))
    assert sent == manifest.size - kept.st_size - len(b"alpha") + DIGEST * len(manifest.files)
    assert (volume / "x" / "deep er" / "große\nDatei.bin").stat().st_ino == kept.st_ino
    assert contents(volume / "x") == contents(source)


def test_a_partial_file_that_rotted_is_sent_anew(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "x.partial"
    manifest = transfer.scan(location(source))
    first = manifest.files[0]
    partial.mkdir()
    (partial / first.path).write_bytes(b"beta")
    (partial / ".journal").write_text(f'["{first.path}", {first.size}, "{first.sha256}"]\n')
    with pytest.raises(RemoteError, match=r"a\.txt had sha256"):
        push(source, tmp_path / "x")
    push(source, tmp_path / "x")
    assert contents(tmp_path / "x") == contents(source)


@pytest.mark.parametrize(
    "change", [b"longer than it was", b"al", b"ALPHA"], ids=["longer", "shorter", "other"]
)
def test_a_source_that_changes_meanwhile_is_refused(source: Path, tmp_path: Path, change: bytes) -> None:
    manifest = transfer.scan(location(source))
    (source / "a.txt").write_bytes(change)
    with pytest.raises(TransferError, match=r"a\.txt had"):
        push(source, tmp_path / "x", manifest)
    assert transfer.staged(tmp_path / "x") is None


def test_two_who_stage_the_same_at_once_share_one_copy(source: Path, tmp_path: Path) -> None:
    done: list[dict[str, object]] = []
    copy = tmp_path / "volume" / "x"
    threads = [threading.Thread(target=lambda: done.append(push(source, copy))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(answer["sha256"]) for answer in done}) == 1
    assert len(done) == 3
    assert contents(tmp_path / "volume" / "x") == contents(source)
    assert {path.name for path in (tmp_path / "volume").iterdir()} == {"x", "x.manifest.json"}


def test_a_manifest_does_not_lead_out_of_the_volume(source: Path, tmp_path: Path) -> None:
    manifest = transfer.scan(location(source))
    outside = manifest.files[0].model_copy(update={"path": "../outside"})
    with pytest.raises(RemoteError, match="leads out"):
        push(source, tmp_path / "x", Manifest(files=(outside,)))
    assert not (tmp_path / "outside").exists()


def test_a_folder_comes_back_whole_with_its_manifest(source: Path, tmp_path: Path) -> None:
    manifest = pull(source, tmp_path / "out" / "model")
    found = contents(tmp_path / "out" / "model")
    assert Manifest.model_validate_json(found.pop("manifest.json")) == manifest
    assert found == contents(source)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_coming_back_goes_on_after_a_break(source: Path, tmp_path: Path) -> None:
    large = tmp_path / ".model.key.partial" / "deep er" / "große\nDatei.bin"
    with pod("send") as (channel, _), pytest.raises(LostError):
        client.pull(channel, str(source), tmp_path / "model", "key", _break_at(LARGE // 2))
    kept = large.stat()
    assert kept.st_size > 0
    assert not (tmp_path / "model").exists()
    pull(source, tmp_path / "model")
    assert (tmp_path / "model" / "deep er" / "große\nDatei.bin").stat().st_ino == kept.st_ino
    assert contents(tmp_path / "model").items() >= contents(source).items()


def test_only_what_is_missing_comes_after_a_break(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".model.key.partial"
    with pod("send") as (channel, _), pytest.raises(LostError):
        client.pull(channel, str(source), tmp_path / "model", "key", _break_at(LARGE // 2))
    kept = sum(
        path.stat().st_size for path in partial.rglob("*") if path.name != ".journal" and path.is_file()
    )
    came = 0
    with pod("send") as (channel, _):
        whole = channel.take

        def counting() -> Content:
            nonlocal came
            content = whole()
            came += len(content)
            return content

        channel.take = counting  # type: ignore[method-assign]
        manifest = client.pull(channel, str(source), tmp_path / "model", "key", lambda *_: None)
    assert came == manifest.size - kept + DIGEST * len(manifest.files)


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
        whole = channel.take
        channel.take = lambda: bytes(byte ^ 1 for byte in whole())  # type: ignore[method-assign]
        with pytest.raises(TransferError, match=r"a\.txt had sha256"):
            client.pull(channel, str(source), tmp_path / "model", "key", lambda *_: None)
    assert not (tmp_path / "model").exists()


def test_a_folder_that_nobody_wrote_has_no_files(tmp_path: Path) -> None:
    assert pull(tmp_path / "none", tmp_path / "model").files == ()
    assert not (tmp_path / "model").exists()


def test_a_file_that_cannot_be_read_is_named(source: Path, tmp_path: Path) -> None:
    (source / "broken").symlink_to(source / "broken")
    (source / "a.txt").unlink()  # the link to it leads nowhere now
    with pytest.raises(RemoteError, match="link"):
        pull(source, tmp_path / "model")


def test_a_url_is_fetched_beside_the_volume_and_published_from_there(source: Path, tmp_path: Path) -> None:
    request = {"url": f"file://{source}", "folder": str(tmp_path / "volume"), "field": "run.data"}
    told: list[tuple[int, int]] = []
    with pod("fetch", progress=lambda done, total: told.append((done, total))) as (channel, _):
        first = client.ask(channel, **request)
    with pod("fetch") as (channel, _):
        second = client.ask(channel, **request)
    assert (first["reused"], second["reused"]) == (False, True)
    assert contents(Path(first["path"])) == contents(source)
    assert told[-1][1] == transfer.scan(location(source)).size
    with pod("publish") as (channel, _):
        done = client.ask(channel, source=first["path"], url=f"file://{tmp_path}/out", key="key")
    assert done["sha256"] == first["sha256"]
    assert contents(tmp_path / "out").items() >= contents(source).items()


def test_a_single_file_behind_a_url_keeps_its_name(source: Path, tmp_path: Path) -> None:
    with pod("fetch") as (channel, _):
        done = client.ask(channel, url=f"file://{source}/a.txt", folder=str(tmp_path / "v"), field="run.data")
    assert Path(done["path"]).name == "a.txt"
    assert Path(done["path"]).read_bytes() == b"alpha"


def test_a_protocol_that_the_image_lacks_is_named(tmp_path: Path) -> None:
    with pod("fetch") as (channel, _), pytest.raises(RemoteError, match="'nope://x' cannot be opened"):
        client.ask(channel, url="nope://x", folder=str(tmp_path), field="run.data")


def test_small_files_are_read_and_written_at_the_output(tmp_path: Path) -> None:
    with pod("write") as (channel, _):
        client.ask(channel, url=str(tmp_path / "out"), name="report.json", text="{}")
    with pod("read") as (channel, _):
        found = client.ask(channel, url=str(tmp_path / "out"), name="report.json")
    assert (found["text"], found["names"]) == ("{}", ["report.json"])


def test_a_pod_whose_worker_is_gone_ends(tmp_path: Path) -> None:
    with pod("receive") as (channel, process):
        channel.say("request", destination=str(tmp_path / "x"), files=[["a", 1, "0"]], sha256="0")
        channel.hear("have")
        assert process.stdin
        process.stdin.close()
        until(lambda: process.poll() is not None)
    assert not (tmp_path / ".x.lock").exists()


def test_a_silent_pod_is_given_up() -> None:
    with pod("receive", silence=0.5) as (channel, process):
        os.kill(process.pid, 19)
        with pytest.raises(LostError, match="no sign of life"):
            channel.hear("done")


def test_an_idle_pod_ends_when_asked_to() -> None:
    program = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print(flush=True);"
    program += "from manycpu.pipeline.pod.__main__ import idle; raise SystemExit(idle(3600))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 0
