"""Record what version 0.1.0 leaves of its runs: ``python record_samples.py FOLDER``, with its code as manycpu.

One JSON file for each run: path -> text of each file in manycpu's folder and beside the output, and on
Kubernetes the objects. Placeholders stand for what differs from machine to machine.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from manycpu.pipeline.adapters.process import boot_id
from manycpu.pipeline.spec import events
from manycpu.pipeline.verbs.build import Built
from manycpu.pipeline.verbs.context import Access, open_context
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.on_kubernetes.record import Heap, Line, Record
from manycpu.pipeline.verbs.stage import Staged

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from manycpu.pipeline.node.metrics import metrics, progress
dist.init_process_group()
sum = torch.ones(1)
dist.all_reduce(sum)
output, checkpoints = os.environ["MANYCPU_OUTPUT"], os.environ["MANYCPU_CHECKPOINTS"]
how = sys.argv[1]
if dist.get_rank() == 0:
    progress(step=1, total_steps=2, loss=0.5)
    metrics({"loss": 0.5})
    os.makedirs(f"{checkpoints}/checkpoint-1", exist_ok=True)
    open(f"{checkpoints}/checkpoint-1/weights", "w").write("half")
    open(f"{output}/model.txt", "w").write(f"sum {int(sum)}")
dist.barrier()
if how == "fails":
    print("it fails", flush=True)
    os._exit(3)
if how == "waits":
    print("waiting", flush=True)
    while not os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)
"""
KILLED_AT_RENAME = """
import os, signal
from pathlib import Path
from manycpu.pipeline.cli import main
rename = Path.rename
def killed_at_output(self, to):
    if Path(to).parent.name == "out":
        {before}
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, to)
Path.rename = killed_at_output
main()
"""
KILLED_IN_REMOVAL = """
import os, signal
from manycpu.pipeline.cli import main
from manycpu.pipeline.ledger import file
delete = file._delete
def killed_at_ledger(path):
    if path.name == "ledger.json":
        os.kill(os.getpid(), signal.SIGKILL)
    delete(path)
file._delete = killed_at_ledger
main()
"""


class Run:
    """A run on this machine."""

    def __init__(self, root: Path, name: str, how: str, **fields: str) -> None:
        self.root, self.name = root, name
        self.home, self.gate = root / "home", root / "gate"
        (root / "code").mkdir()
        (root / "code/train.py").write_text(PROGRAM)
        run = {
            "program": "code/train.py",
            "output": f"out/{name}",
            "nproc_per_node": 2,
            "args": [how],
            **fields,
        }
        (root / "run.yaml").write_text(yaml.safe_dump({"run": run}))
        self.environ = os.environ | {"MANYCPU_HOME": str(self.home), "GATE": str(self.gate)}

    def start(self, *before: str) -> subprocess.Popen:
        words = [sys.executable, *(before or ("-m", "manycpu.pipeline.cli"))]
        return subprocess.Popen(
            [*words, "run", str(self.root / "run.yaml"), "--run-id", self.name], env=self.environ
        )

    def type(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "manycpu.pipeline.cli", *words], env=self.environ, check=True)

    def log(self) -> str:
        return "".join(path.read_text() for path in self.home.glob("runs/*/attempts/1/log"))

    def handle(self) -> dict:
        return json.loads(next(self.home.glob("runs/*/attempts/1/handle.json")).read_text())


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def green(run):
    run.start().wait()


def failed(run):
    run.start().wait()


def cancelled(run):
    command = run.start()
    wait_for(lambda: "waiting" in run.log())
    run.type("cancel", next(run.home.glob("runs/[a-z]*")).name)
    command.wait()


def running(run):
    command = run.start()
    wait_for(lambda: "waiting" in run.log())
    command.kill()
    command.wait()


def ended(run):
    running(run)
    run.gate.touch()
    wait_for(lambda: any(run.home.glob("runs/*/attempts/1/exit.json")))


def exporting(run):
    run.start("-c", KILLED_AT_RENAME.format(before="pass")).wait()


def exported(run):
    run.start("-c", KILLED_AT_RENAME.format(before="rename(self, to)")).wait()


def removing(run):
    run.start("-c", KILLED_IN_REMOVAL).wait()


def on_this_machine(name, make, how, **fields):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), name, how, **fields)
        make(run)
        files = [path for path in [*run.home.rglob("*"), *(run.root / "out").rglob("*")] if path.is_file()]
        record = {str(path.relative_to(folder)): path.read_text() for path in sorted(files)}
        for path in run.home.glob("runs/*/attempts/*"):
            record[f"{path.relative_to(folder)}/output/"] = ""
        if not run.gate.exists():
            run.gate.touch()  # ends what still runs
            if any(run.home.glob("runs/*/attempts/1/handle.json")):
                wait_for(lambda: not Path(f"/proc/{run.handle()['pid']}").exists())
        return {path: without_machine(text, folder) for path, text in record.items()}


