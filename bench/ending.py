"""From a job's terminal condition to the trigger's event and to the end of the task, deferred, in Airflow.

Beside the provider's operators for a batch Job and for a pod that last as long, all of them in one DAG run.
The condition's time is that at which a watch of the benchmark's own saw it. Seconds.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from bench._measure import rounds, spread

TURNS = (3, 1)
LASTS = 14  # seconds: longer than a trigger keeps an event back because of the deferral before
SCRIPT = f"""import os, pathlib, time
time.sleep({LASTS})
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model").touch()
"""
Ends = dict[tuple[str, str], float]
"""Kind and name -> when it was first seen to have succeeded, seconds since the epoch."""
_INLINE = "_run_inline_trigger"  # what `dag.test` runs a trigger by
DAG = """
from airflow.providers.cncf.kubernetes.operators.job import KubernetesJobOperator
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk import chain, dag
from manycpu.operators import training_pipeline

RUN, TARGET, RIVAL = {run!r}, {target!r}, {rival!r}
JOB = {{"wait_until_job_complete": True}}

@dag(schedule=None)
def ending():
    last = []
    for n in range({turns}):
        ours = training_pipeline(run=RUN | {{"output": f"{out}/{{n}}"}}, target=TARGET, group_id=f"ours{{n}}")
        job = KubernetesJobOperator(task_id=f"job{{n}}", name=f"job{{n}}", **RIVAL, **JOB)
        pod = KubernetesPodOperator(task_id=f"pod{{n}}", name=f"pod{{n}}", **RIVAL)
        chain(*last, ours, job, pod)
        last = [pod]

ending()
"""
WORDS = {
    "title": "From the end of a job to the end of its task",
    "meaning": "Airflow continues a fraction of a second after the training has ended, where the provider's "
    "operators look every few seconds.",
    "figures": {
        "condition to event: manycpu": (
            "manycpu: from the job's end until the waiting task hears of it",
            "s",
            "at most [target: condition to event]",
        ),
        "condition to event: KubernetesPodOperator": (
            "KubernetesPodOperator: the same (below 0: it sees the container end before the pod has)",
            "s",
            "",
        ),
        r"condition to event: (\w+)": (r"\1: the same", "s", ""),
        r"condition to the task's end: (\w+)": (r"\1: from the job's end to the task's end", "s", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure, in a process that has an Airflow of its own."""
    from cluster import images, settings

    from bench._cluster import namespace, target

    with namespace("bench-ending") as (_, space), TemporaryDirectory() as folder:
        config = {
            "target": target(space, connection="ours", claim_size="1Gi"),
            "admin": str(settings.kubeconfig()),
            "kubeconfig": str(space.kubeconfig),
            "base": images.reference("base"),
            "folder": folder,
            "turns": rounds(*TURNS),
        }
        return _side(config)


