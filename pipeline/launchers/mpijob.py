"""MPIJob (kubeflow.org/v2beta1): mpirun in a launcher pod, sshd in the workers, nobody root.

mpirun is spoken to as on hosts (:mod:`manycpu.pipeline.launchers.mpirun`); the operator writes the hostfile
and the keys. It adds variables to the launcher that win over ours, so that ssh has its options from a file.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from manycpu.pipeline.launchers import conditions, mpirun, pods
from manycpu.pipeline.launchers.pod_spec import HOME, literal
from manycpu.pipeline.launchers.ranks import Ranks
from manycpu.pipeline.spec.job_kinds import MPIJOB
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Host, Mpi, Placement
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["UNSUPPORTED", "await_workers", "objects", "ranks", "state"]

UNSUPPORTED = {
    "elastic": "an MPIJob has a fixed number of nodes; target.launch 'pytorchjob' takes a range",
}

Family = Literal["intel", "openmpi", "mpich"]
IMPLEMENTATIONS: Final[Mapping[Family, str]] = {"intel": "Intel", "openmpi": "OpenMPI", "mpich": "MPICH"}
# Intel's mpirun is a shell script, which as process 1 would not end on SIGTERM.
PROGRAMS: Final[Mapping[Family, str]] = {"intel": "mpiexec.hydra", "openmpi": "mpirun", "mpich": "mpirun"}
HOSTFILE_FOLDER: Final = "/etc/mpi"
KEYS: Final = "/etc/manycpu/keys"  # not /root/.ssh: of that folder only root could read the keys
OWN: Final = "/run/manycpu"
PORT: Final = 2222
MASTER_PORT: Final = 23456
INTERFACE: Final = "eth0"

SSH: Final = f"""\
Host *
    Port {PORT}
    User {pods.USER}
    IdentityFile {KEYS}/id_rsa
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    BatchMode yes
    ConnectionAttempts 10
    ServerAliveInterval 15
    ServerAliveCountMax 4
    LogLevel ERROR
"""
# A login starts from nothing: what Kubernetes gave to the container, secrets too, is kept in a file.
SSHD: Final = f"""\
Port {PORT}
HostKey {OWN}/host_key
AuthorizedKeysFile {KEYS}/authorized_keys
AllowUsers {pods.USER}
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
LogLevel ERROR
ForceCommand . {OWN}/environment; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""
START_SSHD: Final = (
    f"umask 077; rm -f {OWN}/*; export -p >{OWN}/environment; "
    f"ssh-keygen -q -t ed25519 -N '' -f {OWN}/host_key && "
    "exec /usr/sbin/sshd -D -e -f /etc/manycpu/sshd_config"
)
SSHD_FILES: Final = {"/etc/manycpu/sshd_config": SSHD}
SSH_FILES: Final = {"/etc/ssh/ssh_config": SSH}

# mpirun gives up on a worker whose sshd does not answer yet. The operator waits for the workers as well, but
# not where the job was suspended before, by Kueue or by us: then all begin at once.
AWAIT_WORKERS: Final = """\
import os, re, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
hostfile, port, *program = sys.argv[1:]
for line in filter(str.strip, open(hostfile)):
    while True:
        try:
            socket.create_connection((re.split("[: ]", line.strip())[0], port), 5).close()
            break
        except OSError:
            time.sleep(0.5)
os.execvp(program[0], program)
"""


