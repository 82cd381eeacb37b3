"""What is kept of runs, tried from outside: other users, other folders, odd values, and a second command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.local_runs import on_this_machine
from support.waiting import until

from manycpu.pipeline import train
from manycpu.pipeline.spec.errors import BadInputError, CancelledError, ExportError, TrainingFailedError
from manycpu.pipeline.verbs import all_verbs
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup

pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
Script = Callable[..., str]
FAILS = """
import os, sys
open(os.environ["MANYCPU_CHECKPOINTS"] + "/checkpoint-1", "w").write("a day of work")
sys.exit(3)
"""
WAITS = "import time; time.sleep(600)"
WRITES = "import os; open(os.environ['MANYCPU_OUTPUT'] + '/model.txt', 'w').write('the model')"
_LIKE_OTHERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def fields(tmp_path: Path, program: str, **more: Any) -> dict[str, Any]:
    return {"program": program, "output": str(tmp_path / "out"), "nproc_per_node": 1, **more}


def test_a_run_of_another_user_that_may_not_be_read_troubles_no_other(
    script: Script, tmp_path: Path, home: Path
) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root reads everything")
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, script(FAILS)), run_id="theirs")
    (theirs,) = (home / "runs").glob("train-*")
    theirs.chmod(0)
    command = [*(_LIKE_OTHERS if os.geteuid() == 0 else ()), sys.executable, "-m", "manycpu.pipeline.cli"]
    run = ["run", "--program", script(WRITES), "--output", str(tmp_path / "mine"), "--nproc-per-node", "1"]
    try:
        for words in (["status"], run, ["clean", "--yes"], ["clean", "--data", "--yes"]):
            done = subprocess.run([*command, *words], check=False, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Permission" not in done.stdout + done.stderr
    finally:
        theirs.chmod(0o700)
    assert (theirs / "checkpoints" / "checkpoint-1").exists()
    assert list((home / "code").iterdir())


def test_an_interrupt_in_prepare_ends_no_run_of_another_process(
    script: Script, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands with one new run id: the second is interrupted while it checks, and cleans up nothing."""
    words = ["run", "--program", script(WAITS), "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    first: list[subprocess.Popen[bytes]] = []

    def interrupted(*_: Any) -> None:
        begun = [sys.executable, "-m", "manycpu.pipeline.cli", *words, "--run-id", "x"]
        first.append(subprocess.Popen(begun, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        until(lambda: [ctx for ctx in on_this_machine(home) if ctx.ledger.read().handle])
        raise KeyboardInterrupt

    monkeypatch.setattr(all_verbs, "prepare", interrupted)
    try:
        with pytest.raises(CancelledError, match="nothing was launched"):
            train(fields(tmp_path, script(WAITS)), run_id="x")
        (ctx,) = on_this_machine(home)
        assert ctx.ledger.read().cancelled == {}
        assert first[0].poll() is None
    finally:
        for ctx in on_this_machine(home):
            cancel(ctx, by="the test")
        first[0].wait()


@pytest.mark.parametrize("inside", ["runs/mine", "data/mine", "code", "model/a/b", ".", "runs/.mine.removed"])
def test_an_output_among_what_manycpu_deletes_is_refused(
    script: Script, tmp_path: Path, home: Path, inside: str
) -> None:
    with pytest.raises(BadInputError, match=r"run\.output: .* keeps its own"):
        train(fields(tmp_path, script(WRITES), output=str(home / inside)), run_id="x")


def test_an_output_that_leads_into_its_own_run_is_refused(script: Script, tmp_path: Path, home: Path) -> None:
    (home / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home / "runs")
    with pytest.raises(BadInputError, match=r"run\.output: .* keeps its own"):
        train(fields(tmp_path, script(WRITES), output=str(tmp_path / "link" / "x")), run_id="x")
    assert train(fields(tmp_path, script(WRITES), output=str(home / "reports" / "x"))).state == "succeeded"


def test_what_is_kept_is_kept_for_the_longest_time_that_there_is(
    script: Script, tmp_path: Path, home: Path
) -> None:
    with pytest.raises(BadInputError, match=r"run\.keep_for"):
        train(fields(tmp_path, script(FAILS), keep_for=10**18), run_id="x")
    with pytest.raises(TrainingFailedError) as caught:
        train(fields(tmp_path, script(FAILS), keep_for=10**11), run_id="x")
    assert "are kept until" in str(caught.value.__notes__)
    assert list((home / "runs").glob("*/checkpoints/checkpoint-1"))


def test_nothing_is_deleted_through_a_link_that_a_program_put_beside_its_attempt(
    script: Script, tmp_path: Path, home: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years of work")
    links = FAILS.replace("sys.exit", f"os.symlink({str(precious)!r}, '../../../mine')\nsys.exit")
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, script(links)), run_id="x")
    assert list((home / "runs").glob("*/checkpoints/checkpoint-1"))
    assert (precious / "thesis").exists()


ELSEWHERE = """
import os, sys
if os.environ["MANYCPU_ATTEMPT"] == "2":
    open(os.environ["MANYCPU_CHECKPOINTS"] + "/c", "w").write("x")
    sys.exit(3)
open("model.bin", "w").write("the only model")
"""


def test_a_model_in_the_wrong_folder_outlives_the_failure_of_the_next_attempt(
    script: Script, tmp_path: Path, home: Path
) -> None:
    given = fields(tmp_path, script(ELSEWHERE))
    with pytest.raises(ExportError, match=r"it wrote \S+model\.bin instead"):
        train(given, run_id="x")
    assert list((home / "runs").glob("*/attempts/1/work/code/model.bin"))
    with pytest.raises(TrainingFailedError):
        train(given, run_id="x")
    assert list((home / "runs").glob("*/attempts/1/work/code/model.bin"))


def test_a_model_whose_files_somebody_took_away_is_not_seen_at_the_output(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the export; before the next command a person moves the files, and not their manifest."""

    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit

    given = fields(tmp_path, script(WRITES))
    monkeypatch.setattr(all_verbs, "cleanup", killed)
    with pytest.raises(SystemExit):
        train(given, run_id="x")
    monkeypatch.setattr(all_verbs, "cleanup", cleanup)
    (tmp_path / "out" / "model.txt").unlink()
    assert train(given, run_id="x").state == "succeeded"
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
