"""Data, model, checkpoint and output of a run on S3, which pods read and write themselves."""

import base64
import hashlib
import json
import logging
import os
from typing import Any

import pytest
from cluster.fixtures import TestCluster
from cluster.space import Space
from support import s3_server
from support.cluster_runs import objects_of, succeeded_by, target_fields
from support.s3_server import Server
from support.s3fs_images import images_with_s3fs

from manycpu.pipeline import train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.errors import ExportError, StageError
from manycpu.pipeline.spec.events import RankLine

pytestmark = [pytest.mark.pod_security("restricted"), pytest.mark.timeout(1800)]
LARGE = 60 << 20  # more than s3fs reads or writes with one request
# A checkpoint is written to S3 by one rank, and read by the other.
PROGRAM = """
import os, pathlib, fsspec, torch, torch.distributed as dist
dist.init_process_group()
url, rank = os.environ["CHECKPOINT"], dist.get_rank()
if rank == 0:
    with fsspec.open(url, "wb") as file:
        torch.save({"step": torch.tensor(7)}, file)
dist.barrier()
with fsspec.open(url, "rb") as file:
    step = torch.load(file)["step"]
dist.all_reduce(step)
print("steps", int(step), flush=True)
data, model, out = (pathlib.Path(os.environ[f"MANYCPU_{name}"]) for name in ("DATA", "MODEL", "OUTPUT"))
if rank == 0:
    (out / "deep").mkdir()
    (out / "deep" / "large ü.bin").write_bytes((data / "a b" / "%41.bin").read_bytes())
    (out / "words").write_bytes((model / "weights.bin").read_bytes() + b" %d" % int(step))
dist.destroy_process_group()
"""


@pytest.fixture
def run(namespace: Space, server: Server, script: Any) -> dict[str, Any]:
    """Return the fields of a run on a bucket, whose login is in a Secret."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "storage"}}
    namespace.create(secret | {"stringData": server.variables})
    client = server.client()
    client.mkdir("bucket")
    client.pipe_file("bucket/set/a b/%41.bin", os.urandom(LARGE))
    client.pipe_file("bucket/base/weights.bin", b"weights")
    return {
        "program": script(PROGRAM),
        "data": "s3://bucket/set",
        "model": "s3://bucket/base",
        "output": "s3://bucket/out",
        "env_from": ["storage"],
        "env": {"CHECKPOINT": "s3://bucket/checkpoints/7.pt"},
        "nnodes": 2,
        "spread": "require",
        "resources": {"cpu": 0.9, "memory": "1Gi"},
    }


class Watching(Silent):
    """Keeps what the cluster has of a run while its ranks write."""

    def __init__(self, namespace: Space) -> None:
        self.namespace, self.found = namespace, dict[str, str]()

    def line(self, line: RankLine) -> None:
        if not self.found and line.text.startswith("steps"):
            (pod,) = self.namespace.pods("manycpu/role=rank,manycpu/verb=launch")[:1]
            self.found = dict(objects_of(pod.metadata.labels["manycpu/run"], self.namespace))


def test_pods_read_and_write_all_of_a_run_on_s3(
    run: dict[str, Any],
    cluster: TestCluster,
    namespace: Space,
    server: Server,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    target = target_fields(cluster, namespace) | {"launch": "pytorchjob"} | images_with_s3fs(cluster)
    watching = Watching(namespace)
    train(run, target, run_id="whole", listener=watching)
    client = server.client()
    objects = {path.removeprefix("bucket/"): client.cat_file(path) for path in client.find("bucket")}
    succeeded_by(objects["out/report.json"].decode(), namespace)
    assert objects["out/deep/large ü.bin"] == objects["set/a b/%41.bin"]
    assert objects["out/words"] == b"weights 14"
    assert "checkpoints/7.pt" in objects
    manifest = {each["path"]: each["sha256"] for each in json.loads(objects["out/manifest.json"])["files"]}
    assert manifest == {
        name: hashlib.sha256(objects[f"out/{name}"]).hexdigest() for name in ("deep/large ü.bin", "words")
    }
    added = {"report.json", "manifest.json", "run.log", *manifest}
    assert {path.removeprefix("out/") for path in objects if path.startswith("out/")} == added
    assert client.list_multipart_uploads("bucket") == []
    assert namespace.pods() == []
    places = {"log": caplog.text, "printed": "".join(capfd.readouterr()), **watching.found}
    places |= {path: content.decode(errors="replace") for path, content in objects.items()}
    assert "steps 14" in places["out/run.log"]
    assert any(place.startswith("PyTorchJob") for place in places)
    spelled = s3_server.SECRET, base64.b64encode(s3_server.SECRET.encode()).decode()
    assert [place for place, text in places.items() if any(each in text for each in spelled)] == []


def test_a_helper_image_without_s3fs_is_named_before_the_training(
    run: dict[str, Any], cluster: TestCluster, namespace: Space
) -> None:
    target = target_fields(cluster, namespace)
    for output in ("s3://bucket/out", None):  # claimed first, or only read from
        with pytest.raises((ExportError, StageError), match="Install s3fs") as refused:
            train(run | {"output": output}, target, run_id=f"lacks-{bool(output)}")
        assert refused.value.field == ("run.output" if output else "run.data")
        assert "HELPER_REQUIREMENTS in target.build_args" in str(refused.value)
