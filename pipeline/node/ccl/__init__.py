"""The collective backend ``ccl``: Intel oneCCL for ``torch.distributed`` on CPUs, with current PyTorch.

:func:`register` makes it known to torch, and builds it where that was not done yet; ``python -m
manycpu.pipeline.node.ccl`` builds it ahead, for an image that has no compiler when it runs. With torch 2.8
and earlier Intel's own binding is used, where it is installed.
"""

from manycpu.pipeline.node.ccl.register import awaited, register

__all__ = ["awaited", "register"]