def objects(run: TrainingRun, target: Kubernetes, placement: Placement) -> list[dict[str, Any]]:
    """Describe the MPIJob.

    Raises:
        BadInputError: A range of nodes.
    """
    return [
        {
            "apiVersion": MPIJOB.resource.api_version,
            "kind": MPIJOB.kind,
            "metadata": pods.metadata(target, placement),
            "spec": {
                "mpiImplementation": IMPLEMENTATIONS[target.mpi],
                "slotsPerWorker": run.processes,
                "sshAuthMountPath": KEYS,
                "launcherCreationPolicy": "WaitForWorkersReady",
                # The default is None: sshd would run for ever.
                "runPolicy": pods.run_policy(run, target, clean="Running", backoff=run.max_restarts),
                "mpiReplicaSpecs": {
                    # A new pod for each restart: a pod is deleted with its last container, log and all.
                    "Launcher": {
                        "replicas": 1,
                        "restartPolicy": "Never",
                        "template": _launcher(run, target, placement),
                    },
                    "Worker": {
                        "replicas": run.nodes[1],
                        "restartPolicy": pods.restart_policy(run, target),
                        "template": _worker(run, target, placement),
                    },
                },
            },
        }
    ]


def state(job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:  # noqa: ARG001
    """Read the run's state. mpirun ends after all ranks: workers that still run are sshd alone."""
    return conditions.state(MPIJOB, job)


def ranks(job: KubeObject) -> Ranks | None:
    """Read how many workers there are, and what each asks for."""
    worker = job["spec"].get("mpiReplicaSpecs", {}).get("Worker")
    return worker and Ranks(nodes=worker.get("replicas", 1), pod=worker["template"]["spec"])


def _launcher(run: TrainingRun, target: Kubernetes, placement: Placement) -> dict[str, Any]:
    launcher_placement = _launcher_placement(run, target, placement)
    [command] = mpirun.objects(pods.with_library(run), _hosts(), launcher_placement)
    launcher = pods.container(
        "launcher",
        target,
        placement,
        command=map(literal, [*await_workers(), *command["argv"]]),
        variables={"HOME": HOME} | command["env"],
        limits=_launcher_resources(run),
    )
    return pods.with_end(pods.template(target, placement, "launcher", launcher, SSH_FILES), run)


def await_workers() -> list[str]:
    """Build the start of a command that waits for the workers' sshd."""
    return ["python3", "-IS", "-c", AWAIT_WORKERS, f"{HOSTFILE_FOLDER}/{mpirun.HOSTFILE}", str(PORT)]


def _launcher_resources(run: TrainingRun) -> dict[str, Any]:
    """Size the launcher: it starts mpirun and passes on lines. Without limits where the ranks have none."""
    return pods.resources(run.resources.cpu and 0.5, run.resources.memory and "512Mi")


def _worker(run: TrainingRun, target: Kubernetes, placement: Placement) -> dict[str, Any]:
    worker = pods.container(
        "worker",
        target,
        placement,
        command=["/bin/sh", "-c", literal(START_SSHD)],
        variables=pods.rank_variables(run, placement),
        limits=pods.rank_resources(run),
    )
    # Not ready before sshd answers; unlike a readiness probe this one does not go on through the training.
    probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": 120}
    worker |= {"startupProbe": probe}
    template = pods.rank_template(worker, run, target, placement, SSHD_FILES | SSH_FILES)
    own = {"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    return pods.add_volumes(template, [own], {"own": OWN})


def _hosts() -> BareMetal:
    return BareMetal(hostfile=f"{HOSTFILE_FOLDER}/{mpirun.HOSTFILE}", ssh=("ssh",))


def _launcher_placement(run: TrainingRun, target: Kubernetes, placement: Placement) -> Placement:
    hosts = [
        f"{placement.job}-worker-{number}.{placement.job}.{target.namespace}.svc"
        for number in range(run.nodes[1])
    ]
    fields = {
        "attempt_directory": HOSTFILE_FOLDER,
        "mpi": Mpi(family=target.mpi, version="", mpirun=PROGRAMS[target.mpi]),
        "hosts": tuple(Host(name) for name in hosts),
        "master_addr": hosts[0],
        "master_port": MASTER_PORT,
        # Workers connect back to an address: the launcher's name may not have reached DNS yet.
        "launcher_interface": INTERFACE,
        "launcher_address": None,
    }
    return placement.model_copy(update=fields)
