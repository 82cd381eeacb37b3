"""What preflight says of a run for a cluster that cannot be reached."""

from pathlib import Path

from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import is_on_kubernetes
from manycpu.pipeline.targets.open_run import open_context


def test_what_does_not_go_together_is_told_without_the_cluster(tmp_path: Path) -> None:
    run = {"program": "question_answering", "output": str(tmp_path / "out")}
    queue = {"launch": "trainjob", "runtime": "mine", "queue": "team-a"}
    target = {"kind": "kubernetes", "namespace": "ml", "connection": str(tmp_path / "none"), **queue}
    ctx = open_context(run, target, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    found = {one.field: one.message for one in preflight.findings(ctx)}
    assert "no cluster can be reached" in found["target.connection"]
    assert "in a queue the runtime is made for the run" in found["target.runtime"]
