"""A training among other tasks: it is wired as any task group of Airflow is."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, Label, TaskGroup, chain, task

from manycpu.operators import ExportModelOperator, TrainingPipeline, training_pipeline
from manycpu.operators.airflow_versions import AirflowFailException

RunDag = Callable[..., SimpleNamespace]
RUN = {"program": "./train.py", "output": None}

AROUND = """
from airflow.sdk import Label, TaskGroup, dag, task
from manycpu.operators import training_pipeline

@dag(schedule=None)
def around():
    @task
    def before(): ...

    @task
    def after(model): print("the model is in", model["path"])

    with TaskGroup("outer"):
        training = training_pipeline(run={run!r}, default_args={{"retries": 0}})
    before() >> Label("good data") >> training >> after(training.output)

around()
"""
SKIPPED = """
from airflow.sdk import dag, task
from manycpu.operators import training_pipeline

@dag(schedule=None)
def skipped():
    @task.branch
    def choose(): return "other"

    @task
    def other(): ...

    @task
    def after(): ...

    choose() >> [training_pipeline(run={run!r}), other()]
    # And what follows a training that was skipped is skipped as well.
    training_pipeline(run={run!r}, group_id="second").set_upstream(choose.override(task_id="choose_2")())

skipped()
"""


@pytest.fixture
def dag() -> DAG:
    return DAG("wired", schedule=None)


def upstream(dag: DAG, task_id: str) -> set[str]:
    return set(dag.get_task(task_id).upstream_task_ids)


@task
def before() -> None: ...


@task
def after(model: Any = None) -> None: ...


def test_a_training_stands_between_tasks(dag: DAG) -> None:
    with dag:
        training = training_pipeline(run=RUN)
        made = before() >> Label("good data") >> training >> Label("trained") >> after(training.output)
    assert made.operator.task_id == "after"
    assert isinstance(training, TaskGroup)
    assert isinstance(training, TrainingPipeline)
    assert upstream(dag, "training.prepare") == {"before"}
    assert upstream(dag, "after") == {"training.export"}
    assert dag.edge_info["before"]["training.upstream_join_id"] == {"label": "good data"}
    assert dag.edge_info["training.downstream_join_id"]["after"] == {"label": "trained"}


def test_trainings_follow_each_other_in_a_chain_and_within_a_group(dag: DAG) -> None:
    with dag:
        with TaskGroup("outer") as outer:
            first = training_pipeline(run=RUN, group_id="first")
            second = training_pipeline(run=RUN, group_id="second")
            first >> second
        chain(before(), outer, [training_pipeline(run=RUN, group_id=name) for name in ("a", "b")], after())
    assert upstream(dag, "outer.first.prepare") == {"before"}
    assert upstream(dag, "outer.second.prepare") == {"outer.first.export"}
    assert upstream(dag, "a.prepare") == upstream(dag, "b.prepare") == {"outer.second.export"}
    assert upstream(dag, "after") == {"a.export", "b.export"}
    train: Any = dag.get_task("outer.first.train")
    assert train.training == "outer.first"


def _serialization() -> Any:
    """Return the class that reads and writes DAGs for Airflow's database."""
    module: Any = importlib.import_module("airflow.serialization.serialized_objects")
    return getattr(module, "DagSerialization", None) or module.SerializedDAG  # the latter in Airflow 3.1


def test_a_part_of_a_dag_has_the_training(dag: DAG) -> None:
    """As Airflow cuts it out for ``dag.test`` and the grid's filter."""
    with dag:
        before() >> training_pipeline(run=RUN)
    read = _serialization().from_dict(_serialization().to_dict(dag))
    part = read.partial_subset("training.train", include_downstream=False, include_upstream=True)
    assert {"before", "training.prepare", "training.train"} <= set(part.task_ids)
    assert "training" in part.task_group.get_task_group_dict()


@pytest.mark.usefixtures("home", "light_torch", "no_process_left")
def test_the_next_task_is_given_the_model(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path
) -> None:
    program = script("import os; open(os.environ['MANYCPU_OUTPUT'] + '/model.txt', 'w').write('m')")
    output = str(tmp_path / "out")
    run = {"program": program, "output": output, "nproc_per_node": 1, "oversubscribe": True}
    ran = run_dag("around", AROUND.format(run=run))
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"})
    assert f"the model is in {output}" in ran.said


@pytest.mark.usefixtures("home", "light_torch", "no_process_left")
def test_a_branch_that_passes_a_training_by_is_no_failure(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path
) -> None:
    ran = run_dag("skipped", SKIPPED.format(run={"program": script(), "output": str(tmp_path / "out")}))
    assert ran.state == "success", ran.tasks
    assert ran.tasks.pop("other") == "success"
    assert {state for name, state in ran.tasks.items() if "choose" not in name} == {"skipped"}


def test_an_export_whose_training_was_marked_successful_by_hand_says_so() -> None:
    nothing: Any = None
    export = ExportModelOperator(task_id="export", run=RUN, handle=nothing)
    with pytest.raises(AirflowFailException, match="handle: None is no handle"):
        export.execute({})
