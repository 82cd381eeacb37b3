"""Ask a trained model: ``python -m manycpu.pipeline.recipes.question_answering.ask MODEL QUESTION CONTEXT``.

transformers 5 has no pipeline for question answering any more; this module replaces it.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from manycpu.pipeline.recipes.question_answering.features import Shape, build, usable_length
from manycpu.pipeline.recipes.question_answering.scoring import Answer, Limits, answers
from manycpu.pipeline.spec.errors import BadInputError


class Reader:
    """A trained model that answers questions about texts.

    Args:
        folder: A model as the recipe leaves it, or the name of one on the Hub.

    Raises:
        OSError: There is no such model.
    """

    def __init__(self, folder: str | Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._tokenizer.padding_side = "right"  # as `build` and `answers` expect
        self._model = AutoModelForQuestionAnswering.from_pretrained(folder, dtype=torch.float32).eval()
        # The recipe's defaults of --max_seq_length and --doc_stride, or less if the model takes less.
        length = usable_length(384, self._tokenizer, self._model.config)
        self._shape = Shape(length, stride=length // 3)

    def answer(self, question: str, context: str, limits: Limits = Limits()) -> Answer:  # noqa: B008 - immutable
        """Answer a question with a part of the context, which may be of any length.

        Raises:
            BadInputError: The question leaves no room for the context.
        """
        # A table of one row. A long context becomes several features; the best answer of all of them counts.
        batch = {"id": ["question"], "question": [question], "context": [context]}
        features = build(batch, [0], self._tokenizer, self._shape)
        inputs = {name: features[name] for name in self._tokenizer.model_input_names if name in features}
        padded = self._tokenizer.pad(inputs, return_tensors="pt")
        with torch.inference_mode():
            scores = self._model(**padded)
        logits = scores.start_logits.numpy(), scores.end_logits.numpy()
        return next(answers([context], features["example"], features["offsets"], logits, limits))


def main(argv: list[str]) -> int:
    """Print the answer to a question; return the exit code: 0, or 2 on wrong input."""
    if len(argv) != 3:  # noqa: PLR2004 - as in the usage
        sys.stderr.write(f"usage: {__spec__.name} MODEL QUESTION CONTEXT\n")
        return 2
    try:
        answer = Reader(argv[0]).answer(argv[1], argv[2])
    except (OSError, BadInputError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(answer.text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
