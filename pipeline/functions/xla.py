"""Advice on where to build a model for XLA's devices, from a function's source."""

import ast
import re
from collections.abc import Collection
from textwrap import dedent
from typing import Final

_MODEL: Final = re.compile(r"[A-Z]\w*(?:Model|For[A-Z]\w*)(?:Head)?|Sequential")
_OTHERS: Final = re.compile(r"DataCollator|Tokenizer|Processor|Config|Arguments|Output")
_MAKERS: Final = ("create_model", "from_pretrained", "from_config")


def model_advice(source: str, modules: Collection[str] = ()) -> str | None:
    """Explain what it costs that a function builds its model inside; None: it seems to build none.

    This judges by names alone, so it is the text of a warning and no reason to refuse.

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
    except SyntaxError:  # a lambda within a call, or a cell with magic commands
        return None
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    own = (each.name for each in classes if any(_name(base) == "Module" for base in each.bases))
    known = {*modules, *own}
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    call = next((each for each in called if _makes_model(each, known)), None)
    if call is None:
        return None
    return (
        f"the function builds its model inside ({ast.unparse(call)}): every process that runs it holds one "
        "of its own in the host's memory, beside the devices' copy, and builds it again with each call. "
        "Build it once, outside, and pass it in: notebook_launcher(function, (model,))"
    )


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
