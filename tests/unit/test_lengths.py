"""Steps of samples of like length: their order, what each rank gets, and that a resumed training keeps it."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset  # type: ignore[import-untyped]
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from manycpu.pipeline.recipes.causal_lm.packing import Packs
from manycpu.pipeline.recipes.lengths import LengthGroups, longest_first, token_lengths
from manycpu.pipeline.recipes.trainer import CpuTrainer, CpuTrainingOptions

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

BATCH, RANKS = 4, 2
GROUP = BATCH * RANKS
LENGTHS = np.random.default_rng(0).integers(10, 300, 203)


def groups(seed: int = 0, epoch: int = 0, lengths: Any = LENGTHS) -> list[list[int]]:
    rows = list(LengthGroups(lengths, GROUP, seed, lambda: epoch))
    return [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)]


def padding(batches: list[list[int]]) -> float:
    return float(sum(len(rows) * LENGTHS[rows].max() for rows in batches) / LENGTHS.sum())


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 40, 203])
def test_every_row_comes_once_and_the_longest_first(count: int) -> None:
    lengths = LENGTHS[:count]
    rows = [row for group in groups(lengths=lengths) for row in group]
    assert sorted(rows) == list(range(count))
    if count > GROUP:
        assert lengths[rows[0]] == lengths.max()


def test_steps_are_of_like_length_in_an_order_that_is_not_that_of_lengths() -> None:
    found = groups()
    assert padding(found) < 1.2 < padding([list(range(i, min(i + GROUP, 203))) for i in range(0, 203, GROUP)])
    longest = [int(LENGTHS[group].max()) for group in found[1:]]
    rises = sum(later > earlier for earlier, later in pairwise(longest))
    assert len(longest) // 4 < rises < 3 * len(longest) // 4


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    first = groups(3, 1)
    torch.manual_seed(2)
    assert groups(3, 1) == first
    assert groups(3, 2) != first != groups(4, 1)


def test_ranks_compute_on_like_lengths_at_the_same_time() -> None:
    def batches(rank: int, rows: Any) -> list[list[int]]:
        return list(BatchSamplerShard(BatchSampler(rows, BATCH, drop_last=False), RANKS, rank))

    def imbalance(rows: Any) -> float:
        """Return how much longer a step takes than if the ranks did not wait for the slower of them."""
        own = [batches(rank, rows) for rank in range(RANKS)]
        assert len(own[0]) == len(own[1]) == len(groups())
        assert {row for side in own for batch in side for row in batch} == set(range(203))
        steps = [[int(LENGTHS[batch].max()) for batch in step] for step in zip(*own, strict=True)]
        return sum(map(max, steps)) / (sum(map(sum, steps)) / RANKS)

    assert imbalance(LengthGroups(LENGTHS, GROUP, 0, lambda: 0)) < 1.06
    assert imbalance(range(203)) > 1.08


def test_lengths_are_read_of_rows_as_they_are_ordered() -> None:
    table = Dataset.from_dict({"input_ids": [[1], [1, 2, 3], [], [1, 2, 3]], "row": [0, 1, 2, 3]})
    counted = token_lengths(table.select([3, 0, 2]))
    assert counted is not None
    assert counted.tolist() == [3, 1, 0]
    assert longest_first(table)["row"] == [1, 3, 0, 2]
    assert token_lengths([{"input_ids": [1]}]) is None
    assert token_lengths(table.remove_columns("input_ids")) is None


class Seen(torch.nn.Module):
    """A model that notes the rows it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows: list[tuple[int, ...]] = []

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.rows.append(tuple(sorted(input_ids[:, 0].tolist())))
        return {"loss": self.weight.square().sum()}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": torch.tensor(padded)}


def trainer(folder: Path, table: Any, **options: Any) -> CpuTrainer:
    chosen = CpuTrainingOptions(
        str(folder), per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True, **options
    )
    return CpuTrainer(Seen(), chosen, train_dataset=table, eval_dataset=table, data_collator=collate)


def table(lengths: Any = LENGTHS[:42]) -> Any:
    return Dataset.from_dict({"input_ids": [[row] * length for row, length in enumerate(lengths)]})


def test_a_resumed_training_goes_on_with_the_rows_of_its_epoch(tmp_path: Path) -> None:
    options = {
        "train_sampling_strategy": "group_by_length",
        "num_train_epochs": 3,
        "save_steps": 15,
        "save_strategy": "steps",
    }
    whole = trainer(tmp_path / "whole", table(), **options)
    whole.train()
    seen = whole.model.rows
    assert len(seen) == 33
    assert len({*seen}) > 30  # the order is another one in each epoch
    for epoch in range(3):
        assert Counter(row for step in seen[11 * epoch : 11 * (epoch + 1)] for row in step).total() == 42
    resumed = trainer(tmp_path / "whole", table(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-15"))
    assert resumed.model.rows == seen[15:]


def test_ranks_of_a_resumed_training_skip_batches_of_its_epoch() -> None:
    # Accelerate does not report the epoch through both of its wrappers.
    def batches(skipped: int) -> list[Any]:
        sampler = BatchSampler(LengthGroups(LENGTHS, GROUP, 0, lambda: 1), BATCH, drop_last=False)
        numbers: Any = range(203)
        loader: Any = DataLoader(numbers, batch_sampler=BatchSamplerShard(sampler, RANKS, 1), collate_fn=list)
        return list(skip_first_batches(loader, skipped) if skipped else loader)

    assert batches(5) == batches(0)[5:]


@pytest.mark.parametrize(
    ("strategy", "lengths", "kind"),
    [
        ("group_by_length", [3, 5, 4], LengthGroups),
        ("group_by_length", [4, 4, 4], RandomSampler),
        ("random", [3, 5, 4], RandomSampler),
        ("sequential", [3, 5, 4], SequentialSampler),
    ],
)
def test_rows_are_grouped_only_if_asked_for(
    strategy: str, lengths: list[int], kind: type, tmp_path: Path
) -> None:
    rows = table(lengths)
    chosen = trainer(
        tmp_path, rows, **({"train_sampling_strategy": strategy} if strategy != "random" else {})
    )
    assert chosen.args.train_sampling_strategy == strategy
    assert type(chosen._get_train_sampler(rows)) is kind  # noqa: SLF001
    # Scores come back in the order of the rows, whatever the training does.
    in_order: Any = chosen._get_eval_sampler(rows)  # noqa: SLF001
    assert list(in_order) == [0, 1, 2]


def test_padded_documents_have_their_lengths() -> None:
    rows = {"input_ids": [[1, 2, 3], [4]], "labels": [[1, 2, 3], [4]], "length": [3, 1]}
    lengths = token_lengths(Packs(Dataset.from_dict(rows), None))
    assert lengths is not None
    assert lengths.tolist() == [3, 1]
