"""Tell libraries which devices the run has, before any of them is imported."""

from collections.abc import MutableMapping
from importlib.util import find_spec

__all__ = ["prepare"]


def prepare(environ: MutableMapping[str, str], devices: int | None) -> None:
    """Set what torch_xla, Accelerate and transformers read; only what is not set already.

    Args:
        environ: The environment of the rank.
        devices: Devices of XLA that it drives; None: it trains on CPUs.
    """
    if devices is not None:
        variables = {
            "CPU_NUM_DEVICES": str(devices),  # where there is no TPU, and where PJRT_DEVICE is CPU
            "TF_CPP_MIN_LOG_LEVEL": "2",  # it warns of its partitioner with every compilation
        }
        variables |= {"ACCELERATE_MIXED_PRECISION": "bf16"} if environ.get("MANYCPU_DTYPE") == "bf16" else {}
    elif "MANYCPU_RUN" in environ and find_spec("torch_xla") is not None:
        variables = {"USE_TORCH_XLA": "false"}  # Accelerate would take XLA's device where there is one
    else:
        return
    for name, value in variables.items():
        environ.setdefault(name, value)
