"""Stands in for torch where a training is not about torch: its ranks start in a tenth of the time.

The node's own code runs as ever: the ranks meet at a store, what makes process groups is watched and reported.
"""

__version__ = "0"
