"""DAG `language_model`: a base model is trained, then an adapter of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.in_process_airflow import Ran


# Two ranks of the recipe are in tests/contract/test_causal_lm.py.
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.usefixtures("home", "no_process_left")
def test_a_base_model_is_trained_and_adapted_over_all_ranks(
    run_dag: Callable[..., Ran], tmp_path: Path, ranks: int
) -> None:
    ran = run_dag("language_model", conf={"folder": str(tmp_path / "models"), "ranks": ranks, "steps": 2})
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said
    base, answers = (
        json.loads((tmp_path / "models" / name / "report.json").read_text()) for name in ("base", "answers")
    )
    assert (base["world_size"], answers["world_size"]) == (ranks, ranks)
    assert answers["metrics"]["eval_perplexity"] > 1
    assert answers["metrics"]["sample_1"]
    assert (tmp_path / "models" / "answers" / "adapter" / "adapter_model.safetensors").is_file()
