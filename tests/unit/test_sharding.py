"""Checkpoints of sharded training, of a model that is whole: one process needs no process group."""

from pathlib import Path
from typing import Any

import pytest
import torch

from manycpu.pipeline.node import sharding

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _model_and_optimizer() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    model = torch.nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": model.parameters(), "lr": 0.5}, {"params": []}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def test_an_optimizer_with_groups_of_no_parameters_is_read_back(tmp_path: Path) -> None:
    model, optimizer = _model_and_optimizer()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sharding.save(tmp_path, model, optimizer, step=1)
    other, read = _model_and_optimizer()
    assert sharding.load(tmp_path, other, read) == {"step": 1}
    assert torch.equal(other.weight, model.weight)
    assert [group["lr"] for group in read.param_groups] == [0.1, 0.5, 0.1]
    assert torch.equal(read.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
