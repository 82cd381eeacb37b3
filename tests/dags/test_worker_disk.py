"""A model on a worker's own disk is nowhere for the next task: said before anything is trained."""

from collections.abc import Callable
from pathlib import Path

import pytest

from manycpu.operators import TrainOperator
from manycpu.operators.steps import worker_disk_findings
from manycpu.pipeline.spec.errors import BadInputError
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
