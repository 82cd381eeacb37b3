"""The recipe of handwritten digits, on two ranks."""

import sys
from pathlib import Path

import torch
from support.rank_launches import execute
from torch import nn


def test_a_rank_without_a_row_evaluates_with_the_others(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    torch.save(network.state_dict(), tmp_path / "model.pt")
    (tmp_path / "seen.txt").touch()
    (tmp_path / "rows.csv").write_text(",".join("1" * 65) + "\n\n")  # a row, and a blank line
    script = tmp_path / "evaluate.py"
    script.write_text(
        "from manycpu.pipeline.recipes import digits\nassert digits.evaluate('.', '.')['rows'] == 1\n"
    )
    node = [sys.executable, "-m", "manycpu.pipeline.node", "--nproc-per-node=2", str(script)]
    ended = execute(node, {"MANYCPU_RUN": "digits", "MANYCPU_BACKEND": "gloo"}, tmp_path)
    assert ended.code == 0, ended.out
