"""Drawn runs on a real cluster: what it does not accept, preflight refuses and names the field."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import event, given
from support.drawn import drawn
from support.drawn_runs import KUBERNETES, RUN, Fields, fields
from support.job_manifests import templates

from manycpu.pipeline.launchers import device_refusals, refusals
from manycpu.pipeline.spec.errors import BadInputError, ClusterError
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.launch import objects
from manycpu.pipeline.targets.open_run import open_context

OF_THE_CLUSTER = ("kind", "namespace", "connection", "image", "registry", "helper_image")
OF_A_TARGET = {name: values for name, values in KUBERNETES.items() if name not in OF_THE_CLUSTER}

REFUSALS = range(400, 429)


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
            if error.status not in REFUSALS:  # it did not answer
                raise
            refused.append(error.message)
    return refused


def as_pod(template: KubeObject, role: str) -> KubeObject:
    (container,) = template["spec"]["containers"]  # that of a TrainJob has its image elsewhere
    spec = template["spec"] | {"restartPolicy": "Never", "containers": [{"image": "x"} | container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"drawn-{role}"}, "spec": spec}


def is_named(findings: Iterable[str], given: Iterable[str]) -> bool:
    """Whether a finding is of a field that was given."""
    return any(found.startswith(field) for found in findings for field in given)


@drawn(40, shrink=False)
@given(fields(RUN, "program", "output"), fields(OF_A_TARGET, "launch"))
def test_a_cluster_accepts_what_preflight_does_not_refuse_by_name(
    target: Fields, tmp_path: Path, run: Fields, on: Fields
) -> None:
    named = [*(f"run.{name}" for name in run), *(f"target.{name}" for name in on)]
    try:
        ctx: Any = open_context(run, target | on, "drawn", base=tmp_path)
        if [*refusals(ctx.run, ctx.target), *device_refusals(ctx.run, ctx.target)]:
            event("refused by the launch kind")
            return
        refused = answers(ctx)
    except BadInputError as error:
        event("refused before the cluster is asked")
        assert is_named([error.field] if error.field else str(error).split(), named), error  # noqa: PT017
        return
    event("refused by the cluster" if refused else "accepted")
    if refused:
        found = [finding for finding in preflight.findings(ctx) if finding.fatal]
        assert is_named([finding.field for finding in found], named), (refused, found)
