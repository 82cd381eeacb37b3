"""Scripts that shard their model: the same training as that of one process, over gloo and ccl."""

import json
from pathlib import Path

import pytest
from support import ccl_requirements
from support.rank_launches import Ended
from support.recipe_ranks import WarmNode

SCRIPT = Path(__file__).parents[1] / "scripts" / "sharded.py"


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("gloo", 2),
        ("ccl", 4),
        pytest.param("gloo", 4, marks=pytest.mark.long),
        pytest.param("ccl", 2, marks=pytest.mark.long),
    ],
)
def test_shares_train_as_one_process_does(warm: WarmNode, backend: str, ranks: int, tmp_path: Path) -> None:
    if backend == "ccl" and (missing := ccl_requirements.missing()):
        pytest.skip(str(missing))
    env = {
        "MANYCPU_RUN": "test",
        "MANYCPU_BACKEND": backend,
        "MANYCPU_OUTPUT": str(tmp_path / "out"),
        "MANYCPU_CHECKPOINTS": str(tmp_path / "checkpoints"),
    }
    done = warm.run(ranks, env, str(SCRIPT), str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = (event["values"] for event in Ended(0, done.stdout).events("metrics"))
    assert measured["gradients"] < 1e-5
    assert measured["norm"] < 1e-5
    assert measured["parameters"] < 1e-5
    # Hybrid on one node: a share of all ranks there; tensors are divided by rows, and so not evenly.
    assert measured["share"] == pytest.approx(1 / ranks, abs=0.1)
    assert (measured["step"], measured["resumed"], measured["bf16_gradients_are_fp32"]) == (3, 1, 1)
    exported_equals_the_replica(tmp_path / "out")


def exported_equals_the_replica(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    exported = {
        name: tensor for file in set(index.values()) for name, tensor in load_file(folder / file).items()
    }
    assert set(exported) == set(index)
    expected = torch.load(folder / "replica.pt")
    assert set(expected) - set(exported) == {"head.weight"}, "it is the embedding"
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".model")]
