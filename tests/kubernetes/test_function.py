"""A task that trains with a function of the DAG file, over both nodes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.space import Space
from support.handmade_jobs import open_namespace

from manycpu.pipeline.targets.kubernetes.deletion import kinds

pytestmark = pytest.mark.pod_security("restricted")
DAG = """
from airflow.sdk import dag, task

@dag(schedule=None)
def functions():
    @task.manycpu(target={target!r}, retries=0, **{fields!r})
    def fit(data, scale):
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group()
        number = torch.tensor([float(open(os.path.join(data, "number.txt")).read())])
        dist.all_reduce(number)
        return {{"sum": scale * number.item(), "world": dist.get_world_size()}}

    @task
    def check(result):
        assert result == {{"sum": 84.0, "world": 2}}, result

    check(fit(data={data!r}, scale=2))

functions()
"""


def test_both_nodes_call_the_function_and_its_result_is_the_task_s(
    connected: dict[str, Any],
    a_run: Callable[..., dict[str, Any]],
    namespace: Space,
    run_dag: Callable[..., SimpleNamespace],
    tmp_path: Path,
    home: Path,  # noqa: ARG001 - for the worker's files
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "number.txt").write_text("21")
    fields = {name: value for name, value in a_run().items() if name not in ("program", "output")}
    ran = run_dag("functions", DAG.format(target=connected, fields=fields, data=str(tmp_path / "data")))
    assert (ran.state, ran.tasks) == ("success", {"fit": "success", "check": "success"}), ran.said[-4000:]
    ours = {"app.kubernetes.io/managed-by": "manycpu"}
    assert [item for kind in kinds() for item in open_namespace(namespace).list(kind, ours)] == []
