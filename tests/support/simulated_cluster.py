"""A cluster for whole runs: the fake API server, the operators of all kinds of job, and a kubelet.

A rank's pod is a process of this machine, with a stand-in for torch. In a helper pod, each exec starts a
process with the pod's program. The volume of pods is a folder, which has the same path for them.
"""

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.exec_streams import Fork, PodForks, pass_in, pass_out
from support.fake_api_server import ApiError, ApiServer, Object
from support.job_pods import now, up
from support.killable_programs import Program
from support.rank_launches import PLAIN, free_port
from support.request_faults import Requests
from support.web_server import served
from websocket import WebSocket

from manycpu.pipeline.spec.job_kinds import FAILED, JOB_KINDS, MPIJOB, PYTORCHJOB, TRAINING_RUNTIME, TRAINJOB
from manycpu.pipeline.spec.placement import CODE, LIB

_RANK, _MPIRUN = (
    str(Path(__file__).parents[1] / "scripts" / f"pod_{name}.py") for name in ("rank", "mpirun")
)
_NODE = "manycpu.pipeline.node"
_PROGRAM = "manycpu.pipeline.pod"
_VARYING = re.compile(
    r"(&?(resourceVersion|timeoutSeconds|sinceTime|follow|limit|allowWatchBookmarks)=[^&]*)"
)
_UNSEEN = re.compile(r"^.*(/namespaces/ml/|(?=selfsubject))")
_GRACE_S = 0.1  # between the request to delete an object and its end
_SERVES_WEBSOCKETS = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455


