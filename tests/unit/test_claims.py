"""Whose claim of an output counts, and what of it is deleted by whom."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fsspec.implementations.local import LocalFileSystem
from support.folder_contents import contents
from support.killable_programs import Program

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.spec.errors import BadInputError, ForeignRunError
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.output import claim_key
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.transfer import claims
from manycpu.pipeline.transfer.claims import Claim, Claimant
from manycpu.pipeline.verbs.prepare import prepare

ME = process.handle_of_this_process(Path(), "run", 0)


@pytest.fixture(params=["{}", "dir://out::file://{}/.."])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location.of(str(request.param).format(tmp_path / "out"), "run.output")


def file_of(output: Location, key: str, tmp_path: Path) -> Path:
    disk = output.local is not None
    return tmp_path / f".out.{key}.claim" if disk else tmp_path / "out" / f".manycpu-claim-{key}.json"


def write(path: Path, **fields: object) -> None:
    told = {"key": "aaa", "run": "qa-aaa", "place": "host h", "since": 1.0, "until": time.time() + 60}
    path.parent.mkdir(exist_ok=True)
    path.write_text(Claim.model_validate(told | {"held": True} | fields).model_dump_json())


def dead() -> ProcessHandle:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ME.model_copy(update={"pid": ended.pid})


def elsewhere() -> ProcessHandle:
    return dead().model_copy(update={"host": "another"})


@pytest.mark.parametrize(("until", "holder"), [(1.0, None), (1.0, ME), (2e10, dead())])
def test_a_claim_that_is_over_is_taken_over(
    output: Location, tmp_path: Path, until: float, holder: ProcessHandle | None
) -> None:
    write(file_of(output, "aaa", tmp_path), until=until, holder=holder)
    transfer.claim(output, Claimant("bbb"))
    assert not file_of(output, "aaa", tmp_path).exists()
    assert file_of(output, "bbb", tmp_path).exists()


@pytest.mark.parametrize("holder", [None, ME, elsewhere()])
def test_a_claim_of_a_run_that_may_live_counts(
    output: Location, tmp_path: Path, holder: ProcessHandle | None
) -> None:
    path = file_of(output, "aaa", tmp_path)
    write(path, until=2e10, holder=holder)
    before = path.read_bytes()
    with pytest.raises(
        transfer.ClaimedError, match=r"has it: qa-aaa \(host h\), since 1970-01-01 00:00"
    ) as caught:
        transfer.claim(output, Claimant("bbb"))
    assert "`manycpu cancel qa-aaa`, then `manycpu clean qa-aaa`" in caught.value.fix
    assert str(path) in caught.value.fix or f"out/{path.name}" in caught.value.fix
    transfer.release(output, "bbb")
    assert path.read_bytes() == before
    assert not file_of(output, "bbb", tmp_path).exists()


def test_one_that_cannot_be_read_is_kept_and_named(
    output: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_WITHDRAWAL_TIMEOUT_S", 0.2)
    path = file_of(output, "aaa", tmp_path)
    write(path)
    path.write_text("{")
    with pytest.raises(transfer.ClaimedError) as caught:
        transfer.claim(output, Claimant("bbb"))
    assert path.name in caught.value.fix
    assert path.read_text() == "{"


def test_one_that_cannot_be_read_ends_ten_minutes_after_it_was_written(
    output: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_WITHDRAWAL_TIMEOUT_S", 0.2)
    path = file_of(output, "aaa", tmp_path)
    write(path)
    path.write_text("")
    written = time.time() - 300
    os.utime(path, (written, written))
    with pytest.raises(transfer.ClaimedError) as caught:
        transfer.claim(output, Claimant("bbb"))
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(written + 600))
    assert f"ends by itself on {until}" in caught.value.fix
    os.utime(path, (written - 301, written - 301))
    transfer.claim(output, Claimant("bbb"))
    assert not path.exists()


def test_of_one_that_cannot_be_read_on_storage_without_times_no_end_is_promised(
    output: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> NoReturn:
        raise NotImplementedError

    monkeypatch.setattr(claims, "_WITHDRAWAL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(LocalFileSystem, "modified", unknown)
    path = file_of(output, "aaa", tmp_path)
    write(path)
    path.write_text("")
    os.utime(path, (0, 0))
    with pytest.raises(transfer.ClaimedError) as caught:
        transfer.claim(output, Claimant("bbb"))
    assert "ends by itself" not in caught.value.fix
    assert "delete " in caught.value.fix


def test_a_run_renews_its_own_claim(output: Location, tmp_path: Path) -> None:
    transfer.claim(output, Claimant("aaa", "qa-aaa", "host h", seconds=60, holder=ME))
    first = Claim.model_validate_json(file_of(output, "aaa", tmp_path).read_text())
    transfer.claim(output, Claimant("aaa", seconds=120))
    second = Claim.model_validate_json(file_of(output, "aaa", tmp_path).read_text())
    assert second.until > first.until
    assert second.model_copy(update={"until": first.until}) == first


ONE, ANOTHER = (claim_key("1a2b3c4d5e", ledger) for ledger in ("uid of a ConfigMap", "uuid of host-a"))


def test_runs_of_one_id_with_two_ledgers_are_two(output: Location, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.txt").write_text("the model")
    transfer.claim(output, Claimant(ONE, "qa-1a2b3c4d5e", "namespace ml"))
    refused = pytest.raises(
        transfer.ClaimedError, match=r"another run with this run id has it: qa-1a2b3c4d5e \(namespace ml\)"
    )
    with refused:
        transfer.claim(output, Claimant(ANOTHER))
    with refused:
        transfer.publish(source, output, ANOTHER)
    output.write_text("report.json", '{"key": "1a2b3c4d5e", "state": "running"}')
    with refused:
        transfer.write_report(output, ANOTHER, "{}")
    transfer.release(output, ANOTHER)
    assert (transfer.has_claimed(output, ONE), transfer.has_claimed(output, ANOTHER)) == (True, False)
    transfer.publish(source, output, ONE)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["run"] == "1a2b3c4d5e"
    transfer.claim(output, Claimant(ANOTHER))


@pytest.mark.parametrize("released", [False, True])
def test_a_run_renews_and_releases_a_claim_of_an_earlier_version(
    output: Location, tmp_path: Path, *, released: bool
) -> None:
    earlier = file_of(output, "1a2b3c4d5e", tmp_path)
    write(earlier, key="1a2b3c4d5e", holder=elsewhere())
    assert transfer.has_claimed(output, ONE)
    if released:
        transfer.release(output, ONE)
    else:
        transfer.claim(output, Claimant(ONE))
        renewed = Claim.model_validate_json(file_of(output, ONE, tmp_path).read_text())
        assert (renewed.run, renewed.place, renewed.since) == ("qa-aaa", "host h", 1.0)
    assert not earlier.exists()


def test_outputs_of_like_names_are_two(tmp_path: Path) -> None:
    for name in ("out", "out.2"):
        transfer.claim(Location.of(str(tmp_path / name), "run.output"), Claimant(name[-1] * 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.2.222.claim", ".out.ttt.claim"]


@pytest.mark.parametrize(("first", "second"), [("out", "out/deep/sub"), ("out/deep/sub", "out")])
def test_of_an_output_on_disk_and_one_in_it_only_the_first_is_claimed(
    tmp_path: Path, first: str, second: str
) -> None:
    one, other = (Location.of(str(tmp_path / name), "run.output") for name in (first, second))
    transfer.claim(one, Claimant("bbb"))
    before = contents(tmp_path)
    with pytest.raises(transfer.ClaimedError, match=f"another run has {tmp_path / first}: bbb"):
        transfer.claim(other, Claimant("aaa"))
    assert contents(tmp_path) == before
    transfer.release(one, "bbb")
    transfer.claim(other, Claimant("aaa"))


def test_a_file_in_an_output_with_the_name_of_a_claim_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out / ".sub.aaa.claim", until=1.0)
    (out / ".sub.bbb.claim").write_text("of the program")
    os.utime(out / ".sub.bbb.claim", (0, 0))
    before = contents(out)
    transfer.claim(Location.of(str(out), "run.output"), Claimant("ccc"))
    assert contents(out) == before


def test_an_export_whose_claim_another_run_took_over_ends_and_deletes_nothing(
    output: Location, tmp_path: Path
) -> None:
    """Such as one that stood still for longer than its claim lasted."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_text(name)
    theirs = file_of(output, "bbb", tmp_path)

    def meanwhile(*_: int) -> None:
        file_of(output, "aaa", tmp_path).unlink(missing_ok=True)
        write(theirs, key="bbb", run="qa-bbb")

    with pytest.raises(transfer.ClaimedError, match="another run has it: qa-bbb"):
        transfer.publish(source, output, "aaa", meanwhile)
    assert theirs.exists()
    assert "manifest.json" not in contents(tmp_path / "out")


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Describe a run with an output on disk."""
    monkeypatch.setenv("MANYCPU_HOME", str(tmp_path / "home"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    fields = {"program": "code/train.py", "output": "out", "nproc_per_node": 1, "oversubscribe": True}
    return open_context(fields, None, "test", base=tmp_path)


@pytest.mark.parametrize("held", [False, True], ids=["while it asks", "while it claims"])
def test_a_run_that_is_interrupted_while_it_claims_leaves_no_claim(
    ctx: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, held: bool
) -> None:
    written = claims._ClaimFiles.write  # noqa: SLF001 - the moment is inside of it

    def interrupted(files: Any, claim: Claim) -> None:
        written(files, claim)
        if claim.held == held:
            raise KeyboardInterrupt

    monkeypatch.setattr(claims._ClaimFiles, "write", interrupted)  # noqa: SLF001
    with pytest.raises(KeyboardInterrupt):
        prepare(ctx, ME)
    assert list(tmp_path.glob(".out.*")) == []


def test_a_process_that_is_refused_leaves_the_claim_to_the_one_that_works(
    ctx: RunContext, tmp_path: Path
) -> None:
    with Program(["sleep", "600"]) as other:
        started = process._start_ticks(other.pid)  # noqa: SLF001 - of a process that is no manycpu's
        theirs = ME.model_copy(update={"pid": other.pid, "start_ticks": started})
        prepare(ctx, theirs)
        with pytest.raises(ForeignRunError, match=f"process {other.pid}"):
            prepare(ctx, ME)
        assert (
            Claim.model_validate_json(file_of(ctx.output, ctx.claim_key, tmp_path).read_text()).holder
            == theirs
        )


def test_a_run_whose_ledger_is_removed_while_it_is_taken_up_claims_for_the_new_one(
    ctx: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(ctx)
    earlier, opened = ctx.claim_key, FileLedger.open

    def removed_before(ledger: FileLedger, entry: Entry) -> Entry:
        ledger.remove()
        return opened(ledger, entry)

    monkeypatch.setattr(FileLedger, "open", removed_before)
    prepare(ctx)
    assert [path.name for path in tmp_path.glob(".out.*")] == [f".out.{ctx.claim_key}.claim"]
    assert ctx.claim_key != earlier


def test_a_refused_run_leaves_no_ledger_that_it_has_made(ctx: RunContext, tmp_path: Path) -> None:
    write(file_of(ctx.output, "aaa", tmp_path))
    with pytest.raises(BadInputError, match="another run has it: qa-aaa"):
        prepare(ctx, ME)
    assert not ctx.ledger.exists()
    file_of(ctx.output, "aaa", tmp_path).unlink()
    prepare(ctx, ME)
    write(file_of(ctx.output, "aaa", tmp_path))
    before = ctx.ledger.lease()
    with pytest.raises(BadInputError, match="another run has it: qa-aaa"):
        prepare(ctx, ME)
    assert (ctx.ledger.exists(), ctx.ledger.lease()) == (True, before)


def test_claims_are_no_files_of_an_output(tmp_path: Path) -> None:
    output = Location.of(f"dir://out::file://{tmp_path}", "run.output")
    transfer.claim(output, Claimant("aaa"))
    output.write_text("model.txt", "the model")
    assert [item.path for item in output.items()] == ["model.txt"]
    assert transfer.strangers(output, "bbb") == ["model.txt"]
    transfer.fetch(output, tmp_path / "copy")
    assert sorted(contents(tmp_path / "copy")) == ["model.txt"]
