"""Whole runs over both nodes, from a description to the exported model."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.space import Space
from tiny_bert import tiny_checkpoint, tiny_data

from manycpu.pipeline import train, transfer
from manycpu.pipeline.adapters.cluster import Cluster, connect
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.report import Report
from manycpu.pipeline.spec.errors import TrainingFailedError
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.verbs.on_kubernetes.gone import KINDS

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
MakeRun = Callable[..., Fields]
LAUNCHES = {
    "static": ({"launch": "pytorchjob"}, {}),
    "elastic": ({"launch": "pytorchjob"}, {"nnodes": "1:2", "max_restarts": 2}),
    "intel": ({"launch": "mpijob", "mpi": "intel"}, {}),
}


def nothing_is_left(namespace: Space, report: Report) -> None:
    """See that nothing with the run's label is in the namespace."""
    assert report.left_behind == []
    cluster = Cluster(partial(connect, str(namespace.kubeconfig)), namespace.name)
    found = [item for kind in KINDS for item in cluster.list(kind, labels(report.name))]
    assert found == []


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_plain_script_meets_on_both_nodes_and_leaves_nothing(
    launch: str, target: Fields, a_run: MakeRun, namespace: Space, tmp_path: Path
) -> None:
    where, how = LAUNCHES[launch]
    report = train(a_run(**how), target | where, run_id=launch)
    assert (report.state, report.world_size) == ("succeeded", 2)
    assert len(report.hosts) == 2
    assert (tmp_path / "out" / "model.txt").read_text() == "sum 2"
    assert report.image is not None
    assert "@sha256:" in report.image
    nothing_is_left(namespace, report)


def test_the_recipe_learns_and_the_model_comes_out_whole(
    target: Fields, namespace: Space, tmp_path: Path
) -> None:
    run = {
        "program": "question_answering",
        "args": ["--max_seq_length", "48", "--doc_stride", "8", "--per_device_train_batch_size", "4"],
        "data": str(tiny_data(tmp_path / "data")),
        "model": str(tiny_checkpoint(tmp_path / "model")),
        "output": str(tmp_path / "out"),
        "nnodes": 2,
        "spread": "require",
        "resources": {"cpu": 0.6, "memory": "1500Mi"},
        "dtype": "bf16",
    }
    report = train(run, target, run_id="recipe")
    assert (report.state, len(report.hosts)) == ("succeeded", 2)
    assert report.metrics["exact_match"] >= 0
    assert report.export is not None
    exported = transfer.scan(Location.of(report.export["path"], "run.output"))
    written = json.loads((tmp_path / "out" / transfer.MANIFEST).read_text())
    by_path = {file.path: file.sha256 for file in exported.files}
    assert all(by_path[file["path"]] == file["sha256"] for file in written["files"])
    nothing_is_left(namespace, report)


def test_a_failed_rank_is_named_with_its_last_lines(target: Fields, a_run: MakeRun) -> None:
    text = """
import os, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == 1:
    raise SystemExit("the disk of rank 1 is made of cheese")
dist.barrier()
"""
    with pytest.raises(TrainingFailedError, match=r"(?s)rank 1 on node-\w failed first.*made of cheese"):
        train(a_run(text), target, run_id="fails")
