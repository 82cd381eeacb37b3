"""manycpu on the test cluster, with only the rights that it documents, under Pod Security `restricted`."""

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.fixtures import *  # noqa: F403 - fixtures
from cluster.settings import PROJECT
from support.browser import chromium, page  # noqa: F401 - fixtures
from support.cluster_runs import *  # noqa: F403 - fixtures
from support.cluster_runs import TWO_NODES
from support.deployed_airflow import deployed  # noqa: F401 - fixture
from support.tiny_bert import tiny_checkpoint, tiny_data

from manycpu.pipeline.adapters import cluster_exec
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import ClusterWatch
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.preflight import Right
from manycpu.pipeline.targets.open_run import open_context


@pytest.fixture
def connected(target: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the fields of a target that names an Airflow connection."""
    extra = {"kube_config_path": target["connection"], "namespace": target["namespace"]}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    return target | {"connection": "cluster"}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """Return the fields of the README's run of the recipe, over both nodes, with small data and a tiny model.

    It trains 2 epochs in bf16, with learning rate 3e-5 and a batch of 12 for each process. Windows of 384
    tokens overlap by 128. Each of the 24 contexts has three windows: 6 steps for both ranks.
    """
    found = re.findall(r"```yaml\n# qa.yaml\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    small = {
        "data": str(tiny_data(tmp_path / "data", words=650)),
        "model": str(tiny_checkpoint(tmp_path / "model")),
        "output": str(tmp_path / "out"),
        "nproc_per_node": 1,
        "resources": {"cpu": 0.9, "memory": "1500Mi"},
    }
    return dict(yaml.safe_load(found[0])["run"]) | TWO_NODES | small


@pytest.fixture
def a_context(target: dict[str, Any], tmp_path: Path) -> Callable[..., ClusterContext]:
    """Return a function that opens a run, as prepare does."""

    def make(name: str = "run", run: dict[str, Any] | None = None, **fields: Any) -> ClusterContext:
        described = {"program": "x", "output": str(tmp_path / "out"), "start_timeout": 900} | (run or {})
        ctx = open_context(described, target | fields, name, base=tmp_path)
        assert is_on_kubernetes(ctx)
        ctx.ledger.open(ctx.new_entry(time.time()))
        return ctx

    return make


@pytest.fixture(scope="session")
def used_rights(shared_folder: Path) -> Path:
    """Return the file to which all test processes append the rights that manycpu used, as JSON lines."""
    return shared_folder / "used-rights"


@pytest.fixture(autouse=True)
def _use_of_rights(used_rights: Path) -> Iterator[None]:
    """Record the rights that manycpu uses in this test, at each of its ways to the cluster."""
    known: set[Right] = set()

    def note(rights: Iterable[Right]) -> None:
        with used_rights.open("a") as file:
            file.writelines(f"{json.dumps(right)}\n" for right in set(rights) - known)
        known.update(rights)

    call, answer, start = Cluster._call, ClusterWatch._answer, cluster_exec.start  # noqa: SLF001 - its ways to the cluster

    def calls(self: Cluster, method: str, path: str, query: dict[str, str], body: Any) -> bytes:
        if not _by_a_test():
            note(_rights(method, path, query))
        return call(self, method, path, query, body)

    def answers(self: ClusterWatch, path: str, query: dict[str, str], *more: Any) -> Any:
        note(_rights("GET", path, query))
        return answer(self, path, query, *more)

    def starts(*given: Any) -> Any:
        # Which of them counts depends on the cluster's version.
        note([(verb, "", "pods/exec") for verb in ("create", "get")])
        return start(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "_call", calls)
        patch.setattr(ClusterWatch, "_answer", answers)
        patch.setattr(cluster_exec, "start", starts)
        yield


def _by_a_test() -> bool:
    """Return whether a test calls the cluster, and not manycpu."""
    doors = ("tenacity", "contextlib.py", "adapters/cluster.py", "kubernetes/conftest.py")
    frame = inspect.currentframe()
    while frame is not None and any(door in frame.f_code.co_filename for door in doors):
        frame = frame.f_back
    return frame is not None and "/tests/" in frame.f_code.co_filename


_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/[^/]+/namespaces/[^/]+/(?P<kind>[^/]+)(?:/[^/]+(?P<sub>/.+)?)?"
)
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


def _rights(method: str, path: str, query: Mapping[str, str]) -> list[Right]:
    """Return the right that an API call needs, if the call is in a namespace."""
    found = _PATH.fullmatch(path)
    if found is None:
        return []
    one = path.rpartition("/")[2] != found["kind"]
    read = "get" if one else "watch" if query.get("watch") else "list"
    return [(_VERBS.get(method, read), found["group"] or "", found["kind"] + (found["sub"] or ""))]
