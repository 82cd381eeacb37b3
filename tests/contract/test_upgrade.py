"""What version 0.1.0 left behind: runs that ended stay readable, kept ones stay kept, living ones continue.

The samples are in tests/samples/0.1.0. The command that made them, in a checkout of commit d0147e68, is
`PYTHONPATH=.dev python .../tests/scripts/record_samples.py .../tests/samples/0.1.0`.
"""

import json
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support.fake_api_server import ApiServer
from support.job_pods import up
from support.killable_programs import Program
from support.waiting import until

from manycpu.pipeline.adapters import process
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec import cpu_plan
from manycpu.pipeline.spec.handle import read_handle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.validation import read_run, read_target
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import Access, RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs import all_verbs
from manycpu.pipeline.verbs.launch import attach
from manycpu.pipeline.verbs.wait import wait

pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
Type = Callable[..., tuple[int, str]]
SAMPLES = Path(__file__).parents[1] / "samples" / "0.1.0"
NO_PID = 1 << 30
CONTINUES = """
import os
import torch.distributed as dist
dist.init_process_group()
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write(
    open(os.environ["MANYCPU_CHECKPOINTS"] + "/checkpoint-1/weights").read() + " and the rest"
)
"""
EXIT = '[rank {rank} h] ::manycpu:: {{"event": "exit", "code": 0, "rank": {rank}, "host": "h"}}\n'
CANCELLED = '{"code": -15, "reason": "cancelled", "started": 1.5, "ended": 2.5}'
RECORDS_ITS_END = """
trap 'echo "$0" > exit.json; exit' TERM INT
while :; do sleep 0.1; done
"""


def sample(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SAMPLES / f"{name}.json").read_text())
    return content


class Left:
    """The folder of a run of version 0.1.0, and the commands of this version for it."""

    def __init__(self, name: str, root: Path, type_: Type, pid: int = NO_PID) -> None:
        self.name, self.root, self._type = name, root, type_
        started = psutil.Process(pid).create_time() if pid != NO_PID else 1.0
        words = {"@ROOT@": str(root), "@HOST@": socket.gethostname(), "@BOOT@": process.boot_id()}
        for path, recorded in sample(name).items():
            text = re.sub("@[A-Z]+@", lambda found: words.get(found[0], "/gone"), recorded)
            here = re.sub(r'"pid": \d+, "start_time": [\d.]+', f'"pid": {pid}, "start_time": {started}', text)
            folder = root / path if path.endswith("/") else (root / path).parent
            folder.mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                (root / path).write_text(here)
        self.runs = root / "home/runs"
        self.runs.mkdir(exist_ok=True)
        self.run = next((path.name for path in self.runs.iterdir() if path.name.startswith("train")), "")
        self.attempt = self.runs / self.run / "attempts/1"
        self.out = root / "out" / name
        (root / "code").mkdir()
        (root / "code/train.py").write_text(CONTINUES)

    def type(self, *words: str) -> str:
        code, printed = self._type(*words)
        assert code == 0, printed
        return printed

    def refused(self, *words: str) -> str:
        code, printed = self._type(*words)
        assert code
        return " ".join(printed.split())

    @property
    def again(self) -> list[str]:
        words = ["run", "--program", str(self.root / "code/train.py"), "--output", str(self.out)]
        return [*words, "--nproc-per-node", "2", "--run-id", self.name]

    def is_green(self, model: str, attempts: int = 1) -> None:
        """See that the model was exported once, and that nothing else is left."""
        report = Report.model_validate_json((self.out / "report.json").read_text())
        assert (report.state, report.attempts, report.left_behind) == ("succeeded", attempts, [])
        assert (self.out / "model.txt").read_text() == model
        assert list(self.runs.iterdir()) == []
        assert [path.name for path in self.out.parent.iterdir()] == [self.name]


@pytest.fixture
def left(tmp_path: Path, manycpu: Type) -> Callable[..., Left]:
    """Put the sample of a run where it was."""
    return lambda name, pid=NO_PID: Left(name, tmp_path, manycpu, pid)


def test_a_report_stays_readable(left: Callable[..., Left]) -> None:
    run = left("green")
    assert "succeeded: 2 ranks on 1 host, backend gloo" in run.type("report", str(run.out))
    run.type("report", str(run.out), "--html")
    assert "train-" in (run.out / "report.html").read_text()
    assert "no run in" in run.type("status")
    run.is_green("sum 2")


