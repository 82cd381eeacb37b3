"""Plain Kubernetes manifests for the cluster's own tests, independent of manycpu."""

from typing import Any

from cluster.settings import HERE

Manifest = dict[str, Any]
PROGRAM = "/program/allreduce.py"
SCRIPTS = "programs_in_pods"


def program() -> Manifest:
    """Return a ConfigMap with the all-reduce program."""
    text = (HERE / SCRIPTS / "allreduce.py").read_text()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "program"},
        "data": {"allreduce.py": text},
    }


def claim(name: str, storage_class: str, access_mode: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": storage_class,
            "accessModes": [access_mode],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def pod(name: str, image: str, *command: str, node: str | None = None, claim: str | None = None) -> Manifest:
    """Return a pod that runs a command once, on `node` if it is named; the volume of a claim is at /data."""
    container: Manifest = {"name": "main", "image": image, "command": list(command)}
    spec: Manifest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    if claim:
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": spec,
    }


def _template(container: str, image: str, command: list[str], spread: dict[str, str]) -> Manifest:
    """Return a pod template with the program mounted; pods with the labels `spread` go to different nodes."""
    apart = {"labelSelector": {"matchLabels": spread}, "topologyKey": "kubernetes.io/hostname"}
    return {
        "metadata": {"labels": spread},
        "spec": {
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "command": command,
                    "volumeMounts": [{"name": "program", "mountPath": "/program"}],
                }
            ],
            "volumes": [{"name": "program", "configMap": {"name": "program"}}],
        },
    }


def pytorchjob(name: str, image: str) -> Manifest:
    """Return a static PyTorchJob: a master and a worker, on two nodes."""
    template = _template("pytorch", image, ["python3", PROGRAM], {"spread": name})
    replica = {"replicas": 1, "restartPolicy": "OnFailure", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}},
    }


def trainjob(name: str, image: str) -> Manifest:
    """Return a TrainJob: two training nodes with one process each, on two nodes of the cluster."""
    template = _template("node", image, [], {"spread": name})
    mounts = [{"name": "node", "volumeMounts": template["spec"]["containers"][0]["volumeMounts"]}]
    pods = {"metadata": template["metadata"], "spec": template["spec"] | {"containers": mounts}}
    patched = {"name": "node", "template": {"spec": {"template": pods}}}
    patch = {
        "manager": "manycpu.test/cluster",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": image,
                "command": ["torchrun", PROGRAM],
                "numNodes": 2,
                "numProcPerNode": 1,  # the default is the number of the node's CPUs
            },
            "runtimePatches": [patch],
        },
    }
