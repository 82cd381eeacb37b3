"""A launch kind for tests: the shortest record and launcher with which every verb works.

It starts one rank on each node. Unlike real kinds, it does not tell a pod its rank. A FitJob refers to a
FitRuntime, which has the template of its pods.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.fake_api_server import ApiServer

from manycpu.pipeline.launchers import JOB_LAUNCHERS, JobLauncher, pods
from manycpu.pipeline.launchers.environment import node_command
from manycpu.pipeline.launchers.pod_spec import Ranks, literal
from manycpu.pipeline.launchers.states import job_state
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, ApiResource, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

RUNTIME = ApiResource("FitRuntime", "fit.example", "v1alpha1", "fitruntimes")
FITJOB = JobKind(
    resource=ApiResource("FitJob", "fit.example", "v1alpha1", "fitjobs"),
    operator="fit-operator",
    containers=("trainer",),
    succeeded="Complete",
    suspend=("spec", "suspend"),
    companions=(RUNTIME,),
)


def rank_template(run: TrainingRun, target: Kubernetes, placement: Placement) -> KubeObject:
    """Describe the pods of ranks, with one container."""
    made = pods.container(
        "trainer",
        target,
        placement,
        command=map(literal, ["python3", *node_command(run, placement)]),
        variables=pods.rank_variables(run, placement),
        limits=pods.rank_resources(run),
    )
    return pods.rank_template(made, run, target, placement)


class FitLauncher:
    """A launcher with everything that a file in ``launchers/`` needs."""

    UNSUPPORTED: Mapping[str, str] = {
        "elastic": "a FitJob has a fixed number of nodes",
        "target.mpi": "a FitJob has no MPI",
        "target.runtime": "a FitJob has a runtime of its own",
        "target.restart_policy": "a FitJob restarts as a whole",
    }

    def objects(self, run: TrainingRun, target: Kubernetes, placement: Placement) -> list[KubeObject]:
        template = rank_template(run, target, placement)
        meta = pods.metadata(target, placement)
        runtime = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": template}}}]}
        # The job repeats fields of the runtime: other runs that wait for capacity read only the job.
        trainer = {"numNodes": run.nodes[1], "restarts": run.max_restarts, "podSpec": template["spec"]}
        spec = {"runtimeRef": placement.job, "trainer": trainer} | ({"suspend": True} if target.queue else {})
        return [
            {"apiVersion": RUNTIME.api_version, "kind": RUNTIME.kind, "metadata": meta, "spec": runtime},
            {
                "apiVersion": FITJOB.resource.api_version,
                "kind": FITJOB.resource.kind,
                "metadata": meta,
                "spec": spec,
            },
        ]

    def state(self, job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:  # noqa: ARG002
        return job_state(FITJOB, job)

    def ranks(self, job: KubeObject) -> Ranks | None:
        trainer = job["spec"]["trainer"]
        return Ranks(nodes=trainer["numNodes"], pod=trainer["podSpec"])


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the launch kind: one record and one launcher."""
    launcher: JobLauncher = FitLauncher()
    monkeypatch.setitem(JOB_KINDS, FITJOB.launch, FITJOB)
    monkeypatch.setitem(JOB_LAUNCHERS, FITJOB.launch, launcher)


def operate(server: ApiServer, name: str, *pod_states: KubeObject, ends: str = "") -> list[str]:
    """Do what the operator does with a job: create its pods with these states, and set its condition.

    ``ends`` is the type of the condition; empty: none. Returns the names of the pods.
    """
    (job,) = [one for one in server.objects[FITJOB.kind] if one["metadata"]["name"] == name]
    (runtime,) = [one for one in server.objects[RUNTIME.kind] if one["metadata"]["name"] == name]
    template = runtime["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    made = [_pod(job, template, number, state) for number, state in enumerate(pod_states)]
    for pod in made:
        server.put("Pod", pod)
    holds = [{"type": ends, "status": "True"}] if ends else []
    server.put(FITJOB.kind, job | {"status": {"conditions": holds, "startTime": "now"}})
    return [pod["metadata"]["name"] for pod in made]


def _pod(job: KubeObject, template: KubeObject, number: int, state: KubeObject) -> dict[str, Any]:
    """Return a pod as a JobSet creates it: its name has a random suffix, its host name has none."""
    host = f"{job['metadata']['name']}-node-0-{number}"
    owner = {"kind": FITJOB.kind, "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    meta = {"name": f"{host}-x7k2p", "uid": f"uid-{host}", "ownerReferences": [owner]}
    return {
        "metadata": meta | {"labels": template["metadata"]["labels"]},
        "spec": template["spec"] | {"hostname": host},
        "status": state,
    }
