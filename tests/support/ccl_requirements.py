"""Whether the backend ccl can be built on this machine."""

from manycpu.pipeline.node.backends import UnavailableError
from manycpu.pipeline.node.ccl import build


def missing() -> str:
    """Return what this machine lacks for the backend ccl; empty if it lacks nothing."""
    try:
        build.find_oneccl()
        build.find_headers()
    except UnavailableError as error:
        return str(error.args[0])
    return "" if build.find_compiler() else "there is no C++ compiler"
