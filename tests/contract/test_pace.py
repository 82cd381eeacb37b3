"""How fast each rank goes, told of a program that knows nothing of it, and the curves of what it tells."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from manycpu.pipeline import train

pytestmark = pytest.mark.usefixtures("home", "no_process_left")

UNEVEN = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from manycpu.pipeline.node.metrics import metrics, progress

dist.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 9):
    if dist.get_rank() == 0:
        time.sleep(0.05)
    loss = model(torch.ones(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    progress(step=step, total_steps=8, loss=loss.item())
    metrics({"<b>": step}, step=step)
dist.destroy_process_group()
"""


def test_the_rank_that_others_wait_for_is_seen_and_every_curve_is_kept(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    run = {"program": script(UNEVEN), "output": str(tmp_path / "out"), "nproc_per_node": 2, "backend": "gloo"}
    report = train(run | {"oversubscribe": True})
    slow, fast = (rank.pace for rank in report.ranks)
    assert slow is not None
    assert fast is not None
    assert slow.step == fast.step == 8
    assert slow.step_seconds > 0.04, "the first is slow, and the other waits for it"
    assert fast.step_seconds > 0.04
    assert slow.wait_seconds is not None
    assert fast.wait_seconds is not None
    assert fast.wait_seconds - slow.wait_seconds > 0.02
    assert report.series["loss"].steps == [*range(1, 9)]
    assert report.series["loss"].values[-1] == report.metrics["loss"]
    assert report.series["<b>"].values == [*range(1, 9)]
    assert report.progress is not None
    assert (report.progress.step, report.progress.total_steps) == (8, 8)
    assert [(end["attempt"], end["state"]) for end in report.history] == [(1, "succeeded")]
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["series"]["loss"]["values"] == report.series["loss"].values


ALONE = UNEVEN.replace(
    "model = DistributedDataParallel(torch.nn.Linear(64, 64))", "model = torch.nn.Linear(64, 64)"
)


def test_ranks_that_never_exchange_gradients_are_warned_of(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    run = {"program": script(ALONE), "output": str(tmp_path / "out"), "nproc_per_node": 2, "backend": "gloo"}
    report = train(run | {"oversubscribe": True})
    (warning,) = [text for text in report.warnings if "exchanged nothing" in text]
    assert "in 7 of 7 steps" in warning
    assert "DistributedDataParallel" in warning
