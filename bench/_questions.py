"""Questions whose inputs have about SQuAD's lengths, made of the demo's paragraphs.

Source of the lengths: with BERT's vocabulary, a question of SQuAD v1.1 with its context has about 150 tokens
on average, and 95 % have fewer than 280. These two figures were given, not measured here: SQuAD is no part of
this repository. Its paragraphs have at least 500 characters (Rajpurkar et al. 2016, section 3.1) and a long
tail; a log-normal distribution with these two figures is drawn from.
"""

import json
import random
from pathlib import Path
from typing import Any

from manycpu.pipeline.recipes.question_answering.demo import DATA

MU, SIGMA = 4.915, 0.437
"""Of the logarithm of tokens: the mean is e^(MU + SIGMA^2 / 2) = 150, 95 % are below e^(MU + 1.645 SIGMA)."""
LONGEST = 600  # SQuAD's longest has more than 800: both are several features
CHARACTERS = 3.75  # of a token of these texts, with their made-up names, in BERT's vocabulary


def write(folder: Path, train: int, validation: int) -> None:
    """Write ``train.json`` and ``validation.json`` with so many questions, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("validation", validation)):
        rng = random.Random(f"{split} {count}")  # noqa: S311 - no secret
        articles = json.loads((DATA / f"{split}.json").read_text(encoding="utf-8"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        asked = [(paragraph, question) for paragraph in paragraphs for question in paragraph["qas"]]
        chosen = rng.sample(asked, min(count, len(asked)))
        made = [_record(paragraph, question, paragraphs, rng) for paragraph, question in chosen]
        (folder / f"{split}.json").write_text(json.dumps({"version": "1.1", "data": made}), encoding="utf-8")


def _record(own: Any, question: Any, paragraphs: list[Any], rng: random.Random) -> dict[str, Any]:
    """Put the paragraph of a question between others, until its length is the drawn one."""
    tokens = min(rng.lognormvariate(MU, SIGMA), LONGEST)
    room = CHARACTERS * tokens - len(question["question"]) - len(own["context"])
    before: list[str] = []
    after: list[str] = []
    while room > 0:
        text = str(rng.choice(paragraphs)["context"])
        if len(text) > room:
            text = text[: text.rfind(" ", 0, max(int(room), 1)) + 1].strip()
        if not text:
            break
        rng.choice((before, after)).append(text)
        room -= len(text) + 1
    lead = " ".join(before) + (" " if before else "")
    record = {name: question[name] for name in ("id", "question")}
    texts = [answer["text"] for answer in question["answers"]]
    starts = [answer["answer_start"] + len(lead) for answer in question["answers"]]
    context = " ".join([*before, own["context"], *after])
    return {
        **record,
        "title": question["id"],
        "context": context,
        "answers": {"text": texts, "answer_start": starts},
    }
