"""Secrets of a run do not appear in any log, XCom, Kubernetes object, report or image."""

import base64
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from cluster.space import Space
from support.cluster_runs import objects_of
from support.registry_images import files, pull

from manycpu.pipeline.cli import cli
from manycpu.pipeline.spec.output import REPORT

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
DAG = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def secretive():
    training_pipeline(run={run!r}, target={target!r}, default_args={{"retries": 0}})

secretive()
"""
SCRIPT = """
import os, torch.distributed as dist
dist.init_process_group()
dist.barrier()
print("the word has", len(os.environ["HUB_WORD"]), "letters", flush=True)
if dist.get_rank() == 0:
    open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model.txt"), "w").write("learned")
"""


@pytest.fixture
def known(target: Fields, namespace: Space, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return three secrets that this run uses: a cluster token, a registry password, a value of a Secret."""
    document = Path(target["connection"]).read_text()
    found = {
        "token": str(yaml.safe_load(document)["users"][0]["user"]["token"]),
        "password": secrets.token_hex(16),
        "value": secrets.token_hex(16),
    }
    kubernetes = {"conn_type": "kubernetes", "extra": {"kube_config": json.dumps(yaml.safe_load(document))}}
    registry = {"conn_type": "docker", "login": "builder", "password": found["password"]}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(kubernetes))
    monkeypatch.setenv("AIRFLOW_CONN_REGISTRY", json.dumps(registry))
    hub = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}}
    namespace.create(hub | {"stringData": {"HUB_WORD": found["value"]}})
    return found


@pytest.mark.parametrize("launch", ["pytorchjob", "mpijob", "trainjob"])
def test_no_secret_is_told(
    launch: str,
    run_dag: Callable[..., SimpleNamespace],
    known: dict[str, str],
    target: Fields,
    a_run: Callable[..., Fields],
    namespace: Space,
    tmp_path: Path,
) -> None:
    run = a_run(SCRIPT, env_from=["hub"], keep="always")
    kind = {"launch": launch} | ({"runtime": "own"} if launch == "trainjob" else {})
    where = target | kind | {"connection": "cluster", "registry_connection": "registry"}
    ran = run_dag("secretive", DAG.format(run=run, target=where))
    assert ran.state == "success", ran.said[-5000:]
    assert "the word has 32 letters" in ran.said
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    places = {
        "the tasks' log": ran.said,
        "what `render` prints": rendered(run, target | kind, tmp_path),
        REPORT: json.dumps(report),
        **dict(of_airflow(ran.run_id)),
        **dict(objects_of(report["name"], namespace)),
        **dict(of_image(report["image"])),
    }
    for what, secret in known.items():
        spelled = {secret, base64.b64encode(secret.encode()).decode()}
        assert {place for place, text in places.items() if any(s in text for s in spelled)} == set(), what


def rendered(run: Fields, target: Fields, folder: Path) -> str:
    file = folder / "run.yaml"
    file.write_text(json.dumps({"run": run, "target": target}))
    printed = CliRunner().invoke(cli, ["render", str(file)], catch_exceptions=False).stdout
    assert "kind: " in printed
    return printed


def of_airflow(run_id: str) -> Iterator[tuple[str, str]]:
    """Yield all XComs and rendered fields of a DAG run from Airflow's database."""
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    with create_session() as session:
        pushed = session.query(XComModel).filter(XComModel.run_id == run_id).all()
        fields = session.query(RenderedTaskInstanceFields).filter_by(run_id=run_id).all()
        assert {"training.train", "training.build", "training.export"} <= {one.task_id for one in pushed}
        yield from ((f"XCom {one.task_id}/{one.key}", json.dumps(one.value, default=str)) for one in pushed)
        yield from ((f"fields of {one.task_id}", json.dumps(one.rendered_fields)) for one in fields)


def of_image(name: str) -> Iterator[tuple[str, str]]:
    """Yield an image's manifest and configuration, and the layers that a run adds to it."""
    image = pull(name)
    yield "image manifest", json.dumps(image.manifest)
    yield "image configuration", image.config_bytes.decode()
    for number in (-2, -1):
        content = files(name, number)
        assert content
        yield f"layer {number}", b"\n".join(content.values()).decode(errors="replace")
