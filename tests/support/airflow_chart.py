"""Airflow's objects in a namespace, in the shape in which its official Helm chart deploys them.

They are rendered from examples/airflow, so tests deploy what the docs recommend. The chart itself needs Helm.
This module makes only what matters to manycpu: accounts, rights, variables, configuration, the template of
the pods of tasks, and the commands.
"""

import configparser
import re
import secrets
from base64 import urlsafe_b64encode
from io import StringIO
from typing import Any, Final

import yaml
from cluster.settings import PROJECT

Manifest = dict[str, Any]
Values = dict[str, Any]
CELERY: Final = "CeleryExecutor"
PORT: Final = 8080
_COMPONENTS: Final = ("api-server", "scheduler", "dag-processor", "triggerer")
_LOG_PORTS: Final = {"triggerer": 8794, "worker": 8793}
_HOME: Final = "/opt/airflow"
_USER: Final = {"runAsUser": 50000, "fsGroup": 0}
_EXAMPLES: Final = PROJECT / "examples" / "airflow"
_RBAC: Final = "rbac.authorization.k8s.io"
_GROUPS: Final = {
    "Deployment": "apps/",
    "StatefulSet": "apps/",
    "Job": "batch/",
    "Role": f"{_RBAC}/",
    "RoleBinding": f"{_RBAC}/",
}
_PODS: Final = {"apiGroups": [""], "resources": ["pods"]}
_LOGS: Final = {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list", "watch"]}
# Roles in Airflow's own namespace: the rules, and the components whose accounts have them.
_RIGHTS: Final = {
    "pod-launcher": ([_PODS | {"verbs": ["create", "delete", "patch"]}, _LOGS], ("scheduler", "worker")),
    "pod-log-reader": ([_LOGS], ("api-server", "triggerer")),
}
_DATA: Final = "/data"
_POSTGRES: Final = f"""
set -e
bin=$(echo /usr/lib/postgresql/*/bin)
if [ ! -d {_DATA}/postgresql ]; then
  $bin/initdb --pgdata={_DATA}/postgresql --username=postgres --encoding=UTF8 --no-locale --auth=trust
  echo 'host all all all trust' >> {_DATA}/postgresql/pg_hba.conf
fi
exec $bin/postgres -D {_DATA}/postgresql -k /tmp -c listen_addresses='*'
"""
_REDIS: Final = f'exec redis-server --dir {_DATA} --requirepass "$REDIS_PASSWORD"'
_MIGRATE: Final = "until pg_isready --quiet --host airflow-postgresql; do sleep 0.5; done; airflow db migrate"


def example_values() -> Values:
    """Return the values file of the docs."""
    return dict(yaml.safe_load((_EXAMPLES / "values.yaml").read_text()))


def celery_values() -> Values:
    """Return the values file of the docs, changed by the ``--set`` options that they give for Celery."""
    values = example_values()
    text = (PROJECT / "docs" / "airflow.md").read_text()
    for path, value in re.findall(r"--set (\S+)=(\S+)", text):
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = yaml.safe_load(value)
    return values


def example_objects(namespace: str, trainings: str) -> list[Manifest]:
    """Return the other objects of the docs, for an Airflow in ``namespace`` that trains in ``trainings``."""
    text = (_EXAMPLES / "objects.yaml").read_text().replace("namespace: ml", f"namespace: {trainings}")
    return list(yaml.safe_load_all(text.replace("namespace: airflow", f"namespace: {namespace}")))


def foundation(values: Values, namespace: str) -> list[Manifest]:
    """Return what the components need: accounts, configuration, volume of logs, and an empty database."""
    size = {"requests": {"storage": values["logs"]["persistence"]["size"]}}
    volume = {"accessModes": ["ReadWriteMany"], "resources": size}
    return [
        *(_object("ServiceAccount", name) for name in (*_COMPONENTS, "worker")),
        *_rights(namespace),
        _object("Secret", "environment", stringData=_environment(values)),
        _object("ConfigMap", "config", data=_configuration(values, namespace)),
        _object("PersistentVolumeClaim", "logs", spec=volume),
        _service("api-server", PORT),
        *_store(values, "postgresql", 5432, _POSTGRES),
    ]


def migration(values: Values) -> Manifest:
    """Return the Job that creates the tables."""
    spec = _pod_spec(values, "scheduler", "migrations", _MIGRATE)
    spec["initContainers"] = [_opener(values, spec["containers"][0]["volumeMounts"])]
    template = {"spec": spec | {"restartPolicy": "Never"}}
    return _object("Job", "migrations", spec={"template": template, "backoffLimit": 0})


def components(values: Values) -> list[Manifest]:
    """Return the workloads of all components; with CeleryExecutor also those of workers and their broker."""
    found = []
    for name in _COMPONENTS:
        replicas = values.get(name, {}).get("replicas", 1)
        found += _running(name, _pod_spec(values, name, name, f"exec airflow {name}"), replicas)
    if values["executor"] == CELERY:
        pod = _pod_spec(values, "worker", "worker", "exec airflow celery worker")
        pod["terminationGracePeriodSeconds"] = 600
        found += _store(values, "redis", 6379, _REDIS)
        found += _running("worker", pod, values["workers"]["celery"]["replicas"])
    return found


def _running(name: str, pod: Manifest, replicas: int) -> list[Manifest]:
    """Return the workload of a component: a Deployment, or a StatefulSet if its pods serve logs by name."""
    if name not in _LOG_PORTS:
        return [_workload("Deployment", name, pod, replicas=replicas)]
    workload = _workload("StatefulSet", name, pod, replicas=replicas, serviceName=f"airflow-{name}")
    return [_service(name, _LOG_PORTS[name], clusterIP="None"), workload]


def _object(kind: str, name: str, **fields: Any) -> Manifest:
    """Return an object with the API version of its kind; its name begins with ``airflow-``."""
    version = f"{_GROUPS.get(kind, '')}v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": f"airflow-{name}"}, **fields}


