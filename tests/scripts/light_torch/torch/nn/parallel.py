"""Models of several ranks, which nobody makes."""


class DistributedDataParallel:
    """Its name: what is done to a model when one is made."""
