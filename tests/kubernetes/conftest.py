"""The product on the test cluster: with the rights that it documents, under Pod Security `restricted`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.fixtures import *  # noqa: F403 - the cluster's fixtures are this folder's too
from cluster.fixtures import TestCluster
from cluster.space import Space

TWO_NODES = {
    "nnodes": 2,
    "spread": "require",
    "resources": {"cpu": 0.9, "memory": "1Gi"},
    "start_timeout": 240,
    "acknowledge_timeout": 60,
}


@pytest.fixture
def target(cluster: TestCluster, namespace: Space) -> dict[str, Any]:
    """Give the fields of a target: this test's namespace, and the images that are there."""
    return {
        "kind": "kubernetes",
        "namespace": namespace.name,
        "connection": str(namespace.kubeconfig),
        "image": cluster.image("torch"),
        "helper_image": cluster.image("helper"),
        "registry": f"{cluster.registry}/product",
        "claim_size": "1Gi",
    }


@pytest.fixture
def a_run(script: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Make the fields of a run over both nodes, by default of a script that only meets the others."""

    def make(text: str | None = None, **fields: Any) -> dict[str, Any]:
        program = script(text) if text else script()
        return TWO_NODES | {"program": program, "output": str(tmp_path / "out")} | fields

    return make
