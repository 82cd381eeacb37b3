"""The recipe of handwritten digits, on two ranks."""

import sys
from pathlib import Path

import torch
from support.rank_launches import Ended, execute
from torch import nn


def test_a_rank_without_a_row_evaluates_with_the_others(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    torch.save(network.state_dict(), tmp_path / "model.pt")
    (tmp_path / "seen.txt").touch()
    (tmp_path / "rows.csv").write_text(",".join("1" * 65) + "\n\n")  # a row, and a blank line
    ended = on_two_ranks("assert digits.evaluate('.', '.')['rows'] == 1", tmp_path)
    assert ended.code == 0, ended.out


def test_fewer_rows_than_ranks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text((",".join("1" * 65) + "\n") * 2)
    ended = on_two_ranks("digits.fit(0.1, '.', '.')", tmp_path)
    assert ended.code == 1
    assert "ValueError: 1 of 2 rows are to train on: too few for 2 ranks" in ended.out
    assert not (tmp_path / "model.pt").exists()


def on_two_ranks(call: str, folder: Path) -> Ended:
    script = folder / "script.py"
    script.write_text(f"from manycpu.pipeline.recipes import digits\n{call}\n")
    node = [sys.executable, "-m", "manycpu.pipeline.node", "--nproc-per-node=2", str(script)]
    return execute(node, {"MANYCPU_RUN": "digits", "MANYCPU_BACKEND": "gloo"}, folder)
