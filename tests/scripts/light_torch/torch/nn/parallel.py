"""Models of several ranks, which are never made."""


class DistributedDataParallel:
    """Its name: what is done to a model when one is made."""
