"""One notebook cell trains over both nodes: the example, as a user with a cluster would run it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.space import Space
from support.handmade_jobs import open_namespace
from support.notebooks import EXAMPLES, executed

from manycpu.pipeline.targets.kubernetes.deletion import kinds

pytestmark = pytest.mark.pod_security("restricted")
# The fields that depend on the test cluster: its size.
RUN = {"spread": "require", "resources": {"cpu": 0.9, "memory": "1500Mi"}, "start_timeout": 240}


@pytest.mark.long  # test_function sends a function to both nodes
def test_one_cell_trains_over_both_nodes_and_leaves_nothing(
    target: dict[str, Any], namespace: Space, tmp_path: Path, home: Path
) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"run": RUN, "target": target}))
    *_, launched = executed(EXAMPLES / "two_nodes.ipynb", tmp_path)
    assert not launched.error, launched.error
    assert "Launching training on 2 CPUs (2 nodes x 1)." in launched.printed
    assert "path of this machine" not in launched.printed  # `digits` points to the staged images
    assert "epoch 5: " in launched.printed
    assert float(launched.value) > 90
    assert "report: " in launched.shown
    ours = {"app.kubernetes.io/managed-by": "manycpu"}
    assert [item for kind in kinds() for item in open_namespace(namespace).list(kind, ours)] == []
    assert [*home.glob("runs/*")] == []