class SimulatedCluster(ApiServer):
    """The state of a cluster; what it stores and starts is below one folder.

    Args:
        folder: The folder, in which ``code`` is the code of the image.
        requests: Causes the faults.
        forks: Starts the program of helper pods.
        library: The folder from which ranks import manycpu.
    """

    def __init__(self, folder: Path, requests: Requests, forks: PodForks, library: Path) -> None:
        super().__init__()
        self._library = library
        self._folder, self._requests, self._forks = folder, requests, forks
        self._changed = threading.Condition(self.lock)
        self._lines: defaultdict[str, list[bytes]] = defaultdict(list)
        """Uid of a rank's pod -> the lines of its log, each with its time."""
        self._programs: defaultdict[str, list[Program[bytes] | Fork]] = defaultdict(list)
        """Uid of a pod -> its processes."""
        self._kubelet: list[threading.Thread] = []
        self.replaced: set[str] = set()
        """``kind/name`` of each object that a fault replaced by another user's."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request, or cause the fault that is planned for it."""
        self._requests.answer(handler, _named(handler), lambda: super(SimulatedCluster, self).answer(handler))

    def named(self, kind: str, name: str) -> Object | None:
        """Return an object; None: it does not exist."""
        with self.lock:
            return self._named(kind, name)

    def replace(self, plural: str, name: str) -> None:
        """Delete an object, and create one of the same name that is another user's."""
        with self.lock:
            kind = self._kind(plural)
            spec = self._there(kind, name).get("spec")
            self._remove(kind, name)
            self._put(kind, {"metadata": {"name": name}, "spec": spec, "data": {}})
            self.replaced.add(f"{kind}/{name}")

    def touch(self, kind: str, name: str) -> None:
        """Change an object that belongs to no run."""
        with self.lock:
            self._put(kind, self._there(kind, name) | {"data": {"touched": now()}})

    def end(self) -> None:
        """End all watches and the processes of all pods."""
        self.end_watches()
        with self.lock:
            for pod in list(self.objects.get("Pod", ())):
                self.remove("Pod", pod["metadata"]["name"])
        for thread in self._kubelet:
            thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler, body: Object) -> None:
        asked = urlsplit(handler.path)
        if asked.path.endswith("/exec"):
            self._exec(handler, asked.path.split("/")[-2], parse_qs(asked.query)["command"])
        else:
            super()._answer(handler, body)

    def _put(self, kind: str, made: Object) -> Object:
        if kind == "Pod":
            made = {"status": {"phase": "Pending"}} | made
        stored = super()._put(kind, made)
        self._changed.notify_all()
        owners = stored["metadata"].get("ownerReferences", ())
        alive = {one["metadata"]["uid"] for items in self.objects.values() for one in items}
        if owners and not alive & {owner["uid"] for owner in owners}:
            self._remove(kind, stored["metadata"]["name"])  # as the garbage collector does
        return stored

    def _remove(self, kind: str, name: str) -> None:
        there = self._there(kind, name)
        super()._remove(kind, name)
        for program in self._programs.pop(there["metadata"]["uid"], ()):
            program.end()
        if kind == "PersistentVolumeClaim":
            shutil.rmtree(self._folder / "volume", ignore_errors=True)
        self._changed.notify_all()

    def _post(self, kind: str, name: str, query: dict[str, str], body: Object) -> Object:
        made = super()._post(kind, name, query, body)
        if "dryRun" not in query and self._named(kind, made["metadata"]["name"]):
            if kind in (each.kind for each in JOB_KINDS.values()):
                self._operate(made)
            elif kind == "Pod":
                self._set_state(made)
        return made

    def _delete(self, kind: str, name: str, _: dict[str, str], body: Object) -> Object:
        """Mark an object as being deleted; a timer deletes it a moment later, as on a real cluster."""
        meta = (there := self._there(kind, name))["metadata"]
        if body.get("preconditions", {}).get("uid", meta["uid"]) != meta["uid"]:
            raise ApiError(409, f"{name} is another one")
        if "deletionTimestamp" not in meta:
            self.put(kind, there | {"metadata": meta | {"deletionTimestamp": now()}})
            self._kubelet.append(threading.Timer(_GRACE_S, self._end_deletion, (kind, name, meta["uid"])))
            self._kubelet[-1].start()
        return there

    def _end_deletion(self, kind: str, name: str, uid: str) -> None:
        with self.lock:
            there = self._named(kind, name)
            if there and there["metadata"]["uid"] == uid:
                self.remove(kind, name)

    def _operate(self, job: Object) -> None:
        """Create the pods of a job, as its operator does; they start at once."""
        self._set_conditions(job, "Created", "Running")
        template, nodes = self._ranks(job)
        workers = [f"{job['metadata']['name']}-worker-{number}" for number in range(nodes)]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if job["kind"] == MPIJOB.kind:
            for number, name in enumerate(workers):
                self._set_state(self._create_pod(job, template, name, number))
            launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
            pod = self._create_pod(job, launcher, f"{job['metadata']['name']}-launcher", 0)
            self._start(pod, job, [_MPIRUN, ",".join(workers)], env)
            return
        world = {"WORLD_SIZE": str(nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for number, name in enumerate(workers):
            pod = self._create_pod(job, template, name, number)
            self._start(pod, job, [_RANK, name], env | world | {"RANK": str(number)})

    def _create_pod(self, job: Object, template: Object, name: str, number: int) -> Object:
        meta = template["metadata"]
        labels = meta["labels"] | {"training.kubeflow.org/replica-index": str(number)}
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "uid": job["metadata"]["uid"]}
        owner["name"] = job["metadata"]["name"]
        meta = meta | {"name": name, "labels": labels, "ownerReferences": [owner]}
        return self.put("Pod", {"metadata": meta, "spec": template["spec"]})

    def _ranks(self, job: Object) -> tuple[Object, int]:
        """Return the template of the pods of a job's ranks, and their number."""
        if job["kind"] != TRAINJOB.kind:
            worker = job["spec"][
                "pytorchReplicaSpecs" if job["kind"] == PYTORCHJOB.kind else "mpiReplicaSpecs"
            ]
            return worker["Worker"]["template"], worker["Worker"]["replicas"]
        runtime = self._there(TRAINING_RUNTIME.kind, job["metadata"]["name"])["spec"]
        (node,) = runtime["template"]["spec"]["replicatedJobs"]
        return node["template"]["spec"]["template"], runtime["mlPolicy"]["numNodes"]

    def _start(self, pod: Object, job: Object, how: Sequence[str], env: dict[str, str]) -> None:
        """Start the ranks of a pod; without torchrun, which takes seconds, and without ssh.

        ``how`` is the script that starts them, and its arguments.
        """
        (container,) = pod["spec"]["containers"]
        command = [self._here(word) for word in container["command"]]
        argv = [sys.executable, *how, *command[command.index(_NODE) - 1 :]]
        given = {each["name"]: self._here(each["value"]) for each in container["env"] if "value" in each}
        for each in container["env"]:
            if key := each.get("valueFrom", {}).get("secretKeyRef"):
                secret = self.named("Secret", key["name"])
                assert secret
                given[each["name"]] = base64.b64decode(secret["data"][key["key"]]).decode()
        program: Program[bytes] = Program(
            argv,
            env=PLAIN | {"TMPDIR": gettempdir()} | given | env,
            cwd=self._folder / "code",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._programs[pod["metadata"]["uid"]].append(program)
        self._set_state(pod)
        self._kubelet.append(threading.Thread(target=self._watch_over, args=(pod, job, program)))
        self._kubelet[-1].start()

    def _here(self, text: str) -> str:
        """Undo the escapes of a manifest, and replace folders of the image by those of this machine."""
        return text.replace("$$", "$").replace(LIB, str(self._library)).replace(CODE, ".")

    def _watch_over(self, pod: Object, job: Object, program: "Program[bytes]") -> None:
        """Keep the lines of a rank's pod; at its end, set the states of pod and job, as on a real cluster."""
        assert program.stdout
        uid = pod["metadata"]["uid"]
        for text in program.stdout:
            with self.lock:
                self._lines[uid].append(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}000Z ".encode() + text)
                self._changed.notify_all()
        code = program.wait()
        program.stdout.close()
        with self.lock:
            there = self._named("Pod", pod["metadata"]["name"])
            if there is None or there["metadata"]["uid"] != uid:
                return
            started = there["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
            ended = {"exitCode": code, "startedAt": started, "finishedAt": now()}
            self._set_state(there, "Failed" if code else "Succeeded", terminated=ended)
            owners = pod["metadata"]["ownerReferences"]
            owned = [one for one in self.objects["Pod"] if one["metadata"].get("ownerReferences") == owners]
            phases = {one["status"]["phase"] for one in owned if one["metadata"]["uid"] in self._programs}
            if "Failed" in phases:
                self._set_conditions(job, FAILED)
            elif phases == {"Succeeded"}:
                self._set_conditions(job, JOB_KINDS[job["kind"].lower()].succeeded)
            if job["kind"] == MPIJOB.kind:  # its launcher has ended
                for name in [one["metadata"]["name"] for one in owned if one["status"]["phase"] == "Running"]:
                    self._remove("Pod", name)

    def _set_state(self, pod: Object, phase: str = "Running", **state: Any) -> None:
        """Set the phase of a pod, and the state of its container; without ``state``, the container runs."""
        status = up(**state) | {"phase": phase}
        status["podIP"] = "127.0.0.1"
        status["containerStatuses"][0]["name"] = pod["spec"]["containers"][0]["name"]
        self.put("Pod", self._there("Pod", pod["metadata"]["name"]) | {"status": status})

    def _set_conditions(self, job: Object, *names: str) -> None:
        held = [{"type": name, "status": "True", "lastTransitionTime": now()} for name in names]
        status = {"conditions": held, "startTime": now()}
        status |= {} if "Running" in names else {"completionTime": now()}
        self.put(job["kind"], self._there(job["kind"], job["metadata"]["name"]) | {"status": status})

    def _log(self, handler: BaseHTTPRequestHandler, pod: str, query: dict[str, str]) -> None:
        with self.lock:
            uid = self._there("Pod", pod)["metadata"]["uid"]
        since = query.get("sinceTime", "")[:19].encode()
        first = -int(query["tailLines"]) if "tailLines" in query else 0
        handler.send_response(200)
        handler.end_headers()
        sent = 0
        while lines := self._lines_after(sent, pod, uid, wait="follow" in query):
            sent += len(lines)
            handler.wfile.write(b"".join(line for line in lines[first:] if line[:19] >= since))

    def _lines_after(self, sent: int, pod: str, uid: str, *, wait: bool) -> list[bytes]:
        """Return the lines of a pod after its first ``sent`` ones; ``wait``: wait for a line or its end."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: len(self._lines[uid]) > sent or not self._runs(pod, uid))
            return self._lines[uid][sent:]

    def wait_for_ranks(self, seconds: float) -> None:
        """Wait until all ranks have ended, and then so many seconds."""
        for thread in self._kubelet[:]:
            thread.join()
        time.sleep(seconds)

    def _runs(self, name: str, uid: str) -> bool:
        pod = self._named("Pod", name)
        return pod is not None and pod["metadata"]["uid"] == uid and pod["status"]["phase"] == "Running"

    def _exec(self, handler: BaseHTTPRequestHandler, pod: str, words: list[str]) -> None:
        """Start a command in a helper pod, and pass its streams over a websocket until it ends."""
        with self.lock:
            there = self._there("Pod", pod)
            if there["status"]["phase"] != "Running":
                raise ApiError(500, "container not found")
            program = self._forks.start(words[words.index(_PROGRAM) + 1 :])
            self._programs[there["metadata"]["uid"]].append(program)
        with program:
            key = handler.headers["Sec-WebSocket-Key"] + _SERVES_WEBSOCKETS
            handler.send_response(101)
            handler.send_header("Upgrade", "websocket")
            handler.send_header("Connection", "Upgrade")
            handler.send_header(
                "Sec-WebSocket-Accept",
                base64.b64encode(hashlib.sha1(key.encode()).digest()).decode(),  # noqa: S324
            )
            handler.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
            handler.end_headers()
            far = WebSocket()
            far.sock = handler.connection
            reading = threading.Thread(target=pass_in, args=(far, program))
            reading.start()
            pass_out(handler.wfile.write, program)
            with suppress(OSError):
                handler.connection.shutdown(2)
            reading.join()


def _named(handler: BaseHTTPRequestHandler) -> str:
    """Return the name of a request: its method, path and query, without parts that differ from run to run."""
    path, _, query = _UNSEEN.sub("", unquote(handler.path)).partition("?")
    return f"{handler.command} {path}?{_VARYING.sub('', query).strip('&')}".rstrip("?")


@contextmanager
def serving(current: "dict[str, SimulatedCluster]") -> Iterator[str]:
    """Serve ``current["cluster"]``, which may be replaced between requests; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            current["cluster"].answer(self)

        do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as host:
        yield f"http://{host}"
