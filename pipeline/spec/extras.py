"""Extras of the package: which modules each brings, and how it is installed."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from manycpu.pipeline.spec.errors import BadInputError

_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "helper": ("huggingface_hub",),
    "kubernetes": ("cryptography", "kubernetes", "kubernetes_asyncio", "requests", "tenacity", "websocket"),
    "train": ("cloudpickle",),
}
"""Extra -> its modules that a command imports; ranks say themselves what they lack."""


def require(extra: str, field: str, what: str) -> None:
    """Raise unless the modules of an extra are installed; none is imported.

    Raises:
        BadInputError: Some are not; with the line that installs them.
    """
    missing = [module for module in _MODULES[extra] if find_spec(module) is None]
    if missing:
        message = f"{what} needs {', '.join(missing)}, which this environment lacks"
        raise BadInputError(message, field=field, fix=install(extra))


def install(extras: str) -> str:
    """Write the line that installs extras.

    >>> install("train,vision")
    "Install it: pip install 'manycpu[train,vision]'"
    """
    return f"Install it: pip install 'manycpu[{extras}]'"
