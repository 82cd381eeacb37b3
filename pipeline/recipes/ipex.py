"""Use Intel's extension for PyTorch, a legacy that ended at torch 2.8, where somebody still has it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from manycpu.pipeline.recipes.emit import say

__all__ = ["misfit", "optimize", "why_not"]

_REPLACED = "torch itself has bf16 autocast, fused AdamW and torch.compile, which are as fast (docs/speed.md)"


def why_not() -> str | None:
    """Explain why the extension cannot be used here; None where it can."""
    try:
        return misfit(version("intel-extension-for-pytorch"), version("torch"))
    except PackageNotFoundError:
        return f"intel-extension-for-pytorch is not installed, and ended at torch 2.8; {_REPLACED}"


def misfit(extension: str, torch: str) -> str | None:
    """Explain a misfit of versions: the extension needs the torch of its own first two numbers.

    >>> misfit("2.8.0+gitabc", "2.8.0+cpu")
    >>> misfit("2.8.0", "2.15.0").partition(";")[0]
    'intel-extension-for-pytorch 2.8.0 needs torch 2.8, and this is torch 2.15.0'
    """
    needed, present = (".".join(number.split(".")[:2]) for number in (extension, torch))
    if needed == present:
        return None
    message = f"intel-extension-for-pytorch {extension} needs torch {needed}, and this is torch {torch}"
    return f"{message}; {_REPLACED}"


def optimize(model: Any, optimizer: Any, dtype: Any) -> tuple[Any, Any]:
    """Optimize a model in training mode, and its optimizer, in place."""
    import intel_extension_for_pytorch as ipex  # type: ignore[import-not-found,unused-ignore]

    say(f"Intel's extension {version('intel-extension-for-pytorch')} optimizes model and optimizer")
    model.train()
    optimized: tuple[Any, Any] = ipex.optimize(model, optimizer=optimizer, dtype=dtype, inplace=True)
    return optimized
