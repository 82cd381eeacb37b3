"""MPIJob (kubeflow.org/v2beta1): mpirun in a launcher pod and sshd in the workers, none of them as root.

mpirun gets the same options as on hosts (:mod:`manycpu.pipeline.launchers.mpirun`). The operator writes the
hostfile and makes the keys. It also adds variables to the launcher, which win over manycpu's. So ssh reads
its options from a file. A TrainJob with an MPI has the same pods.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from manycpu.pipeline.launchers import mpirun, pods
from manycpu.pipeline.launchers.pod_spec import HOME, Ranks, literal
from manycpu.pipeline.launchers.states import job_state
from manycpu.pipeline.spec.job_kinds import MPIJOB
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Host, Mpi, Placement
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import DEFAULT_MPI, BareMetal, Family, Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import format_cores

UNSUPPORTED = {
    "elastic": "an MPIJob has a fixed number of nodes; target.launch 'pytorchjob' takes a range",
    "target.runtime": "a runtime is of Trainer; target.launch 'trainjob' has one",
}
IMPLEMENTATIONS: Final[Mapping[Family, str]] = {"intel": "Intel", "openmpi": "OpenMPI", "mpich": "MPICH"}
# Intel's mpirun is a shell script, which as process 1 would not end on SIGTERM.
PROGRAMS: Final[Mapping[Family, str]] = {"intel": "mpiexec.hydra", "openmpi": "mpirun", "mpich": "mpirun"}
HOSTFILE_PATH: Final = f"/etc/mpi/{mpirun.HOSTFILE}"  # where both operators write it
KEYS: Final = "/etc/manycpu/keys"  # not /root/.ssh, which only root can read
OWN: Final = "/run/manycpu"
PORT: Final = 2222
MASTER_PORT: Final = 23456
_CPU_REQUEST, _BURST_FACTOR = 0.05, 10  # cores of mpirun's pod; its limit is a multiple
_MEMORY_MIB, _NODE_MEMORY_MIB = 256, 16  # of mpirun, and of the ssh of each node
HOSTS: Final = f"{HOME}/manycpu-hosts"  # where the launcher writes the addresses of its workers

SSH: Final = f"""\
Include {HOSTS}
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
# A login starts with an empty environment: the container's variables, secrets too, are kept in a file.
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
# sshd ends with 0 on SIGTERM: a Job would take a worker that is deleted for one that has done its work.
START_SSHD: Final = (
    f"umask 077; rm -f {OWN}/*; export -p >{OWN}/environment; "
    f"ssh-keygen -q -t ed25519 -N '' -f {OWN}/host_key || exit; trap 'kill $!; exit 143' TERM; "
    "/usr/sbin/sshd -D -e -f /etc/manycpu/sshd_config & wait; exit 1"
)
SSHD_FILES: Final = {"/etc/manycpu/sshd_config": SSHD}
SSH_FILES: Final = {"/etc/ssh/ssh_config": SSH}

# mpirun gives up on a worker whose sshd does not answer yet, or whose name is not in DNS for a moment.
# All pods start at once: this program waits until each sshd answers, and writes the addresses for ssh.
AWAIT_WORKERS: Final = """\
import os, re, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
hostfile, port, hosts, *program = sys.argv[1:]
found, reported = [], time.monotonic()
for name in [re.split("[: ]", line.strip())[0] for line in open(hostfile) if line.strip()]:
    while True:
        try:
            with socket.create_connection((name, port), 5) as connection:
                if not connection.recv(4).startswith(b"SSH-"):
                    raise OSError("sshd does not speak")
                found.append(f"Host {name}\\n    HostName {connection.getpeername()[0]}\\n")
            break
        except OSError as error:
            if time.monotonic() - reported > 30:
                reported = time.monotonic()
                print(f"mpirun waits for {name}: {error}", file=sys.stderr, flush=True)
            time.sleep(0.5)
with open(hosts, "w") as file:
    file.writelines(found)
os.execvp(program[0], program)
"""


def objects(run: TrainingRun, target: Kubernetes, placement: Placement) -> list[dict[str, Any]]:
    """Build the manifest of the MPIJob, as a list of one.

    Raises:
        BadInputError: mpirun cannot start the run, as for a range of nodes (:func:`mpirun.objects`).
    """
    job, namespace = placement.job, target.namespace
    # The DNS names that the operator gives to the workers.
    hosts = [f"{job}-worker-{number}.{job}.{namespace}.svc" for number in range(run.nodes.most)]
    mpirun_pod = launcher_template("launcher", run, target, placement, hosts=hosts)
    return [
        {
            "apiVersion": MPIJOB.resource.api_version,
            "kind": MPIJOB.resource.kind,
            "metadata": pods.metadata(target, placement),
            "spec": {
                "mpiImplementation": IMPLEMENTATIONS[target.mpi or DEFAULT_MPI],
                "slotsPerWorker": run.processes,
                "sshAuthMountPath": KEYS,
                # So that the launcher is placed with the workers; it waits for them itself.
                "launcherCreationPolicy": "AtStartup",
                # With the default, None, sshd would run for ever.
                "runPolicy": pods.run_policy(run, target, clean="Running", backoff=run.max_restarts),
                "mpiReplicaSpecs": {
                    # A new pod for each restart: a pod is deleted with its last container, log and all.
                    "Launcher": {
                        "replicas": 1,
                        "restartPolicy": "Never",
                        "template": mpirun_pod,
                    },
                    "Worker": {
                        "replicas": run.nodes.most,
                        "restartPolicy": pods.restart_policy(run, target),
                        "template": worker_template("worker", run, target, placement),
                    },
                },
            },
        }
    ]


