"""Runs of all launch kinds that start together, on a cluster with space for two of them."""

import json
from pathlib import Path
from typing import Any, Final

from support.handmade_jobs import Looker, begin

from manycpu.pipeline.launchers.mpijob import PORT, await_workers
from manycpu.pipeline.launchers.trainjob import NODE, NUMBER, RANKS, STEP
from manycpu.pipeline.spec.job_kinds import TRAINING_RUNTIME, TRAINJOB
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.launch import _create

ROOM: Final = 2  # number of runs that fit at once
# A node of two cores has space for two ranks and a launcher, but not for three ranks.
RANK_CPU, LAUNCHER_CPU = "700m", "50m"
LAUNCHES: Final = ("pytorchjob", "mpijob", "trainjob")
WORK: Final = "time.sleep({seconds})"
# Sends the first line of an ssh server to each client that checks for one.
SSHD: Final = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
while True:
    with server.accept()[0] as one:
        one.sendall(b"SSH-2.0-test")
"""
# Like torchrun: no rank starts its work before both are connected.
MEET: Final = """
host, _, domain = socket.getfqdn().partition(".")
if rank == 0:
    socket.create_server(("", 23456)).accept()
while rank:
    try:
        socket.create_connection((f"{host[:-1]}0.{domain}".rstrip("."), 23456), 5)
        break
    except OSError:
        time.sleep(0.1)
"""


def start(target: dict[str, Any], image: str, folder: Path, number: int, seconds: float) -> Looker:
    """Create the job of one run, whose ranks work for ``seconds``, and return its follower.

    The launch kinds alternate by ``number``.
    """
    launch = LAUNCHES[number % len(LAUNCHES)]
    waiting = begin(target | {"launch": launch}, image, folder, name=f"turn-{number}", nnodes=2)
    work = WORK.format(seconds=seconds)
    if launch == "trainjob":
        objects = _as_trainjob(waiting.pytorchjob(MEET + work))
        return Looker(waiting.ctx, waiting.attempt(_create(waiting.ctx, objects)))
    meet, change = ("", _as_mpijob) if launch == "mpijob" else (MEET, _apart)
    return Looker(waiting.ctx, waiting.create(meet + work, change=change))


def hold(target: dict[str, Any], image: str, folder: Path, launchers_on: dict[str, str]) -> Looker:
    """Create an MPIJob that can block another one, and return its follower.

    The workers of two such jobs fit on the cluster, but not their launchers as well. ``launchers_on`` is the
    node selector of the launcher.
    """
    waiting = begin(target, image, folder, name="holds", nnodes=2)

    def change(job: KubeObject) -> None:
        _as_mpijob(job)
        kinds = job["spec"]["mpiReplicaSpecs"]
        kinds["Launcher"]["template"]["spec"]["nodeSelector"] = launchers_on
        (launcher,) = kinds["Launcher"]["template"]["spec"]["containers"]
        launcher["resources"]["requests"]["cpu"] = RANK_CPU

    return Looker(waiting.ctx, waiting.create(WORK.format(seconds=1), change=change))


def _apart(job: KubeObject) -> None:
    """Place each rank's pod on a different node; each requests so much CPU that two pods fit on a node."""
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    like = {"matchLabels": dict(template["metadata"]["labels"])}
    term = {"labelSelector": like, "topologyKey": "kubernetes.io/hostname"}
    rule = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    template["spec"]["affinity"] = rule
    template["spec"]["containers"][0]["resources"] = {"requests": {"cpu": RANK_CPU, "memory": "20Mi"}}


def _as_trainjob(job: KubeObject) -> list[KubeObject]:
    """Turn a PyTorchJob into a TrainJob with the same pods; return the job's own runtime, and the job."""
    _apart(job)
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["spec"]["restartPolicy"] = "Never"
    (container,) = template["spec"]["containers"]
    container["name"] = NODE
    container["env"][0]["valueFrom"] = {"fieldRef": {"fieldPath": NUMBER}}
    pods = {"metadata": {"labels": STEP}, "spec": {"backoffLimit": 0, "template": template}}
    runtime = {
        "apiVersion": TRAINING_RUNTIME.api_version,
        "kind": TRAINING_RUNTIME.kind,
        "metadata": dict(job["metadata"]),
        "spec": {
            "mlPolicy": {"numNodes": 2, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": NODE, "template": pods}]}},
        },
    }
    ref = {"apiGroup": TRAINING_RUNTIME.group, "kind": TRAINING_RUNTIME.kind, "name": job["metadata"]["name"]}
    job["apiVersion"], job["kind"] = TRAINJOB.resource.api_version, TRAINJOB.kind
    job["metadata"]["annotations"] = {RANKS: json.dumps(template["spec"])}
    job["spec"] = {"runtimeRef": ref, "trainer": {"numNodes": 2, "numProcPerNode": 1}}
    return [runtime, job]


def _as_mpijob(job: KubeObject) -> None:
    """Turn the job into an MPIJob: the launcher runs both ranks, and the workers only accept connections."""
    _apart(job)
    worker = job["spec"].pop("pytorchReplicaSpecs")["Worker"]
    inner = worker["template"]["spec"]["containers"][0]
    speak = inner["command"]
    inner["command"] = ["python3", "-c", SSHD, str(PORT)]
    inner["startupProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": 120}
    both = 'RANK_HERE=1 "$0" "$@" & RANK_HERE=0 "$0" "$@" && wait $!'
    fields = [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    launcher = {
        "name": "launcher",
        "image": inner["image"],
        "command": [*await_workers(), "/bin/sh", "-c", both, *speak],
        "resources": {"requests": {"cpu": LAUNCHER_CPU, "memory": "20Mi"}},
        "env": fields,
    }
    spec = {"terminationGracePeriodSeconds": 0, "containers": [launcher]}
    known = {"labels": worker["template"]["metadata"]["labels"] | {"manycpu/role": "launcher"}}
    job["apiVersion"], job["kind"] = "kubeflow.org/v2beta1", "MPIJob"
    job["spec"] |= {
        "launcherCreationPolicy": "AtStartup",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "restartPolicy": "Never",
                "template": {"metadata": known, "spec": spec},
            },
            "Worker": worker,
        },
    }
