"""A model on a worker's own disk is nowhere for the next task: said before anything is trained."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from manycpu.operators import TrainOperator
from manycpu.operators.steps import bundle_findings, prepare_run, worker_disk_findings
from manycpu.pipeline.spec.errors import BadInputError, ForeignRunError
from manycpu.pipeline.targets.open_run import open_context

POD = "airflow.providers.cncf.kubernetes.executors.kubernetes_executor.KubernetesExecutor"


def found(executor: str | None, output: str | None, target: dict[str, str]) -> list[tuple[str, bool]]:
    ctx = open_context({"program": "-m x", "output": output}, target, "test", base=Path("/"))
    return [(finding.field, finding.fatal) for finding in worker_disk_findings(ctx, executor)]


@pytest.mark.parametrize(
    ("executor", "output", "fields"),
    [
        (POD, "/models", [("run.output", True)]),
        ("CeleryExecutor", "/models", [("run.output", False)]),
        ("LocalExecutor", "/models", []),
        (None, "/models", []),  # the tests' own Airflow has a local one
        (POD, "/proc/models", []),  # a mount stands for a volume
        (POD, "dir://models::file:///models", []),
        (POD, None, []),
    ],
)
def test_an_output_on_a_disk_that_goes_with_its_worker(
    executor: str | None, output: str | None, fields: list[tuple[str, bool]]
) -> None:
    assert found(executor, output, {"kind": "kubernetes"}) == fields


def test_the_folder_of_runs_on_machines_has_to_last_too() -> None:
    assert found(POD, "/proc/x", {"kind": "local", "directory": "/runs"}) == [("target.directory", True)]
    assert found(POD, "/proc/x", {"kind": "local", "directory": "/proc/runs"}) == []


def test_a_pod_of_kubernetes_executor_that_is_configured_with_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")
    assert found(None, "/models", {"kind": "kubernetes"}) == [("run.output", True)]
    assert found(None, "/proc/models", {"kind": "kubernetes"}) == []


def test_an_empty_dir_goes_with_its_pod_too(tmp_path: Path) -> None:
    ctx = open_context(
        {"program": "-m x", "output": "/proc/models"}, {"kind": "kubernetes"}, "test", base=Path("/")
    )
    volumes = "/var/lib/kubelet/pods/1d-2e/volumes"
    mounts = tmp_path / "mountinfo"

    def found_with(folder: str, disk: str = "ext4 /dev/vda1") -> list[str]:
        mounts.write_text(
            f"22 1 0:21 / / rw - overlay overlay rw\n23 22 254:1 {folder} /proc rw master:1 - {disk} rw\n"
        )
        return [finding.field for finding in worker_disk_findings(ctx, POD, mounts) if finding.fatal]

    assert found_with(f"{volumes}/kubernetes.io~empty-dir/models") == ["run.output"]
    assert found_with("/", "tmpfs tmpfs") == ["run.output"]  # medium: Memory
    assert found_with(f"{volumes}/kubernetes.io~local-volume/models") == []


@pytest.mark.usefixtures("home")
def test_a_task_that_prepares_its_own_run_refuses_such_a_disk(script: Callable[..., str]) -> None:
    task = TrainOperator(task_id="train", executor=POD)
    ctx = open_context({"program": script(), "output": "/models"}, None, "test", base=Path("/"))
    with pytest.raises(BadInputError, match=r"run\.output: /models is on the disk of this worker"):
        task.stage_and_build_if_needed(ctx)


def test_a_folder_in_the_copy_of_a_dag_bundle_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., str]
) -> None:
    """Airflow deletes such a copy, and with it a model to which a relative path in the DAG leads."""
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", str(tmp_path / "bundles"))
    run = {"program": script(), "output": "models/qa"}
    commit = tmp_path / "bundles" / "dags-in-git" / "versions" / "5cf05ee0"
    (tmp_path / "link").symlink_to(tmp_path / "bundles")
    for base in (commit, tmp_path / "link" / "dags-in-git"):
        ctx = open_context(run, {"directory": str(tmp_path / "runs")}, "test", base=base)
        with pytest.raises(BadInputError, match=r"run\.output: .*/models/qa is in Airflow's own copy"):
            prepare_run(ctx, None, logging.getLogger())
    for output in (None, str(tmp_path / "models"), "dir://models::file:///models"):
        given = run | {"output": output, "checkpoints": "checkpoints"}
        ctx = open_context(given, {"directory": "runs"}, "test", base=commit)
        fields = [finding.field for finding in bundle_findings(ctx)]
        assert fields == ["target.directory", "run.checkpoints"]


@pytest.mark.usefixtures("home")
def test_only_a_run_that_begins_needs_an_airflow_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., str]
) -> None:
    """A run that an earlier version began, which needed no name, ends as it began."""
    run = {"program": script(), "output": f"dir://models::file://{tmp_path}", "nproc_per_node": 1}
    ctx = open_context(run, None, "test", base=Path("/"))
    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "")
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "")
    with pytest.raises(ForeignRunError, match="this Airflow has no unique name"):
        prepare_run(ctx, None, logging.getLogger())
    assert not ctx.ledger.exists()
    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "team-a")
    prepare_run(ctx, None, logging.getLogger())
    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "")
    prepare_run(ctx, None, logging.getLogger())
