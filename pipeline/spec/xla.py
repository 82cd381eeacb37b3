"""What is decided for a run on XLA's devices without torch: how many there are, and where a model belongs.

One process drives all devices of its node: torch_xla's SPMD mode divides each batch among them.
"""

import ast
import re
from collections.abc import Collection, Iterator
from textwrap import dedent
from typing import Final

__all__ = ["DEVICES", "model_advice"]

DEVICES: Final = 8
"""Devices of a node where a run names none: the cores of a TPU host, and Accelerate's default there."""

_MODEL: Final = re.compile(r"[A-Z]\w*(?:Model|For[A-Z]\w*)(?:Head)?|Sequential")
_OTHERS: Final = re.compile(r"DataCollator|Tokenizer|Processor|Config|Arguments|Output")
_MAKERS: Final = ("create_model", "from_pretrained", "from_config")


def model_advice(source: str, modules: Collection[str] = ()) -> str | None:
    """Tell a function that builds its model inside what that costs; None where it seems to build none.

    It goes by names alone, so it is a warning's text and no reason to refuse.

    Args:
        source: The function's source.
        modules: Names of classes that are known to be models, such as subclasses of ``torch.nn.Module``.

    >>> model_advice("def train(model): model.train()") is None
    True
    >>> model_advice("def train(): model = AutoModel.from_pretrained('bert')").partition(":")[0]
    'the function builds its model inside (AutoModel.from_pretrained)'
    """
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:  # a lambda in the middle of a call, a cell with magic words
        return None
    known = {*modules, *_modules_of(tree)}
    call = next((call for call in _calls(tree) if _makes_model(call, known)), None)
    if call is None:
        return None
    return (
        f"the function builds its model inside ({ast.unparse(call)}): every process that runs it holds one "
        "of its own in the host's memory, beside the devices' copy, and makes it anew with each call. "
        "Build it once, outside, and pass it in: notebook_launcher(function, (model,))"
    )


def _calls(tree: ast.AST) -> Iterator[ast.expr]:
    yield from (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))


def _modules_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(_name(base) == "Module" for base in node.bases):
            yield node.name


def _makes_model(call: ast.expr, known: Collection[str]) -> bool:
    name = _name(call)
    if name in known or name == "create_model":
        return True
    if name in _MAKERS and isinstance(call, ast.Attribute):  # tokenizers and configurations have it too
        name = _name(call.value)
    return bool(_MODEL.fullmatch(name)) and not _OTHERS.search(name)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