@pytest.mark.parametrize("name", ["ended", "exporting"])
def test_a_training_that_ended_is_exported_and_not_repeated(left: Callable[..., Left], name: str) -> None:
    run = left(name)
    said = run.type("status", run.run)
    assert ("succeeded" in said, "its model is not exported yet" in said) == (True, True)
    assert "exit: code 0" in run.type("logs", run.run)
    assert "has a model that was not exported" in run.type("clean", "--data", "--yes")
    run.type(*run.again)
    run.is_green("sum 2")


def test_an_export_that_was_not_recorded_is_not_overwritten(left: Callable[..., Left]) -> None:
    run = left("exported")
    assert "is not empty: manifest.json is in it" in run.refused(*run.again)
    assert "has a model that was not exported" in run.type("clean", "--yes")
    run.type(*run.again, "--output", str(run.out.parent / "another"))
    assert (
        (run.out.parent / "another/model.txt").read_text() == (run.out / "model.txt").read_text() == "sum 2"
    )
    assert list(run.runs.iterdir()) == []


def test_a_removal_that_was_killed_is_finished(left: Callable[..., Left]) -> None:
    run = left("removing")
    assert f"manycpu cancel {run.run} --gone" in run.refused(*run.again)
    assert "recorded as gone" in run.type("cancel", run.run, "--gone")
    run.type(*run.again)
    run.is_green("sum 2")


@pytest.mark.parametrize(("name", "state"), [("failed", "failed"), ("cancelled", "cancelled")])
def test_what_is_kept_stays_until_it_is_resumed(left: Callable[..., Left], name: str, state: str) -> None:
    run = left(name)
    assert state in run.type("status", run.run)
    assert "Its output and checkpoints are kept until" in run.type("clean", "--yes")
    assert "its output and checkpoints are kept" in run.type("clean", "--yes")
    run.type(*run.again)
    run.is_green("half and the rest", attempts=2)


def test_what_is_kept_can_be_deleted_by_name(left: Callable[..., Left]) -> None:
    run = left("failed")
    run.type("clean", run.run, "--delete-model", "--data", "--yes")
    assert list(run.runs.iterdir()) == []
    assert list((run.root / "home/code").iterdir()) == []


def test_a_value_that_is_refused_by_now_hides_no_run(left: Callable[..., Left]) -> None:
    run = left("failed")
    path = run.runs / run.run / "ledger.json"
    ledger = json.loads(path.read_text())
    ledger["run"] |= {"run_timeout": 4_000 * 366 * 86_400, "data": "s3:/sets/squad"}
    path.write_text(json.dumps(ledger))
    assert "failed" in run.type("status", run.run)
    run.type("cancel", run.run)
    run.type("clean", run.run, "--delete-model", "--yes")
    assert list(run.runs.iterdir()) == []


