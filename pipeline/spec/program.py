"""Parse ``run.program``: a recipe of ours, a module, or a script.

>>> parse("question_answering")
Program(kind='recipe', name='manycpu.pipeline.recipes.question_answering')
>>> parse("-m mypackage.train")
Program(kind='module', name='mypackage.train')
>>> parse("./train.py")
Program(kind='script', name='./train.py')
"""

from typing import Final, Literal, NamedTuple

__all__ = ["AUTO", "RECIPES", "Program", "parse"]

AUTO: Final = "auto"
"""What ``run.code`` is where the project around the program is to be found."""
RECIPES = {
    "hogwild": "manycpu.pipeline.recipes.hogwild",
    "image_classification": "manycpu.pipeline.recipes.image_classification",
    "question_answering": "manycpu.pipeline.recipes.question_answering",
}


class Program(NamedTuple):
    """A program: for scripts ``name`` is a path, otherwise a module's dotted name."""

    kind: Literal["recipe", "module", "script"]
    name: str


def parse(program: str) -> Program:
    """Parse ``run.program``; a recipe's name wins over a script of the same name."""
    if program in RECIPES:
        return Program("recipe", RECIPES[program])
    if program.startswith("-m"):
        return Program("module", program.removeprefix("-m").strip())
    return Program("script", program)
