"""Whether the backend ccl can be had on this machine."""

from manycpu.pipeline.node.backends import UnavailableError
from manycpu.pipeline.node.ccl import toolchain

__all__ = ["missing"]


def missing() -> str:
    """What it lacks; empty where it has all."""
    try:
        toolchain.find_oneccl()
    except UnavailableError as error:
        return str(error.args[0])
    return "" if toolchain.find_compiler() else "there is no C++ compiler"