def without_machine(text, folder):
    words = {folder: "@ROOT@", sys.executable: "@PYTHON@", boot_id(): "@BOOT@", sys.prefix: "@PREFIX@"}
    for word, placeholder in words.items():
        text = text.replace(word, placeholder)
    host = socket.gethostname()
    for before, after in (('"', '"'), (" ", "]"), (" on ", " "), ("host      : ", "")):
        text = text.replace(f"{before}{host}{after}", f"{before}@HOST@{after}")
    return text


class OneNamespace:
    """Stands for a cluster: keeps what is created."""

    namespace = "ml"

    def __init__(self):
        self.objects = {}

    def create(self, manifest, *, dry_run=False):
        key = manifest["kind"], manifest["metadata"]["name"]
        if not dry_run and key not in self.objects:
            born = {"uid": f"uid-{len(self.objects)}", "creationTimestamp": "2026-11-21T12:00:00Z"}
            self.objects[key] = manifest | {
                "metadata": manifest["metadata"] | born | {"resourceVersion": "1"}
            }
        return self.objects.get(key, manifest)

    def get(self, kind, name):
        return self.objects.get((kind, name))

    def list(self, *_, **__):
        return []

    def patch(self, kind, name, body):
        found = self.objects[kind, name]
        found["data"] |= body.get("data", {})
        found["metadata"].setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
        return found


def on_kubernetes(launch_kind):
    cluster = OneNamespace()
    run = {"program": "/code/train.py", "output": "@ROOT@/out/cluster", "nnodes": 2, "nproc_per_node": 1}
    target = {
        "kind": "kubernetes",
        "launch": launch_kind,
        "namespace": "ml",
        "image": "reg/train:1",
        "claim": "data",
    }
    ctx = open_context(run, target, "cli", launch_kind, base=Path("/"), access=Access(cluster=cluster))
    ctx.ledger.open(ctx.new_entry(1795262400.0))
    for verb in ("prepare", "stage", "build"):
        with ctx.ledger.timed(verb) as record:
            record.seconds = 0
    image = "reg/train@sha256:" + "1" * 64
    built = Built(code="/code", program=("train.py",), digest="2" * 64, image=image)
    with ctx.ledger.timed("launch"):
        handle, _ = launch(ctx, Staged(), built)
    lines = [line for rank in range(2) for line in introduction(rank)]
    record = Record(ctx, handle, None, "task train, try 1 (1)")
    record.hear(
        [Heap("uid/pytorch/0", [Line(line, 1795262460.0 + n, "pod") for n, line in enumerate(lines)], [])]
    )
    record.write(record.fields())
    logs = {}
    for n, line in enumerate(lines):
        logs.setdefault(str(line.rank), []).append(f"2026-11-21T12:01:0{n}.0Z {events.join(*line)}")
    for rank, written in logs.items():
        end = events.encode("exit", code=0, rank=int(rank), host=f"node-{rank}")
        written.append(f"2026-11-21T12:01:09.0Z {events.join(int(rank), f'node-{rank}', end)}")
    return {"handle": handle.model_dump(mode="json"), "objects": [*cluster.objects.values()], "logs": logs}


def introduction(rank):
    host = f"node-{rank}"
    seen = {"rank": rank, "world_size": 2, "host": host, "hostname": f"pod-{rank}", "cpus": 1.0, "threads": 1}
    yield events.RankLine(rank, host, events.encode("proof", **seen, backend="gloo", round=0))
    if rank == 0:
        yield events.RankLine(rank, host, events.encode("backend", observed="gloo"))
        yield events.RankLine(rank, host, events.encode("metrics", values={"loss": 0.5}))


def main(folder):
    samples = {
        "green": on_this_machine("green", green, "succeeds"),
        "failed": on_this_machine("failed", failed, "fails", keep="on_failure"),
        "cancelled": on_this_machine("cancelled", cancelled, "waits", keep="on_failure"),
        "running": on_this_machine("running", running, "waits"),
        "ended": on_this_machine("ended", ended, "waits"),
        "exporting": on_this_machine("exporting", exporting, "succeeds"),
        "exported": on_this_machine("exported", exported, "succeeds"),
        "removing": on_this_machine("removing", removing, "succeeds"),
        "pytorchjob": on_kubernetes("pytorchjob"),
        "mpijob": on_kubernetes("mpijob"),
    }
    for name, sample in samples.items():
        (Path(folder) / f"{name}.json").write_text(json.dumps(sample, indent=1) + "\n")


main(sys.argv[1])
