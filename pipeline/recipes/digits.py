"""Handwritten digits of 8x8 pixels in CSV files: fit a small network, evaluate it, and predict with it.

``dags/champion.py`` trains it. A row is the digit and its 64 pixels; a row to predict has no digit.
"""

import csv
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manycpu.pipeline.node.metrics import metrics, progress

_STEPS: Final = 100
_REPORT_INTERVAL: Final = 20  # steps
_VALIDATION_SHARE: Final = 5  # every fifth row compares candidates, and is not trained on
_MODEL, _SEEN = "model.pt", "seen.txt"


def fit(rate: float, data: str, output: str) -> dict[str, float]:
    """Train on every rank's share of the rows; write the model, and digests of all rows for ``evaluate``.

    Args:
        rate: The learning rate.
        data: A folder of CSV files.
        output: The folder to write to.

    Returns:
        The rate, and the share of the validation rows that the network gets right, 0 to 1.

    Raises:
        ArithmeticError: The training diverged.
        ValueError: A rank would have no row to train on.
    """
    dist.init_process_group()
    torch.manual_seed(0)
    rows = _read(data)
    validation = rows[::_VALIDATION_SHARE]
    train = [row for number, row in enumerate(rows) if number % _VALIDATION_SHARE]
    rank, size = dist.get_rank(), dist.get_world_size()
    if len(train) < size:
        raise ValueError(f"{len(train)} of {len(rows)} rows are to train on: too few for {size} ranks")
    network = _network()
    model = DistributedDataParallel(network)  # trains `network` itself: they share their weights
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    images, labels = _labelled(train[rank::size])
    for step in range(1, _STEPS + 1):
        loss: Any = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not torch.isfinite(loss):
            raise ArithmeticError(f"the training diverged at step {step}: rate {rate:g} is too high")
        if step % _REPORT_INTERVAL == 0:
            progress(step=step, total_steps=_STEPS, loss=loss.item())
    images, labels = _labelled(validation)
    accuracy = float((network(images).argmax(1) == labels).float().mean())
    metrics({"accuracy": accuracy, "rows": len(rows)}, step=_STEPS)
    if rank == 0:
        torch.save(network.state_dict(), Path(output) / _MODEL)
        Path(output, _SEEN).write_text("\n".join(map(_digest, rows)) + "\n")
    dist.destroy_process_group()
    return {"rate": rate, "accuracy": accuracy}


def evaluate(model: str, data: str) -> dict[str, float]:
    """Evaluate a model, each rank on its share of the rows.

    Returns:
        The share of the rows that it gets right, 0 to 1, and the number of rows.

    Raises:
        ValueError: The model has seen one of the rows.
    """
    dist.init_process_group()
    rows = _read(data)
    seen_digests = set(Path(model, _SEEN).read_text().split())
    if seen_rows := sum(_digest(row) in seen_digests for row in rows):
        raise ValueError(f"the model has seen {seen_rows} of the {len(rows)} rows to evaluate it on")
    images, labels = _labelled(rows[dist.get_rank() :: dist.get_world_size()])
    right = (_load(model)(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    accuracy = right.item() / len(rows)
    metrics({"holdout_accuracy": accuracy})
    dist.destroy_process_group()
    return {"accuracy": accuracy, "rows": len(rows)}


def predict(model: str, data: str, output: str) -> dict[str, int]:
    """Predict the digit of each row, each rank for its share, and write all digits in the order of the rows.

    Returns:
        The number of rows.
    """
    dist.init_process_group()
    rows = _read(data)
    rank, size = dist.get_rank(), dist.get_world_size()
    predicted = _load(model)(_images(rows[rank::size])).argmax(1).tolist()
    digits_of_ranks: list[list[int]] = [[] for _ in range(size)]
    dist.all_gather_object(digits_of_ranks, predicted)
    if rank == 0:
        # Row number n is in the share of rank n modulo size.
        lines = [f"{row},{digits_of_ranks[row % size][row // size]}" for row in range(len(rows))]
        Path(output, "predictions.csv").write_text("\n".join(["row,digit", *lines]) + "\n")
    dist.destroy_process_group()
    return {"rows": len(rows)}


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _load(model: str) -> nn.Module:
    network = _network()
    network.load_state_dict(torch.load(Path(model) / _MODEL, weights_only=True))
    return network


def _read(folder: str) -> list[list[int]]:
    """Read the rows of every file of a folder, by name, without blank lines."""
    files = sorted(Path(folder).glob("*.csv"))
    rows = (row for file in files for row in csv.reader(file.read_text().splitlines()))
    return [list(map(int, row)) for row in rows if row]


def _labelled(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows into images (rows, 64) and labels (rows,)."""
    return _images([row[1:] for row in rows]), torch.tensor([row[0] for row in rows])


def _images(rows: list[list[int]]) -> torch.Tensor:
    # Reshaped, since a rank may have no row; 16 is the greatest value of a pixel.
    return torch.tensor(rows).reshape(len(rows), 64) / 16


def _digest(row: Iterable[int]) -> str:
    return hashlib.sha256(",".join(map(str, row)).encode()).hexdigest()
