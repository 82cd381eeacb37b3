"""Batches of samples of like length, so that little of a step is spent on padding.

The ranks of a step wait for the one with the longest samples, so a group is a step of all ranks. Groups are
made of samples drawn at random, and come in random order: only the longest comes first, so that a training
that needs more memory than there is fails at once.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import datasets  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pyarrow.compute  # type: ignore[import-untyped]
import torch
from torch.utils.data import Sampler

_GROUPS_PER_DRAW: Final = 50
"""Groups of one random draw, which is sorted by length. More give less padding, and less randomness."""
_LEAST_DRAWS: Final = 4  # of an epoch, also if it has few groups

Lengths = npt.NDArray[np.int64]


def token_lengths(dataset: Any, column: str = "input_ids") -> Lengths | None:
    """Count the tokens of each row, shape (rows,), without reading the tokens; None: the lengths are unknown.

    Lengths are known of data sets with an attribute ``token_lengths``, and of tables of ``datasets`` with the
    column.
    """
    if (counts := getattr(dataset, "token_lengths", None)) is not None:
        return np.asarray(counts, np.int64)
    if not isinstance(dataset, datasets.Dataset) or column not in dataset.column_names:
        return None
    table = dataset.select_columns(column).with_format("arrow")[:]
    counted = pyarrow.compute.list_value_length(table[column])
    return cast("Lengths", counted.to_numpy().astype(np.int64))


def longest_first(dataset: Any) -> Any:
    """Sort a table of ``datasets``, the row with most tokens first; equal rows keep their order.

    So batches have little padding, and an evaluation that needs too much memory fails at once. A data set
    whose lengths are unknown is returned as it is.
    """
    lengths = token_lengths(dataset)
    return dataset if lengths is None else dataset.select(np.argsort(-lengths, kind="stable"))


class LengthGroups(Sampler[int]):
    """Samples every row once in an epoch; the rows of a group come one after another.

    Accelerate deals batches to the ranks in turn, so the batches of one group are one step of all ranks. The
    order depends only on lengths, group, seed and epoch: it is the same on every rank, and after a restart.

    Args:
        lengths: Tokens of each row, (rows,).
        group: Rows of a step: batch x ranks x steps whose gradients are accumulated.
        seed: Seed of the order.
        epoch: Returns the number of the epoch that begins, from 0; called at the beginning of each epoch.
    """

    def __init__(self, lengths: Lengths, group: int, seed: int, epoch: Callable[[], int]) -> None:
        self._lengths, self._group, self._seed, self._epoch = lengths, group, seed, epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        """Yield each row once: groups of like length, in random order after the one with the longest row.

        The rows that fill no group come last.
        """
        generator = torch.Generator().manual_seed(self._seed + self._epoch())
        rows = torch.randperm(len(self), generator=generator).numpy()
        group_count = len(rows) // self._group
        grouped = group_count * self._group  # the number of rows in groups
        longest = int(np.argmax(self._lengths[rows])) if group_count else -1  # its place in `rows`
        # The longest row must be in a group, because only a group can come first: swap it into one.
        if longest >= grouped:
            rows[[0, longest]] = rows[[longest, 0]]
        groups = self._groups(rows[:grouped].reshape(group_count, self._group))
        order = torch.randperm(group_count, generator=generator).tolist()
        # The first row of a group is its longest.
        longest_group = max(order, key=lambda index: int(self._lengths[groups[index][0]]), default=None)
        # Sorting is stable: only the longest group moves, to the front.
        order.sort(key=lambda index: index != longest_group)
        ordered_groups = [groups[index] for index in order]
        return (int(row) for group in [*ordered_groups, rows[grouped:]] for row in group)

    def _groups(self, rows: Lengths) -> list[Lengths]:
        """Cut rows, of shape (groups, rows of a group), into groups of like length, the longest row first.

        Rows are divided into several random draws, and sorted only within a draw. So each epoch has other
        groups.
        """
        least_draws = min(_LEAST_DRAWS, len(rows))  # a draw has one group at least
        draws = max(math.ceil(len(rows) / _GROUPS_PER_DRAW), least_draws, 1)
        # Each draw is a stack of groups: flattened, sorted, and cut into as many groups again.
        return [
            group
            for draw in np.array_split(rows, draws)
            for group in self._sorted(draw.reshape(-1)).reshape(-1, self._group)
        ]

    def _sorted(self, rows: Lengths) -> Lengths:
        """Sort rows by their tokens, the longest first."""
        ordered: Lengths = rows[np.argsort(-self._lengths[rows], kind="stable")]
        return ordered