def test_a_training_that_runs_is_attached_to_and_exported_once(
    left: Callable[..., Left], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Program(["sleep", "600"]) as supervisor:
        run = left("running", supervisor.pid)
        assert "running" in run.type("status", run.run)
        for words in (["--data"], [run.run, "--delete-model"]):
            assert "a process works on it" in run.type("clean", *words, "--yes")

        def end_and_wait(*given: Any) -> Status:
            exits = [EXIT.format(rank=rank) for rank in (0, 1)]
            with (run.attempt / "log").open("a") as log:
                log.writelines(exits)
            (run.attempt / "exit.json").write_text('{"code": 0, "reason": "", "started": 1.5, "ended": 2.5}')
            return wait(*given)

        monkeypatch.setattr(all_verbs, "wait", end_and_wait)

        # Version 0.1.0 counted a virtual machine's sockets in another way: it may have planned other numbers.
        plan = cpu_plan.plan
        monkeypatch.setattr(cpu_plan, "plan", lambda *known: replace(plan(*known), processes=1))
        assert "attached to attempt 1" in run.type(*(set_apart(run.again, "--nproc-per-node")))
        run.is_green("sum 2")


def set_apart(words: list[str], option: str) -> list[str]:
    """Leave out an option and its value."""
    place = words.index(option)
    return [*words[:place], *words[place + 2 :]]


def test_a_training_that_runs_is_cancelled(left: Callable[..., Left], tmp_path: Path) -> None:
    attempt = tmp_path / "home/runs/train-3424c70f08/attempts/1"
    attempt.mkdir(parents=True)
    with Program(["sh", "-c", RECORDS_ITS_END, CANCELLED], cwd=attempt) as supervisor:
        until(lambda: psutil.Process(supervisor.pid).children())
        run = left("running", supervisor.pid)
        assert "train-3424c70f08: ended" in run.type("cancel", run.run)
        assert "ended by manycpu" in run.type("status", run.run)
        assert "are kept" in run.type("clean", "--yes")
        assert (run.runs / run.run / "checkpoints/checkpoint-1/weights").read_text() == "half"


def test_a_supervisor_that_cannot_be_found_is_not_gone_until_a_person_says_so(
    left: Callable[..., Left],
) -> None:
    run = left("running")
    assert "unknown" in run.type("status", run.run)
    assert "whether it runs is unknown" in run.type("clean", run.run, "--delete-model", "--yes")
    assert f"manycpu cancel {run.run} --gone" in run.refused(*run.again)
    run.type("cancel", run.run, "--gone")
    run.type(*run.again)
    run.is_green("half and the rest", attempts=2)


def on_cluster(server: ApiServer, name: str, folder: Path) -> RunContext:
    """Put the objects of a run into a namespace; return the run as this version describes it."""
    content = sample(name)
    for item in content["objects"]:
        text = json.dumps(item).replace("@ROOT@", str(folder))
        server.put(item["kind"], json.loads(text))
    launch = content["handle"]["launch"]
    run = {
        "program": "/code/train.py",
        "output": str(folder / "out/cluster"),
        "nnodes": 2,
        "nproc_per_node": 1,
    }
    target = {
        "kind": "kubernetes",
        "launch": launch,
        "namespace": "ml",
        "image": "reg/train:1",
        "claim": "data",
    }
    access = Access(connect=server.connect)
    return open_context(run, target, "cli", launch, base=Path("/"), access=access)


def put_pods(server: ApiServer, name: str, **state: Any) -> None:
    """Have the pods that an operator makes of a job's templates, with the lines that the ranks wrote."""
    content = sample(name)
    job = content["objects"][-1]
    replicas = job["spec"].get("pytorchReplicaSpecs") or job["spec"]["mpiReplicaSpecs"]
    for role, replica in replicas.items():
        template = replica["template"]
        for number in range(replica["replicas"]):
            pod = f"{job['metadata']['name']}-{role.lower()}-{number}"
            container = template["spec"]["containers"][0]["name"]
            status = up(**state)
            status["containerStatuses"][0]["name"] = container
            status["phase"] = "Succeeded" if "terminated" in state else "Running"
            server.put(
                "Pod",
                {
                    "metadata": template["metadata"] | {"name": pod},
                    "spec": template["spec"],
                    "status": status,
                },
            )
            ranks = [str(number)] if role == "Worker" and "mpi" not in name else ["0", "1"]
            lines = [line for rank in ranks for line in content["logs"][rank]]
            server.logs[pod] = "".join(sorted(f"{line}\n" for line in lines))


def put_end(server: ApiServer, name: str) -> None:
    job = json.loads(json.dumps(sample(name)["objects"][-1]))
    when = {"lastTransitionTime": "2026-11-21T12:02:00Z", "status": "True"}
    job["status"] = {"conditions": [{"type": "Succeeded", **when}]}
    server.put(job["kind"], job)


@pytest.mark.parametrize("name", ["pytorchjob", "mpijob"])
def test_a_job_that_runs_is_attached_to_and_judged(server: ApiServer, tmp_path: Path, name: str) -> None:
    ctx = on_cluster(server, name, tmp_path)
    assert ctx.ledger.exists()
    put_pods(server, name, running={"startedAt": "2026-11-21T12:00:30Z"})
    handle = read_handle(sample(name)["handle"])
    assert attempt_status(ctx, handle, ctx.ledger.read()).state is RunState.RUNNING
    assert attach(ctx) == handle
    put_pods(server, name, terminated={"exitCode": 0, "finishedAt": "2026-11-21T12:02:00Z"})
    put_end(server, name)
    assert wait(ctx, handle).state is RunState.SUCCEEDED
    assert attach(ctx) == handle
    assert server.created == []
    assert ctx.ledger.read().attempt == 1


@pytest.mark.parametrize("text", sample("run_files").values(), ids=sample("run_files"))
def test_run_files_of_the_docs_stay_valid(text: str) -> None:
    fields = yaml.safe_load(text)
    read_run(fields["run"])
    read_target(fields["target"])