def launcher_template(  # noqa: PLR0913 - what makes up a launcher
    container: str,
    run: TrainingRun,
    target: Kubernetes,
    placement: Placement,
    *,
    hosts: Sequence[str],
    hostfile: str = HOSTFILE_PATH,
) -> KubeObject:
    """Build the template of the pod that runs mpirun, once the workers' sshd answers.

    Args:
        container: Name of its container.
        run: The run.
        target: The target.
        placement: The attempt's paths.
        hosts: DNS names of the workers, the first of which has rank 0.
        hostfile: Path of the hostfile. The operator writes the file at ``HOSTFILE_PATH``; a file at any other
            path becomes a part of the template.

    Raises:
        BadInputError: mpirun cannot start the run, as for a range of nodes (:func:`mpirun.objects`).
    """
    family = target.mpi or DEFAULT_MPI
    # The placement as mpirun sees it inside the launcher pod: it reads the hostfile in the attempt's folder.
    fields = {
        "attempt_directory": str(PurePosixPath(hostfile).parent),
        "mpi": Mpi(family=family, version="", mpirun=PROGRAMS[family]),  # no option depends on the version
        "hosts": tuple(Host(name) for name in hosts),
        "master_addr": hosts[0],
        "master_port": MASTER_PORT,
        # Workers connect back to an address: the launcher's name may not be in DNS yet.
        "launcher_interface": "eth0",
        "launcher_address": None,
    }
    # To mpirun the workers are hosts that it reaches by ssh; ssh's options are in SSH_FILES.
    on_hosts = BareMetal(hostfile=hostfile, ssh=("ssh",))
    [command] = mpirun.objects(pods.with_manycpu_on_path(run), on_hosts, placement.model_copy(update=fields))
    inner = pods.container(
        container,
        target,
        placement,
        command=map(literal, [*await_workers(hostfile), *command["argv"]]),
        variables={"HOME": HOME} | command["env"],
        limits=_launcher_resources(run),
    )
    files = dict(SSH_FILES)  # a copy: the constant must not get the hostfile
    if hostfile != HOSTFILE_PATH:  # no operator writes it
        files[hostfile] = command["files"][mpirun.HOSTFILE]
    return pods.with_deadline(pods.template(target, placement, "launcher", inner, files), run)


def worker_template(container: str, run: TrainingRun, target: Kubernetes, placement: Placement) -> KubeObject:
    """Build the template of a worker pod, in which mpirun starts ranks by ssh."""
    inner = pods.container(
        container,
        target,
        placement,
        command=["/bin/sh", "-c", literal(START_SSHD)],
        variables=pods.rank_variables(run, placement),
        limits=pods.rank_resources(run),
    )
    # The pod is not ready before sshd answers. Then this probe stops; a readiness probe would continue during
    # the training.
    inner["startupProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": 120}
    template = pods.rank_template(inner, run, target, placement, SSHD_FILES | SSH_FILES)
    # For sshd's host key, and the container's variables, secrets included: in memory, not on a disk.
    own = {"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    return pods.add_volumes(template, [own], {"own": OWN})


def await_workers(hostfile: str = HOSTFILE_PATH) -> list[str]:
    """Return the words to put before a command, so that it starts when each worker's sshd answers."""
    return ["python3", "-IS", "-c", AWAIT_WORKERS, hostfile, str(PORT), HOSTS]


def _launcher_resources(run: TrainingRun) -> dict[str, Any]:
    """Build requests and limits of the launcher pod, which runs mpirun and an ssh for each node.

    The user's values win over the defaults. By default the pod requests little, so that it fits on a machine
    whose other resources the ranks have taken. By default it requests no CPU if the ranks request no CPU, and
    no memory if they request no memory. The CPU limit is ten times the request, even if the user sets that.
    """
    cpu, memory = run.resources.launcher_cpu, run.resources.launcher_memory
    if not cpu and run.resources.cpu:
        cpu = _CPU_REQUEST
    if not memory and run.resources.memory:
        memory = f"{_MEMORY_MIB + _NODE_MEMORY_MIB * run.nodes.most}Mi"
    requests_and_limits = pods.resources(cpu, memory)
    if cpu:  # it requests little, and may use more
        requests_and_limits["limits"]["cpu"] = format_cores(_BURST_FACTOR * cpu)
    return requests_and_limits


def state(job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:  # noqa: ARG001
    """Derive the run's state from the job alone.

    mpirun ends after all ranks, so the pods do not matter: workers that still run have only sshd.
    """
    return job_state(MPIJOB, job)


def ranks(job: KubeObject) -> Ranks | None:
    """Read the number of workers, and the pod spec of each; None: the job has no workers."""
    worker = job["spec"].get("mpiReplicaSpecs", {}).get("Worker")
    if not worker:
        return None
    return Ranks(nodes=worker.get("replicas", 1), pod=worker["template"]["spec"])
