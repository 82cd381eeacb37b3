"""Start torchrun in a pod, and say whether it hosts the store for an elastic rendezvous: the first node does.

By itself, torchrun hosts the store if the name of the rendezvous endpoint leads to this machine. DNS may not
know the name of a pod that has just started. Then no node would host the store, and all would wait for it.
"""

import os
import sys
from typing import Final

from torch.distributed.run import main

_CONFIGURATION: Final = "--rdzv-conf="


def with_host(words: list[str], node_rank: int) -> list[str]:
    """Add to torchrun's arguments whether this node hosts the store; only node 0 does.

    >>> with_host(["--rdzv-conf=join_timeout=9", "--no-python", "train", "--rdzv-conf=mine"], node_rank=0)
    ['--rdzv-conf=join_timeout=9,is_host=1', '--no-python', 'train', '--rdzv-conf=mine']
    """
    # The first such word: a later one is the program's own.
    at = next(at for at, word in enumerate(words) if word.startswith(_CONFIGURATION))
    return [*words[:at], f"{words[at]},is_host={int(node_rank == 0)}", *words[at + 1 :]]


if __name__ == "__main__":
    main(with_host(sys.argv[1:], int(os.environ["MANYCPU_NODE_RANK"])))
