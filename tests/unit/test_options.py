"""Options of older Trainers in today's words."""

from pathlib import Path

import pytest

from manycpu.pipeline.node.script import Program, translate, translated

OLD = ("--bf16", "--ddp_backend", "ccl", "--no_cuda", "--use_ipex", "--lr", "3e-5")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--no_cuda --bf16", "--use_cpu --bf16"),
        ("--no_cuda True --bf16", "--use_cpu=True --bf16"),
        ("--no_cuda=false", "--use_cpu=false"),
        ("--no-cuda", "--use_cpu"),
        ("--use_ipex", ""),
        ("--use_ipex True data", "data"),
        ("--use_ipex data", "data"),
        ("--use_ipex=True --x 1", "--x 1"),
        ("--ddp_backend ccl --x", "--x"),
        ("--ddp_backend=ccl", ""),
        ("--ddp_backend gloo", "--ddp_backend=gloo"),
        ("--ddp-backend=mpi", "--ddp_backend=mpi"),
        ("--ddp_backend", "--ddp_backend"),
        ("--no_cuda_graphs --use_ipexx", "--no_cuda_graphs --use_ipexx"),
    ],
)
def test_every_form(words: str, expected: str) -> None:
    assert translate(words.split(), "gloo")[0] == expected.split()


def test_what_changed_is_said() -> None:
    _, notes = translate(OLD, "gloo")
    assert len(notes) == 3
    assert "'gloo' is used" in notes[0]
    assert translate(["--ddp_backend", "gloo", "--bf16"], "gloo")[1] == []


def test_only_programs_of_the_trainer_are_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script with a parser of its own may know --no_cuda: it keeps it."""
    own, trainers = tmp_path / "own.py", tmp_path / "trainers.py"
    own.write_text("parser.add_argument('--no_cuda')")
    trainers.write_text("from transformers import HfArgumentParser, TrainingArguments")
    kept = Program(str(own), module=False, args=OLD)
    assert translated(kept, "gloo") == kept
    assert capsys.readouterr().out == ""
    changed = translated(Program(str(trainers), module=False, args=OLD), "gloo")
    assert changed.args == ("--bf16", "--use_cpu", "--lr", "3e-5")
    assert capsys.readouterr().out.count('"warning"') == 3


def test_recipes_have_their_options_as_they_were_written() -> None:
    recipe = Program("manycpu.pipeline.recipes.question_answering", module=True, args=OLD)
    assert translated(recipe, "gloo") == recipe


def test_a_module_is_judged_by_all_of_its_package() -> None:
    assert "class TrainingArguments" in Program("transformers.training_args", module=True, args=()).source()
    assert Program("no_such_module", module=True, args=()).source() == ""
