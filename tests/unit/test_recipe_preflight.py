"""What preflight says of a recipe's data, model and options: it refuses what the ranks would, and no more."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from support.tiny_llama import lines, sums

from manycpu.pipeline.recipes.causal_lm.generate import write_model
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.preflight import preflight

ASKED: Final = {"id": "q", "question": "What is it?", "answers": []}
SQUAD_2: Final = {"data": [{"paragraphs": [{"context": "It is a pen.", "qas": [ASKED]}]}]}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCPU_HOME", str(tmp_path / "home"))


def refused(folder: Path, program: str, **run: Any) -> list[Finding]:
    """Return the fatal findings of a run on this machine."""
    fields = {"program": program, "output": str(folder / "out"), "nproc_per_node": 1, **run}
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
    found = preflight(open_context(texts, {"kind": "local"}, "test", base=folder))
    return [each for each in found if each.fatal]


def written(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no question has an answer"),
        (["--version_2_with_negative"], None),
        (["--version_2_with_negative", "True"], None),
        (["--version_2_with_negative", "False"], "no question has an answer"),
        (["--train_file", "/data/train.json"], None),
        (["--dataset_name", "rajpurkar/squad"], None),
    ],
)
def test_questions_without_answers_are_refused_as_the_options_say(
    tmp_path: Path, args: list[str], message: str | None
) -> None:
    data = written(tmp_path / "data" / "train.json", SQUAD_2).parent
    options = [*args, "--model_name_or_path", "bert-base-uncased"]
    found = refused(tmp_path, "question_answering", data=data, args=options)
    assert [message or "" in each.message for each in found] == ([True] if message else []), found


@pytest.mark.parametrize(
    ("args", "is_read"),
    [([], True), (["--train_file", "/x.jsonl"], False), (["--validation_file", "/x.jsonl"], False)],
)
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_run_data_is_judged_if_the_recipe_reads_it(
    tmp_path: Path, args: list[str], is_read: bool, prefix: str
) -> None:
    data = lines(tmp_path / "data" / "train.jsonl", [{"question": "a"}])
    model, scratch = write_model(tmp_path / "model"), ["--from_scratch", "True"]
    found = refused(tmp_path, "causal_lm", data=f"{prefix}{data}", model=model, args=[*scratch, *args])
    assert [each.field for each in found] == (["run.data"] if is_read else [])


@pytest.mark.parametrize(("args", "is_read"), [([], True), (["--model_name_or_path", "x/other"], False)])
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_run_model_is_judged_if_the_recipe_reads_it(
    tmp_path: Path, args: list[str], is_read: bool, prefix: str
) -> None:
    data = lines(tmp_path / "data" / "train.jsonl", sums(3))
    model = f"{prefix}{write_model(tmp_path / 'model')}"  # without weights
    found = refused(tmp_path, "causal_lm", data=data, model=model, args=args)
    assert [each.field for each in found] == (["run.model"] if is_read else [])