def _service(name: str, port: int, **fields: Any) -> Manifest:
    spec = {"selector": {"component": name}, "ports": [{"port": port}], **fields}
    return _object("Service", name, spec=spec)


def _workload(kind: str, name: str, pod: Manifest, **fields: Any) -> Manifest:
    labels = {"component": name}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return _object(kind, name, spec={"selector": {"matchLabels": labels}, "template": template, **fields})


def _store(values: Values, name: str, port: int, script: str) -> list[Manifest]:
    """Return a StatefulSet that keeps its data on a volume, and its Service; ``script`` starts the server."""
    mounts = [{"name": "data", "mountPath": _DATA}]
    container = _container(values, name=name, command=["sh", "-c", script], volumeMounts=mounts)
    pod = {
        "securityContext": _USER,
        "initContainers": [_opener(values, mounts)],
        "containers": [container],
    }
    size = {"requests": {"storage": "1Gi"}}
    claim = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": size}}
    more = {"serviceName": f"airflow-{name}", "volumeClaimTemplates": [claim]}
    return [_service(name, port), _workload("StatefulSet", name, pod, **more)]


def _opener(values: Values, mounts: list[Manifest]) -> Manifest:
    """Return an init container that lets Airflow's user write volumes: the test cluster ignores fsGroup."""
    folders = [mount["mountPath"] for mount in mounts if "subPath" not in mount]
    fields = {"name": "volumes", "volumeMounts": mounts, "securityContext": {"runAsUser": 0}}
    return _container(values, command=["chmod", "777", *folders], **fields)


