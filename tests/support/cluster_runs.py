"""Whole runs over both nodes: where and how to launch one, and the checks after each."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from cluster.fixtures import TestCluster
from cluster.space import Space
from support.handmade_jobs import open_namespace
from support.mpi_images import with_mpi

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.output import LOG, PAGE, REPORT
from manycpu.pipeline.targets.kubernetes.deletion import kinds

Fields = dict[str, Any]

LAUNCHES: Final[dict[str, tuple[Fields, Fields]]] = {
    "static": ({"launch": "pytorchjob"}, {}),
    "elastic": ({"launch": "pytorchjob"}, {"nnodes": "1:2", "max_restarts": 2}),
    "intel": ({"launch": "mpijob", "mpi": "intel"}, {}),
    "mpich": ({"launch": "mpijob", "mpi": "mpich"}, {}),
    "openmpi": ({"launch": "mpijob", "mpi": "openmpi"}, {}),
    "trainjob": ({"launch": "trainjob"}, {}),
    "trainjob-intel": ({"launch": "trainjob", "mpi": "intel"}, {}),
    "trainjob-openmpi": ({"launch": "trainjob", "mpi": "openmpi"}, {}),
    "own-runtime": ({"launch": "trainjob", "runtime": "own"}, {"max_restarts": 2}),
}
"""Name of a launch -> fields of the target, and fields of the run."""
DAG: Final = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def cluster():
    for launch, run, target in {groups!r}:
        training_pipeline(run=run, target=target, group_id=launch, default_args={{"retries": 0}})

cluster()
"""

TWO_NODES: Final = {
    "nnodes": 2,
    "spread": "require",
    "resources": {"cpu": 0.9, "memory": "1Gi"},
    "start_timeout": 900,
    "acknowledge_timeout": 300,
}


def target_fields(cluster: TestCluster, namespace: Space) -> Fields:
    """Return the fields of a target: a test's namespace, and the cluster's images."""
    return {
        "kind": "kubernetes",
        "namespace": namespace.name,
        "connection": str(namespace.kubeconfig),
        "image": cluster.image("torch"),
        "helper_image": cluster.image("helper"),
        "registry": f"http://{cluster.registry}/product",
        "claim_size": "1Gi",
    }


def fields_of(name: str, cluster: TestCluster) -> tuple[Fields, Fields]:
    """Return the fields of the target and of the run for a launch; the image has the MPI that it needs."""
    where, how = LAUNCHES[name]
    family = where.get("mpi", "intel")
    image = {"image": with_mpi(cluster.image("torch"), family)} if family != "intel" else {}
    return where | image, how


def succeeded(output: Path, namespace: Space) -> Report:
    """Check that a run over both nodes exported a complete model and left nothing; return its report."""
    report = succeeded_by((output / REPORT).read_text(), namespace)
    _delivered(output)
    return report


def succeeded_by(report_json: str, namespace: Space) -> Report:
    """Check by its report, and in the cluster, that a run over both nodes succeeded and left nothing.

    Returns the report.
    """
    report = Report.model_validate_json(report_json)
    assert (report.state, report.error, report.world_size) == ("succeeded", None, 2)
    assert len(report.hosts) == 2
    assert report.left_behind == []
    left = open_namespace(namespace)
    assert [item for kind in kinds() for item in left.list(kind, labels(report.name))] == []
    return report


def objects_of(name: str, namespace: Space) -> Iterator[tuple[str, str]]:
    """Yield name and JSON of each object that belongs to a run, and of the events of its namespace."""
    there = open_namespace(namespace)
    found = [item for kind in kinds() for item in there.list(kind, labels(name))]
    assert {"ConfigMap", "Pod"} < {item["kind"] for item in found}
    yield from ((f"{item['kind']} {item['metadata']['name']}", json.dumps(item)) for item in found)
    yield "events", json.dumps(there.list("Event"))


def _delivered(output: Path) -> None:
    """Check that the files of a model are those of its manifest, with the same hashes."""
    there = {file.path: file.sha256 for file in transfer.scan(Location.of(str(output), "run.output")).files}
    manifest = json.loads((output / transfer.MANIFEST).read_text())
    wanted = {file["path"]: file["sha256"] for file in manifest["files"]}
    assert wanted
    assert {path: there[path] for path in there.keys() - {transfer.MANIFEST, REPORT, PAGE, LOG}} == wanted


@pytest.fixture
def target(cluster: TestCluster, namespace: Space) -> dict[str, Any]:
    """Return the fields of a target: this test's namespace, and the cluster's images."""
    return target_fields(cluster, namespace)


@pytest.fixture
def a_run(script: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that gives the fields of a run over both nodes; by default it does an all-reduce."""

    def make(text: str | None = None, **fields: Any) -> dict[str, Any]:
        program = script(text) if text else script()
        return TWO_NODES | {"program": program, "output": str(tmp_path / "out")} | fields

    return make
