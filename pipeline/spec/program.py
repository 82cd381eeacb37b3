"""The program of a run: parse ``run.program``; find the files and the imports of a module in a folder.

>>> parse("question_answering")
Program(kind='recipe', name='manycpu.pipeline.recipes.question_answering')
>>> parse("-m mypackage.train")
Program(kind='module', name='mypackage.train')
>>> parse("./train.py")
Program(kind='script', name='./train.py')
"""

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

AUTO: Final = "auto"
"""Value of ``run.code`` that means: find the project around the program."""
RECIPES = {
    "causal_lm": "manycpu.pipeline.recipes.causal_lm",
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


def files_of(root: Path, name: str) -> Iterator[Path]:
    """Yield the files of a top-level module in the folder ``root``: its one file, or its package's files.

    Nothing if the folder has no such module.
    """
    if (root / f"{name}.py").is_file():
        yield root / f"{name}.py"
    elif (root / name).is_dir():
        for file in (root / name).rglob("*"):
            # Data files are part of a package if their own folder has an __init__.py.
            is_part = file.suffix == ".py" or (file.parent / "__init__.py").is_file()
            if is_part and file.is_file() and file.suffix != ".pyc":
                yield file


def imports_of(file: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports, except by relative imports.

    Nothing if the file cannot be parsed as Python.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it would fail as well
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def copy_files(modules: set[str], root_of: Callable[[str], Path | None], folder: Path) -> None:
    """Copy top-level modules, and the modules that they import in turn, to a folder for the ranks.

    ``root_of`` returns the folder that a module is copied from; None: the ranks have the module already.
    """
    needed = {*modules}
    done = {"__main__"}
    while names := needed - done:  # until no copied file imports another module
        done |= names
        files: list[tuple[Path, Path]] = []  # the folder that a file is copied from, and the file
        for name in names:
            root = root_of(name)
            if root is not None:
                files += [(root, file) for file in files_of(root, name)]
        for root, file in files:
            destination = folder / file.relative_to(root)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, destination)
            if file.suffix == ".py":
                needed |= {*imports_of(file)}
