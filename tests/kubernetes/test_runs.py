"""Whole runs over both nodes, from a description to the exported model, with all launchers and MPIs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.fixtures import TestCluster
from cluster.space import Space
from support.cluster_runs import LAUNCHES, fields_of, succeeded
from support.training_scripts import ALL_REDUCE

from manycpu.pipeline import train
from manycpu.pipeline.spec.errors import TrainingFailedError

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
MakeRun = Callable[..., Fields]
LIKE_OTHERS = ("static", "intel", "mpich", "trainjob-openmpi", "own-runtime")
"""Launches whose parts others have too: they are for `make test-long`."""
SECRET = "a b'c\"d $x"  # noqa: S105 - not a real secret
KNOWS = f"""
import os
assert os.environ["WORD"] == {SECRET!r}, os.environ["WORD"]
assert os.environ["GREETING"] == "good $(HOME)", os.environ["GREETING"]
"""


@pytest.mark.parametrize(
    "launch",
    [pytest.param(one, marks=[pytest.mark.long] if one in LIKE_OTHERS else []) for one in LAUNCHES],
)
def test_a_plain_script_meets_on_both_nodes_and_leaves_nothing(
    launch: str, cluster: TestCluster, target: Fields, a_run: MakeRun, namespace: Space, tmp_path: Path
) -> None:
    where, how = fields_of(launch, cluster)
    words = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "words"}}
    namespace.create(words | {"stringData": {"WORD": SECRET}})
    env, named = {"GREETING": "good $(HOME)"}, ["words"]
    if launch == "trainjob":  # a TrainJob with a runtime of the cluster cannot use secrets by name
        env, named = env | {"WORD": SECRET}, []
    run = a_run(KNOWS + ALL_REDUCE, env_from=named, env=env, **how)
    assert train(run, target | where, run_id=launch).state == "succeeded"
    report = succeeded(tmp_path / "out", namespace)
    assert (tmp_path / "out" / "model.txt").read_text() == "sum 2"
    assert report.image is not None
    assert "@sha256:" in report.image


@pytest.mark.long  # test_dag trains the recipe by an MPIJob
def test_the_readme_s_run_of_the_recipe_learns_and_the_model_comes_out_whole(
    target: Fields, recipe: Fields, namespace: Space, tmp_path: Path
) -> None:
    assert train(recipe | {"backend": "ccl"}, target, run_id="readme").state == "succeeded"
    report = succeeded(tmp_path / "out", namespace)
    assert (report.backend, report.metrics["train_steps"]) == ("ccl", 6)
    assert report.metrics["exact_match"] >= 0
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_failed_rank_is_named_with_its_last_lines(target: Fields, a_run: MakeRun, tmp_path: Path) -> None:
    text = """
import os, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == 1:
    raise SystemExit("the disk of rank 1 is made of cheese")
dist.barrier()
"""
    with pytest.raises(TrainingFailedError, match=r"(?s)rank 1 on node-\w failed first.*made of cheese"):
        train(a_run(text), target, run_id="fails")
    assert "[rank 1 node-" in (tmp_path / "out" / "run.log").read_text()
