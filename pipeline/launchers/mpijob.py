"""MPIJob (kubeflow.org/v2beta1): mpirun in a launcher pod, sshd in the workers.

The operator writes the hostfile and the keys. ``mpi_pods.py`` describes the pods.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from manycpu.pipeline.launchers import mpi_pods, pods
from manycpu.pipeline.launchers.pod_spec import Ranks
from manycpu.pipeline.launchers.states import job_state
from manycpu.pipeline.spec.job_kinds import MPIJOB
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import DEFAULT_MPI, Family, Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["UNSUPPORTED", "objects", "ranks", "state"]

UNSUPPORTED = {
    "elastic": "an MPIJob has a fixed number of nodes; target.launch 'pytorchjob' takes a range",
    "target.runtime": "a runtime is of Trainer; target.launch 'trainjob' has one",
}

IMPLEMENTATIONS: Final[Mapping[Family, str]] = {"intel": "Intel", "openmpi": "OpenMPI", "mpich": "MPICH"}


def objects(run: TrainingRun, target: Kubernetes, placement: Placement) -> list[dict[str, Any]]:
    """Describe the MPIJob.

    Raises:
        BadInputError: A range of nodes.
    """
    job, namespace = placement.job, target.namespace
    hosts = [f"{job}-worker-{number}.{job}.{namespace}.svc" for number in range(run.nodes[1])]
    launcher = mpi_pods.launcher("launcher", run, target, placement, hosts=hosts)
    return [
        {
            "apiVersion": MPIJOB.resource.api_version,
            "kind": MPIJOB.kind,
            "metadata": pods.metadata(target, placement),
            "spec": {
                "mpiImplementation": IMPLEMENTATIONS[target.mpi or DEFAULT_MPI],
                "slotsPerWorker": run.processes,
                "sshAuthMountPath": mpi_pods.KEYS,
                # So that the launcher is placed with the workers; it waits for them itself.
                "launcherCreationPolicy": "AtStartup",
                # With the default, None, sshd would run for ever.
                "runPolicy": pods.run_policy(run, target, clean="Running", backoff=run.max_restarts),
                "mpiReplicaSpecs": {
                    # A new pod for each restart: a pod is deleted with its last container, log and all.
                    "Launcher": {
                        "replicas": 1,
                        "restartPolicy": "Never",
                        "template": launcher,
                    },
                    "Worker": {
                        "replicas": run.nodes[1],
                        "restartPolicy": pods.restart_policy(run, target),
                        "template": mpi_pods.worker("worker", run, target, placement),
                    },
                },
            },
        }
    ]


def state(job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:  # noqa: ARG001
    """Derive the run's state. mpirun ends after all ranks: workers that still run have only sshd."""
    return job_state(MPIJOB, job)


def ranks(job: KubeObject) -> Ranks | None:
    """Read the number of workers, and the pod spec of each."""
    worker = job["spec"].get("mpiReplicaSpecs", {}).get("Worker")
    return worker and Ranks(nodes=worker.get("replicas", 1), pod=worker["template"]["spec"])
