"""Hogwild: several processes train one small network on handwritten digits, without waiting for each other.

Run it as ``python -m manycpu.pipeline.recipes.hogwild``; it takes the options of PyTorch's example of that
name, and reads MNIST's files, or else the digits that come with scikit-learn. Two modes:

``shared``
    One model in shared memory, which all processes update without locks. One rank: memory is one machine's.
``averaged``
    Each process has a model of its own. Every ``--average-every`` steps, and after the last one, all
    processes of all ranks meet, and each continues from the mean of their weights; momentum stays its own.
    Every process takes the same number of steps (those of the rank that has the least data), so that none
    waits for another that does not come.

In both, each process goes through all the data in every epoch, in an order of its own. When a process dies,
the others are ended at once, and the error names it. Nothing is resumed: a retry starts from the beginning.
"""