def _rights(namespace: str) -> list[Manifest]:
    """Return a Role for each entry of ``_RIGHTS``, and its binding to the components' accounts."""
    found = []
    for name, (rules, components) in _RIGHTS.items():
        role = {"apiGroup": _RBAC, "kind": "Role", "name": f"airflow-{name}"}
        subjects = [
            {"kind": "ServiceAccount", "name": f"airflow-{component}", "namespace": namespace}
            for component in components
        ]
        found.append(_object("Role", name, rules=rules))
        found.append(_object("RoleBinding", name, roleRef=role, subjects=subjects))
    return found


def _environment(values: Values) -> dict[str, str]:
    """Return the variables that the chart takes from its Secrets."""
    variables = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://postgres@airflow-postgresql:5432/postgres",
        "AIRFLOW__CORE__FERNET_KEY": urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
    }
    if values["executor"] == CELERY:
        password = variables["REDIS_PASSWORD"] = secrets.token_hex(16)
        variables["AIRFLOW__CELERY__BROKER_URL"] = f"redis://:{password}@airflow-redis:6379/0"
    return variables


def _configuration(values: Values, namespace: str) -> dict[str, str]:
    """Return two files: airflow.cfg, with the settings of `config` in the values, and the pod template."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_dict(
        {
            "core": {
                "executor": values["executor"],
                "execution_api_server_url": f"http://airflow-api-server:{PORT}/execution/",
                "load_examples": False,
            },
            "kubernetes_executor": {
                "namespace": namespace,
                "pod_template_file": f"{_HOME}/pod_templates/pod_template_file.yaml",
            },
        }
    )
    parser.read_dict(values.get("config", {}))
    parser.write(text := StringIO())
    return {"airflow.cfg": text.getvalue(), "pod_template_file.yaml": yaml.safe_dump(_pod_template(values))}


def _pod_template(values: Values) -> Manifest:
    """Return the pod of a task; KubernetesExecutor adds its name and its command."""
    spec = _pod_spec(values, "worker", "base", None) | {"restartPolicy": "Never"}
    # As in the chart: a pod of KubernetesExecutor runs its one task like a LocalExecutor.
    spec["containers"][0]["env"].insert(0, {"name": "AIRFLOW__CORE__EXECUTOR", "value": "LocalExecutor"})
    metadata = {"name": "placeholder-name", "labels": {"component": "worker"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _pod_spec(values: Values, account: str, container: str, command: str | None) -> Manifest:
    """Return the spec of a pod with one container; None as command: that of the image."""
    mounts = [
        {"name": "config", "mountPath": f"{_HOME}/airflow.cfg", "subPath": "airflow.cfg"},
        {
            "name": "config",
            "mountPath": f"{_HOME}/pod_templates/pod_template_file.yaml",
            "subPath": "pod_template_file.yaml",
        },
        {"name": "logs", "mountPath": f"{_HOME}/logs"},
    ]
    fields: Manifest = {
        "name": container,
        "env": [*values["env"]],
        "volumeMounts": mounts + values["volumeMounts"],
    }
    if command:
        fields["args"] = ["bash", "-c", command]
    shared = {"persistentVolumeClaim": {"claimName": "airflow-logs"}}
    logs = shared if values["logs"]["persistence"]["enabled"] else {"emptyDir": {}}
    volumes = [{"name": "config", "configMap": {"name": "airflow-config"}}, {"name": "logs", **logs}]
    return {
        "serviceAccountName": f"airflow-{account}",
        "securityContext": _USER,
        "containers": [_container(values, **fields)],
        "volumes": volumes + values["volumes"],
    }


def _container(values: Values, **fields: Any) -> Manifest:
    """Return a container of Airflow's image; ``fields`` add to its fields, or replace them."""
    image = values["images"]["airflow"]
    mark, version = ("@", image["digest"]) if image.get("digest") else (":", image["tag"])
    return {
        "image": f"{image['repository']}{mark}{version}",
        "envFrom": [{"secretRef": {"name": "airflow-environment"}}],
        # Without a request it would get no processor time beside a pod that has one and computes.
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **fields,
    }
