"""The run file of the page on Kubernetes works as written, from an empty namespace."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from cluster.settings import PROJECT

from manycpu.pipeline.cli import cli
from manycpu.pipeline.run_report import Report

PAGE = (PROJECT / "docs" / "kubernetes.md").read_text()
pytestmark = pytest.mark.pod_security("restricted")


def test_the_run_of_the_page_ends_with_an_exported_model(
    target: dict[str, Any], script: Callable[..., str]
) -> None:
    fields = yaml.safe_load(re.findall(r"```yaml\n# cluster.yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    folder = Path(script()).parent
    (folder / "data").mkdir()
    (folder / "data" / "numbers.txt").write_text("1 2 3")
    # The fields that depend on the test cluster: size, images, connection.
    fields["run"]["resources"] = {"cpu": 0.9, "memory": "1Gi"}
    fields["target"] |= {name: target[name] for name in ("namespace", "registry", "image", "helper_image")}
    fields["target"] |= {"connection": target["connection"], "claim_size": "1Gi"}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(fields))
    said = CliRunner().invoke(cli, ["preflight", str(folder / "cluster.yaml")])
    assert (said.exit_code, "ready" in said.output) == (0, True), said.output
    said = CliRunner().invoke(cli, ["run", str(folder / "cluster.yaml"), "--run-id", "page"])
    assert said.exit_code == 0, said.output
    report = Report.model_validate_json((folder / "models" / "mine" / "report.json").read_text())
    assert (report.state, report.world_size, report.left_behind) == ("succeeded", 2, [])
    assert (folder / "models" / "mine" / "model.txt").read_text() == "sum 2"