def _side(config: dict[str, Any]) -> dict[str, Any]:
    files = {"KUBERNETES_DEFAULT": config["admin"], "OURS": config["kubeconfig"]}
    env = dict(os.environ)
    for name, path in files.items():
        connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": path}}
        env[f"AIRFLOW_CONN_{name}"] = json.dumps(connection)
    command = [sys.executable, "-m", "bench.ending", json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=1200)
    out = Path(config["folder"], "figures.json")
    if not out.exists():
        sys.exit(f"bench: the DAG run failed\n{(done.stdout + done.stderr)[-3000:]}")
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def _child(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    dags = folder / "dags"
    dags.mkdir()
    (dags / "file.py").write_text(_dag(config))
    from manycpu.operators import local_airflow

    os.environ |= local_airflow.settings(folder / "airflow", dags={"bench": dags})
    from airflow.dag_processing.dagbag import DagBag
    from airflow.utils import db

    db.initdb()
    bag = DagBag(dags)
    assert bag.import_errors == {}, bag.import_errors  # noqa: S101 - or it measures nothing
    with _watching(config["admin"], config["target"]["namespace"]) as ended, _timing() as events:
        run = bag.dags["ending"].test()
        tasks = {task.task_id: task.end_date.timestamp() for task in run.get_task_instances()}
        assert str(run.state) == "success", run.state  # noqa: S101 - or it measures nothing
    figures = _figures(config["turns"], ended, events, tasks)
    (folder / "figures.json").write_text(json.dumps(figures))


def _dag(config: dict[str, Any]) -> str:
    script = Path(config["folder"], "code", "train.py")
    script.parent.mkdir()
    script.write_text(SCRIPT)
    target = config["target"]
    rival = {
        "namespace": target["namespace"],
        "image": config["base"],
        "cmds": ["sleep", str(LASTS)],
        "deferrable": True,
        "random_name_suffix": False,
    }
    run = {"program": str(script), "resources": {"cpu": 0.5}}
    return DAG.format(
        turns=config["turns"], run=run, out=f"{config['folder']}/out", target=target, rival=rival
    )


@contextmanager
def _watching(kubeconfig: str, namespace: str) -> Iterator[Ends]:
    """Record when each job and pod was first seen to have succeeded."""
    from kubernetes import client, config, watch

    api = config.new_client_from_config(config_file=kubeconfig)
    custom = client.CustomObjectsApi(api).list_namespaced_custom_object
    lists: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
        (client.CoreV1Api(api).list_namespaced_pod, (namespace,)),
        (client.BatchV1Api(api).list_namespaced_job, (namespace,)),
        (custom, ("kubeflow.org", "v1", namespace, "pytorchjobs")),
    ]
    ends: Ends = {}

    def follow(listing: Callable[..., Any], words: tuple[str, ...]) -> None:
        for event in watch.Watch().stream(listing, *words):
            kube_object = event["raw_object"]
            if _succeeded(kube_object):
                ends.setdefault((kube_object["kind"], kube_object["metadata"]["name"]), time.time())

    for arguments in lists:
        threading.Thread(target=follow, args=arguments, daemon=True).start()
    yield ends


def _succeeded(kube_object: dict[str, Any]) -> bool:
    status = kube_object.get("status") or {}
    true = {each["type"] for each in status.get("conditions") or [] if each["status"] == "True"}
    return status.get("phase") == "Succeeded" or bool(true & {"Succeeded", "Complete"})


@contextmanager
def _timing() -> Iterator[dict[str, float]]:
    """Record when the trigger of each task sent its event."""
    from airflow.sdk.definitions import dag

    events: dict[str, float] = {}
    inner = vars(dag)[_INLINE]

    def timed(trigger: Any, task: Any) -> Any:
        event = inner(trigger, task)
        events[task.task_id] = time.time()
        return event

    with mock.patch.object(dag, _INLINE, timed):
        yield events


def _figures(turns: int, ended: Ends, events: dict[str, float], tasks: dict[str, float]) -> dict[str, Any]:
    sides = {
        "manycpu": ("PyTorchJob", "", "ours{}.train"),
        "KubernetesJobOperator": ("Job", "", "job{}"),
        "KubernetesPodOperator": ("Pod", "pod", "pod{}"),
    }
    names = {side: _pairs(ended, turns, *of) for side, of in sides.items()}
    return {
        "unit": "s",
        "condition to event": {
            side: spread([events[task] - end for end, task in pairs], digits=3)
            for side, pairs in names.items()
        },
        "condition to the task's end": {
            side: spread([tasks[task] - end for end, task in pairs], digits=3)
            for side, pairs in names.items()
        },
        "target": {"condition to event": 1.0},
    }


def _pairs(ended: Ends, turns: int, kind: str, prefix: str, task: str) -> list[tuple[float, str]]:
    """Pair the time at which each turn's job of a side had ended with its task."""
    times = sorted(time for (of, name), time in ended.items() if of == kind and name.startswith(prefix))
    return list(zip(times, map(task.format, range(turns)), strict=True))


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
