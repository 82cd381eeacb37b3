"""Have Accelerate mean on XLA what it says.

torch_xla no longer reads the variables by which it is asked for bf16 (XLA_USE_BF16, XLA_DOWNCAST_BF16).
"""

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["downcasts", "narrowed", "wrap"]

_NARROWER: Final = {torch.float32: torch.bfloat16, torch.float64: torch.float32}


def downcasts() -> bool:
    """Whether ``downcast_bf16`` is asked for, in Accelerate's variable."""
    return bool(os.environ.get("ACCELERATE_DOWNCAST_BF16"))


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Give the tensor as ``downcast_bf16`` has it: float as bfloat16, double as float."""
    return tensor.to(_NARROWER.get(tensor.dtype, tensor.dtype))


def wrap() -> None:
    """Wrap Accelerate's object, where there is one."""
    if importlib.util.find_spec("accelerate") is None:
        return
    from accelerate import Accelerator

    Accelerator.__init__ = _with_autocast(Accelerator.__init__)
    Accelerator.prepare_model = _downcast(Accelerator.prepare_model)


def _with_autocast(original: Callable[..., None]) -> Callable[..., None]:
    """Use autocast on TPUs too: Accelerate leaves it out there, for a variable that is read no more."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.native_amp = self.native_amp or self.mixed_precision == "bf16"
        if downcasts() and self.mixed_precision != "bf16":
            raise ValueError(f"downcast_bf16 needs mixed_precision 'bf16', not {self.mixed_precision!r}")

    return init


def _downcast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_model(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if downcasts():
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.data = narrowed(tensor.data)  # in place: the optimizer has these very parameters
        return original(self, model, *args, **kwargs)

    return prepare_model
