"""report.html beside report.json, and the command that shows a report."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.folder_contents import contents
from support.made_reports import usual_report

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.output import is_page, partial_name
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.all_verbs import train
from manycpu.pipeline.verbs.report import write_report

pytestmark = pytest.mark.usefixtures("home", "light_torch")
Script = Callable[..., str]
Type = Callable[..., tuple[int, str]]

WRITES = (
    "import os, sys; open(os.path.join(os.environ['MANYCPU_OUTPUT'], sys.argv[1]), 'w').write('theirs')\n"
)


def fields(tmp_path: Path, program: str, name: str = "model.txt") -> dict[str, Any]:
    return {"program": program, "args": [name], "output": str(tmp_path / "out"), "nproc_per_node": 1}


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_the_page_is_beside_the_report_and_is_no_part_of_the_model(script: Script, tmp_path: Path) -> None:
    out, given = tmp_path / "out", fields(tmp_path, script(WRITES))
    train(given, run_id="x")
    assert is_page((out / "report.html").read_text())
    assert report_of(out)["export"]["files"] == 1
    assert "report.html" not in (out / "manifest.json").read_text()
    assert not transfer.strangers(Location.of(str(out), "run.output"), report_of(out)["key"])
    assert train(given, run_id="x").state == "succeeded"  # it replaces its own
    assert sorted(file.name for file in out.iterdir()) == [
        *("manifest.json", "model.txt", "report.html", "report.json", "run.log")
    ]


SAYS = """
from manycpu.pipeline.node.metrics import progress
progress(step=1, loss=0.5)
print('it says')
"""


def test_what_a_terminal_shows_of_the_ranks_is_beside_the_report(script: Script, tmp_path: Path) -> None:
    for _ in range(2):  # it replaces its own
        train(fields(tmp_path, script(SAYS + WRITES)), run_id="log")
        text = (tmp_path / "out" / "run.log").read_text()
        assert re.findall(r"^(\[rank 0 \S+\]) it says$", text, re.MULTILINE)
        assert "step 1, loss 0.5" in text


def test_a_log_that_the_program_wrote_stays_as_it_is(script: Script, tmp_path: Path) -> None:
    out, given = tmp_path / "out", fields(tmp_path, script(WRITES), "run.log")
    for _ in range(2):
        train(given, run_id="x")
        assert (out / "run.log").read_text() == "theirs"


def test_the_next_run_replaces_the_log_of_one_that_failed(script: Script, tmp_path: Path) -> None:
    with pytest.raises(ManycpuError):
        train(fields(tmp_path, script("print('fails')\nraise SystemExit(3)\n")))
    log = tmp_path / "out" / "run.log"
    assert "fails" in log.read_text()
    assert train(fields(tmp_path, script(WRITES))).state == "succeeded"
    assert "fails" not in log.read_text()


def test_the_clean_up_of_a_failed_run_changes_nothing_in_an_output_that_another_run_has_since(
    script: Script, tmp_path: Path, manycpu: Type, caplog: pytest.LogCaptureFixture
) -> None:
    given, out = fields(tmp_path, script("print('fails')\nraise SystemExit(3)\n")), tmp_path / "out"
    with pytest.raises(ManycpuError):
        train(given | {"keep": "on_failure"}, run_id="failed")
    failed = open_context(given, None, "cli", "failed", base=tmp_path)
    assert failed.ledger.exists()
    train(fields(tmp_path, script(WRITES)))
    before = contents(out)
    code, printed = manycpu("clean", failed.name, "--delete-model", "--yes")
    assert code == 0, printed
    assert f"the report of run {failed.name} is not written: " in caplog.text
    assert contents(out) == before
    assert not failed.ledger.exists()


def test_a_page_that_the_program_wrote_stays_as_it_is(script: Script, tmp_path: Path) -> None:
    out, given = tmp_path / "out", fields(tmp_path, script(WRITES), "report.html")
    for _ in range(2):
        train(given, run_id="x")
        assert (out / "report.html").read_text() == "theirs"
        assert "report.html" in (out / "manifest.json").read_text()


def test_a_page_of_ours_that_the_program_exported_stays_as_it_is(script: Script, tmp_path: Path) -> None:
    out, text = tmp_path / "out", "<!doctype html>\\n<!-- a report of manycpu -->\\nof another run"
    given = fields(tmp_path, script(WRITES.replace("'theirs'", f"'{text}'")), "report.html")
    for _ in range(2):
        train(given, run_id="x")
        assert (out / "report.html").read_text().endswith("of another run")


def test_a_run_that_failed_has_a_page_which_the_next_run_replaces(script: Script, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ManycpuError):
        train(fields(tmp_path, script("raise SystemExit(3)\n")))
    failed = (out / "report.html").read_text()
    assert is_page(failed)
    assert train(fields(tmp_path, script(WRITES))).state == "succeeded"
    assert (out / "report.html").read_text() != failed


def test_a_file_of_that_name_which_no_run_wrote_is_refused(script: Script, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").write_text("theirs")
    with pytest.raises(ManycpuError, match=r"report\.html is in it"):
        train(fields(tmp_path, script(WRITES)))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_fails_no_run(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, given = tmp_path / "out", fields(tmp_path, script(WRITES))
    report = train(given, run_id="x")
    (out / partial_name("report.html")).mkdir()  # where it is written before it is renamed
    write_report(open_context(given, None, "cli", "x", base=tmp_path), report)
    assert f"report.html cannot be written to {out}: " in caplog.text
    assert report_of(out)["state"] == "succeeded"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write a report into a folder."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text(json.dumps(usual_report()))
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["", "report.json"])
def test_a_report_is_shown_in_the_terminal(manycpu: Type, written: Path, name: str) -> None:
    code, printed = manycpu("report", str(written / name))
    assert (code, "succeeded: 4 ranks on 2 hosts, backend ccl" in printed) == (0, True)


def test_a_report_in_the_terminal_says_why_the_run_failed(manycpu: Type, written: Path) -> None:
    error = "the training failed: exit code 2\nerror: \x1b[2J no argument --epochs"
    (written / "report.json").write_text(json.dumps(usual_report(state="failed", error=error)))
    code, printed = manycpu("report", str(written))
    assert (code, printed.splitlines()[-2:]) == (0, error.replace("\x1b", "\\x1b").splitlines())


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "PATH is empty. Give a report.json, or the folder or URL that has one."),
        ("nowhere", "there is no report.json at nowhere. Give a report.json, or the folder or URL that "),
        (".", "there is no report.json at . Give a report.json, or the folder or URL that "),
    ],
)
@pytest.mark.parametrize("words", [[], ["--html"]])
def test_a_report_that_is_nowhere_is_refused_in_one_line(
    manycpu: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = manycpu("report", path, *words)
    assert (code, printed.count("\n")) == (2, 1)
    assert printed.startswith(f"manycpu: {problem}")
    assert not [*tmp_path.iterdir()]


def test_an_empty_path_is_not_the_present_folder(
    manycpu: Type, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written)
    assert manycpu("report", ".")[0] == 0
    assert manycpu("report", " ")[0] == 2


@pytest.mark.parametrize("name", ["", "report.json"])
def test_a_page_goes_beside_the_report(manycpu: Type, written: Path, name: str) -> None:
    for _ in range(2):  # and replaces the one before
        assert manycpu("report", str(written / name), "--html") == (0, f"{written}/report.html\n")
    assert is_page((written / "report.html").read_text())


def test_a_page_goes_where_one_says(manycpu: Type, written: Path, tmp_path: Path) -> None:
    assert manycpu("report", str(written), "--html", str(tmp_path / "x.html"))[0] == 0
    assert is_page((tmp_path / "x.html").read_text())
    assert not (written / "report.html").exists()


def test_a_report_behind_a_url_becomes_a_page_here(
    manycpu: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.pipe("/shown/qa/report.json", json.dumps(usual_report()).encode())
    assert manycpu("report", "memory://shown/qa", "--html") == (0, "report.html\n")
    assert is_page((tmp_path / "report.html").read_text())
    memory.rm("/shown", recursive=True)


def test_half_a_report_and_one_of_an_older_version_are_shown(manycpu: Type, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text('{"key": "0123", "state": "failed", "ranks": 7}')
    code, printed = manycpu("report", str(file))
    assert (code, "not a whole report: see name, attempts, run, target, ranks. --html" in printed) == (
        2,
        True,
    )
    assert manycpu("report", str(file), "--html")[0] == 0
    older = {name: usual_report()[name] for name in ("key", "name", "state", "attempts", "run", "target")}
    file.write_text(json.dumps(older))
    assert manycpu("report", str(file))[0] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no report.json at "),
        ("", "is no report of a run"),
        ("[1]", "is no report of a run"),
        ('{"loss": 0.5}', "is no report of a run"),
        ("[" * 100_000, "is no report of a run"),
        ('{"key": ' * 100_000 + "1" + "}" * 100_000, "is no report of a run"),
    ],
)
def test_what_is_no_report_is_bad_input(manycpu: Type, tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    for words in ((), ("--html",)):
        code, printed = manycpu("report", str(tmp_path), *words)
        assert (code, why in printed, "Traceback" in printed) == (2, True, False)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("deep", [300, 900, 3_000])
def test_a_report_that_is_nested_deeply_is_shown_or_refused(manycpu: Type, tmp_path: Path, deep: int) -> None:
    (tmp_path / "report.json").write_text(
        json.dumps({**usual_report(), "returned": "HERE", "metrics": {"m": "HERE"}}).replace(
            '"HERE"', "[" * deep + "]" * deep
        )
    )
    for words in ((), ("--html",)):
        code, printed = manycpu("report", str(tmp_path), *words)
        assert code == 0 or (code == 2 and re.search("nested too deeply|is no report of a run", printed))


def test_a_path_that_is_taken_for_the_file_of_the_page_is_named(manycpu: Type, written: Path) -> None:
    code, printed = manycpu("report", "--html", str(written))
    assert (code, f"Type: manycpu report {written} --html" in " ".join(printed.split())) == (2, True)
    assert "what follows" not in manycpu("report", "--html")[1]


def test_what_would_steer_the_terminal_is_shown_escaped(manycpu: Type, written: Path) -> None:
    report = usual_report(
        metrics={"\x1b]0;owned\x07f1": 1.5, "note": "\x1b[2J\r\u202e"}, left_behind=["pod\x9b2J"], series={}
    )
    (written / "report.json").write_text(json.dumps(report))
    code, printed = manycpu("report", str(written))
    assert (code, set(printed) & set("\x1b\x07\r\x9b\u202e")) == (0, set())
    assert r"\x1b]0;owned\x07f1" in printed
    assert r"\x1b[2J\r\u202e" in printed


def test_a_curve_over_the_whole_range_of_numbers_is_drawn(manycpu: Type, written: Path) -> None:
    steps = [1, 2.5, 10**400]
    values = [1e308, -1e308, float("nan")]
    loss = {"index": [0, 1, 2], "steps": steps, "times": [1, 2, 3], "values": values}
    (written / "report.json").write_text(json.dumps(usual_report(series={"loss": loss})))
    code, printed = manycpu("report", str(written))
    assert (code, "loss 1e+308 to nan from step 1 to 1000" in " ".join(printed.split())) == (0, True)


def test_a_file_that_is_no_page_is_never_replaced(manycpu: Type, written: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("mine")
    code, printed = manycpu("report", str(written), "--html", str(tmp_path / "notes.html"))
    assert (code, "no page of a report. Give another FILE." in printed) == (2, True)
    assert (tmp_path / "notes.html").read_text() == "mine"
    code, printed = manycpu("report", str(written), "--html", "/dev/full")  # a read of it never ends
    assert (code, "/dev/full exists, and is no page of a report" in printed) == (2, True)
    code, printed = manycpu("report", str(written), "--html", str(tmp_path / "none" / "x.html"))
    assert (code, "cannot be written: No such file or directory" in printed) == (2, True)
