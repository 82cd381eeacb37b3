"""Volcano's Job as a launch kind for tests, which differs from Kubeflow's jobs in several ways.

Its kind has the same name as the Job of the group ``batch``. Its status has a phase, and conditions without a
type. No field suspends it: Volcano's scheduler starts all of its pods, or none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.fake_api_server import ApiServer
from support.job_pods import now
from support.third_kind import rank_template

from manycpu.pipeline.launchers import JOB_LAUNCHERS, JobLauncher, pods
from manycpu.pipeline.launchers.pod_spec import Ranks
from manycpu.pipeline.launchers.states import job_state
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, ApiResource, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

VOLCANOJOB = JobKind(
    resource=ApiResource("Job", "batch.volcano.sh", "v1alpha1", "jobs", alias="VolcanoJob"),
    operator="Volcano",
    containers=("trainer",),
    phases={
        "Completed": "Succeeded",
        "Aborted": "Failed",
        "Failed": "Failed",
        "Terminated": "Failed",
        # Its pods are being ended, or still end by themselves.
        **dict.fromkeys(("Aborting", "Completing", "Terminating"), "Running"),
    },
    suspend=None,
)


class VolcanoLauncher:
    """What a file in ``launchers/`` has."""

    UNSUPPORTED: Mapping[str, str] = {
        "elastic": "a VolcanoJob has a fixed number of nodes",
        "target.mpi": "a VolcanoJob has no MPI",
        "target.queue": "Volcano has its own queues",
        "target.queue_priority": "Volcano has its own queues",
        "target.restart_policy": "a VolcanoJob restarts as a whole",
        "target.runtime": "a VolcanoJob has no runtime",
    }

    def objects(self, run: TrainingRun, target: Kubernetes, placement: Placement) -> list[KubeObject]:
        nodes, template = run.nodes[1], rank_template(run, target, placement)
        template["spec"]["restartPolicy"] = "Never"  # a pod's own default is Always
        spec = {
            "minAvailable": nodes,
            "schedulerName": "volcano",
            "plugins": {"svc": [], "env": []},
            # Volcano ends the job at this number of restarts: so it is one more than allowed. 0 would mean 3.
            "maxRetry": run.max_restarts + 1,
            # Without a policy nothing restarts: failed pods stay, and show why.
            "policies": [{"event": "PodFailed", "action": "RestartJob"}] if run.max_restarts else [],
            "tasks": [
                {
                    "name": "rank",
                    "replicas": nodes,
                    "template": template,
                }
            ],
        }
        resource, meta = VOLCANOJOB.resource, pods.metadata(target, placement)
        return [{"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta, "spec": spec}]

    def state(self, job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:  # noqa: ARG002
        return job_state(VOLCANOJOB, job)

    def ranks(self, job: KubeObject) -> Ranks | None:
        (task,) = job["spec"]["tasks"]
        return Ranks(nodes=task["replicas"], pod=task["template"]["spec"])


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the kind: one record, and one launcher."""
    launcher: JobLauncher = VolcanoLauncher()
    monkeypatch.setitem(JOB_KINDS, VOLCANOJOB.launch, VOLCANOJOB)
    monkeypatch.setitem(JOB_LAUNCHERS, VOLCANOJOB.launch, launcher)


def operate(server: ApiServer, name: str, phase: str, *pod_states: KubeObject) -> list[str]:
    """Do what Volcano does with a job: give it a phase, and create its pods with these states.

    Returns the names of the pods.
    """
    (job,) = [one for one in server.objects[VOLCANOJOB.kind] if one["metadata"]["name"] == name]
    (task,) = job["spec"]["tasks"]
    made = [_pod(job, task["template"], number, state) for number, state in enumerate(pod_states)]
    for pod in made:
        server.put("Pod", pod)
    at = now()
    status = {
        "state": {"phase": phase, "lastTransitionTime": at},
        "minAvailable": job["spec"]["minAvailable"],
        "conditions": [{"status": phase, "lastTransitionTime": at}],
    }
    server.put(VOLCANOJOB.kind, job | {"status": status})
    return [pod["metadata"]["name"] for pod in made]


def _pod(job: KubeObject, template: KubeObject, number: int, state: KubeObject) -> dict[str, Any]:
    name = f"{job['metadata']['name']}-rank-{number}"
    owner = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    group = {"scheduling.k8s.io/group-name": job["metadata"]["name"]}
    meta = {"name": name, "uid": f"uid-{name}", "ownerReferences": [owner], "annotations": group}
    return {
        "metadata": meta | {"labels": template["metadata"]["labels"]},
        "spec": template["spec"] | {"hostname": name, "schedulerName": "volcano"},
        "status": state,
    }
