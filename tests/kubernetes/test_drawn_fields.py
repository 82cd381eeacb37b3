"""Drawn runs on a real cluster: what it does not accept, preflight refuses and names the field."""

from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from support.drawn import drawn
from support.drawn_runs import KUBERNETES, RUN, Fields, fields
from support.job_manifests import templates

from manycpu.pipeline.launchers import device_refusals, refusals
from manycpu.pipeline.spec.errors import BadInputError, ClusterError
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.launch import objects
from manycpu.pipeline.targets.open_run import open_context

OF_THE_CLUSTER = ("kind", "namespace", "connection", "image", "registry", "helper_image")
OF_A_TARGET = {name: values for name, values in KUBERNETES.items() if name not in OF_THE_CLUSTER}


def answers(ctx: ClusterContext) -> list[str]:
    """Create the objects of a run and its pods as a dry run; return why the cluster refuses some."""
    written = objects(ctx)
    pods = [as_pod(template, role) for role, template in templates(written).items()]
    companions, job = written[:-1], written[-1]
    refused = []
    for one in [*pods, *companions, *([] if companions else [job])]:  # a job needs its companions
        try:
            cluster_of(ctx).create(one, dry_run=True)
        except ClusterError as error:
            refused.append(error.message)
    return refused


def as_pod(template: KubeObject, role: str) -> KubeObject:
    meta = template["metadata"] | {"name": f"drawn-{role}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"] | {"restartPolicy": "Never"}}


@drawn(40)
@given(fields(RUN, "program", "output"), fields(OF_A_TARGET, "launch"), st.none())
def test_a_cluster_accepts_what_preflight_does_not_refuse_by_name(
    target: Fields, tmp_path: Path, run: Fields, on: Fields, _: None
) -> None:
    try:
        ctx: Any = open_context(run, target | on, "drawn", base=tmp_path)
    except BadInputError:
        assume(False)
    assert is_on_kubernetes(ctx)
    assume(not [*refusals(ctx.run, ctx.target), *device_refusals(ctx.run, ctx.target)])
    refused = answers(ctx)
    if not refused:
        return
    named = {finding.field for finding in preflight.findings(ctx) if finding.fatal}
    given_fields = {f"run.{name}" for name in run} | {f"target.{name}" for name in on}
    print("REFUSED", refused, "\n  NAMED", named)
    assert any(name.startswith(field) for name in named for field in given_fields), refused
