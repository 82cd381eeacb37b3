"""Jobs as `manycpu render` prints them, created by hand: one for each operator."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from cluster.fixtures import TestCluster
from cluster.space import Space
from support.cluster_runs import fields_of

from manycpu.pipeline.cli import cli
from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.event_types import ProofEvent, decode
from manycpu.pipeline.targets.context import Staged
from manycpu.pipeline.targets.kubernetes import launch
from manycpu.pipeline.targets.kubernetes.build import build
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.open_run import open_context

Fields = dict[str, Any]
MakeRun = Callable[..., Fields]
pytestmark = pytest.mark.pod_security("restricted")

SCRIPT = """
import os, torch.distributed as dist
dist.init_process_group()
print(f"rank {dist.get_rank()} has {os.environ['GREETING']!r}", flush=True)
dist.barrier()
"""


def described(ctx: ClusterContext) -> str:
    """Return the job as YAML with its image; `render` prints it without an image."""
    built, _ = build(ctx)
    placement = launch.place(ctx, Staged(), built, entry=None)
    return as_yaml(*JOB_LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement))


def said(namespace: Space, ctx: ClusterContext) -> list[events.RankLine]:
    """Return the lines that all pods of the run have logged."""
    return [
        events.split(line)
        for pod in namespace.pods(f"manycpu/run={ctx.name}")
        if pod.status.phase != "Pending"
        for line in namespace.log(pod.metadata.name).splitlines()
    ]


def proven(lines: list[events.RankLine]) -> list[dict[str, Any]]:
    """Return the proofs of scale among these lines."""
    decoded = [decode(line.text) for line in lines]
    return [event.model_dump() for event in decoded if isinstance(event, ProofEvent)]


@pytest.mark.parametrize("kind", ["static", "intel"])
def test_all_ranks_meet_on_both_nodes(
    kind: str, cluster: TestCluster, target: Fields, a_run: MakeRun, namespace: Space, tmp_path: Path
) -> None:
    where, how = fields_of(kind, cluster)
    run = a_run(SCRIPT, env={"GREETING": "good $(HOME)"}, **how)
    ctx = open_context(run, target | where, "by-hand", kind, base=tmp_path)
    assert is_on_kubernetes(ctx)
    namespace.create(claims.claim(ctx.name, ctx.target, []))
    job = namespace.create(yaml.safe_load(described(ctx)))
    assert namespace.wait_job(job["kind"], job["metadata"]["name"], seconds=300) == "Succeeded"
    lines = said(namespace, ctx)
    proofs = proven(lines)
    assert sorted(proof["rank"] for proof in proofs) == [0, 1], lines
    assert {proof["host"] for proof in proofs} == set(cluster.nodes)
    greeted = {text for *_, text in lines if "has 'good" in text}
    assert greeted == {f"rank {rank} has 'good $(HOME)'" for rank in range(2)}


@pytest.mark.parametrize("kind", ["static", "elastic", "intel"])
def test_kubectl_takes_what_render_prints(
    kind: str, cluster: TestCluster, target: Fields, a_run: MakeRun, tmp_path: Path
) -> None:
    if cluster.own is None:
        pytest.skip("kubectl is among the programs of the project's own cluster only")
    where, how = fields_of(kind, cluster)
    file = tmp_path / "run.yaml"
    fields = {"queue": "team-a", "tolerations": [{"key": "a", "operator": "Exists"}], "priority_class": None}
    file.write_text(json.dumps({"run": a_run(**how), "target": target | where | fields}))
    printed = CliRunner().invoke(cli, ["render", str(file)], catch_exceptions=False).stdout
    said = cluster.own.kubectl("create", "--dry-run=server", "--filename", "-", stdin=printed)
    assert "created (server dry run)" in said
