"""Stands in for torch where a training is not about torch: its ranks start in a tenth of the time.

The node's own code runs as ever: the ranks meet at a store, what makes process groups is watched and reported.
"""

import sys
from types import SimpleNamespace

__version__ = "0"


class _Numbers(list):
    def __int__(self):
        return int(self[0])


def ones(count):
    return _Numbers([1] * count)


def _no_ccl():
    from manycpu.pipeline.node.backends import UnavailableError

    raise UnavailableError("it is a library of torch's")


sys.modules["manycpu.pipeline.node.ccl"] = SimpleNamespace(register=_no_ccl)
