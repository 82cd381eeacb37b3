"""What a user may leave out or mistype: names, paths, protocols; and the help that says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.all_verbs import train

pytestmark = pytest.mark.usefixtures("home", "light_torch")
Script = Callable[..., str]
Type = Callable[..., tuple[int, str]]


def test_the_help_of_a_run_has_panels_and_leaves_the_other_targets_to_help_all(
    manycpu: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, short = manycpu("run", "--help")
    assert code == 0
    assert short.count("\n") < 110
    assert all(f"\n{panel}:\n" in short for panel in ("Program", "Scale", "Deadlines", "Target", "Options"))
    assert "--target-claim" not in short
    assert "--target-hostfile" not in short
    code, whole = manycpu("run", "--help-all")
    assert code == 0
    assert all(f"\nTarget {kind}:\n" in whole for kind in ("baremetal", "kubernetes"))
    assert "--target-claim" in whole
    assert "--target-hostfile" in whole
    assert whole.count("\n") > 1.5 * short.count("\n")


def test_the_help_of_image_has_the_options_of_kubernetes(manycpu: Type) -> None:
    code, printed = manycpu("image", "--help")
    assert (code, "--target-registry" in printed, "--target-hostfile" in printed) == (0, True, False)


def test_logs_without_a_name_are_those_of_the_newest_run(
    manycpu: Type, script: Script, tmp_path: Path, home: Path
) -> None:
    code, printed = manycpu("logs")
    assert (code, f"there is no run in {home}. `manycpu report` shows" in printed) == (2, True), printed
    given = {"program": script("print('hello', flush=True)\n"), "output": None, "nproc_per_node": 1}
    given |= {"keep": "always"}
    for run_id in ("first", "second"):
        train(given, run_id=run_id)
    name = open_context(given, None, "cli", "second", base=tmp_path).name
    code, printed = manycpu("logs")
    assert (code, f"run {name}\n" in printed) == (0, True), printed
    assert "] hello" in printed
    assert manycpu("logs", name)[1] == printed.replace(f"run {name}\n", "")


def test_preflight_takes_the_run_id_of_a_run_that_it_checks_again(
    manycpu: Type, script: Script, tmp_path: Path
) -> None:
    given = {"program": script(), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    train(given, run_id="one")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert manycpu("preflight", *words, "--run-id", "one")[0] == 0
    code, printed = manycpu("preflight", *words, "--run-id", "two")
    assert (code, "is not empty: another run" in printed) == (2, True), printed


def test_report_without_a_path_is_that_of_the_run_that_ended_last(
    manycpu: Type, script: Script, tmp_path: Path
) -> None:
    code, printed = manycpu("report")
    assert (code, "no run has ended on this machine" in printed) == (2, True), printed
    for name, program in (("a", "pass\n"), ("b", "raise SystemExit(3)\n")):
        file = tmp_path / f"{name}.yaml"
        run = {"program": script(program), "output": str(tmp_path / name), "nproc_per_node": 1}
        file.write_text(yaml.safe_dump({"run": run}))
        manycpu("run", str(file))
        assert f"report: {tmp_path / name}/report.json\n" in manycpu("report")[1]
    assert manycpu("report", "--html") == (0, f"{tmp_path}/b/report.html\n")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": "htp://host/x.tar"}, "Protocol not known: htp. Did you mean 'http'?"),
        ({"output": "s33://models/qa"}, "Protocol not known: s33. Did you mean 's3'?"),
        ({"data": "xyzzy://host/x"}, "Protocol not known: xyzzy. Install the package"),
        ({"model": "bert-base-uncased"}, "or a URL, or a model of the Hub as hf://OWNER/bert-base-uncased."),
        (
            {"model": "hf://gpt2"},
            "hf://gpt2 names nothing of the Hub. Name a model of the Hub as hf://OWNER/NAME.",
        ),
        ({"model": "hf://models/me/one"}, "Name a model of the Hub as hf://OWNER/NAME."),
        ({"data": "hf://datasets/squad"}, "Name a data set of the Hub as hf://datasets/OWNER/NAME."),
        ({"model": "google-bert/bert"}, "or a URL, or a model of the Hub as hf://google-bert/bert."),
        ({"data": "rajpurkar/squad"}, "or a URL, or a data set of the Hub as hf://datasets/rajpurkar/squad."),
        ({"model": "../bert"}, "Give the path of a folder or file, or a URL.\n"),
        ({"model": "models/of/mine"}, "Give the path of a folder or file, or a URL.\n"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_was_meant_by_a_source_is_suggested(
    manycpu: Type, script: Script, tmp_path: Path, fields: dict[str, str], said: str
) -> None:
    file = tmp_path / "run.yaml"
    run = {"program": script(), "output": "out", "nproc_per_node": 1, **fields}
    file.write_text(yaml.safe_dump({"run": run}))
    code, printed = manycpu("preflight", str(file))
    assert (code, said in printed) == (2, True), printed


def test_arguments_may_begin_with_a_placeholder(manycpu: Type, script: Script, tmp_path: Path) -> None:
    """Text that begins with a brace is a mapping only where a field takes one."""
    given = ["--program", script(), "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    code, printed = manycpu("render", *given, "--data", str(tmp_path), "--args", "{data} --lr 0.1")
    assert code == 0, printed
    argv = yaml.safe_load(printed)["argv"]
    assert argv[-2:] == ["--lr", "0.1"]
    assert "{" not in argv[-3]
    assert yaml.safe_load(manycpu("render", *given, "--args", "[a, b]")[1])["argv"][-2:] == ["a", "b"]


def test_arguments_given_again_are_added(manycpu: Type, script: Script, tmp_path: Path) -> None:
    given = ["--program", script(), "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    code, printed = manycpu("render", *given, "--args", "--lr '0 1'", "--args", "[-x, y z]", "--args", "-e 2")
    assert code == 0, printed
    assert yaml.safe_load(printed)["argv"][-6:] == ["--lr", "0 1", "-x", "y z", "-e", "2"]
    code, printed = manycpu("render", *given, "--args", "-x", "--args", "it's")
    assert (code, "run.args: " in printed) == (2, True)
