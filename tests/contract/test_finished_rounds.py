"""Work that all ranks of a round have finished is not done once more, whichever node is lost then."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.killable_programs import Program
from support.rank_launches import LIGHT, PLAIN, Ended, alone, free_port
from support.waiting import until

from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.observed import add_exit_records, observe
from manycpu.pipeline.spec.exit_records import finished_round
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

_SUCCEEDED = '"code": 0, "event": "exit"'  # a round of one that the other joins ends its rank with SIGTERM
LONG = 300  # seconds: on a slow machine, or a busy one
TRAINS = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(1))
path = os.environ["MANYCPU_OUTPUT"] + "/model.txt"
if dist.get_world_size() == 1 and not os.path.exists(path):
    signal.pause()  # the second agent is late: it begins a round of both
with open(path, "a") as model:
    model.write(f"trained by {dist.get_world_size()}\\n")
dist.destroy_process_group()
"""


class Pods:
    """The agents of an elastic PyTorchJob ``1:2``, each with its ranks, as processes of this machine."""

    def __init__(self, folder: Path, script: Path) -> None:
        run = TrainingRun(program=str(script), output="/out", nnodes="1:2", max_restarts=2, backend="gloo")
        placement = Placement(
            name="train-0123456789",
            attempt=1,
            python=sys.executable,
            code=str(folder),
            program=(str(script),),
            output=f"{folder}/attempt/output",
            checkpoints=f"{folder}/checkpoints",
            caches=f"{folder}/caches",
            attempt_directory=f"{folder}/attempt",
        )
        (job,) = JOB_LAUNCHERS["pytorchjob"].objects(run, Kubernetes(launch="pytorchjob"), placement)
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        first, here = f"{placement.job}-worker-0:23456", f"127.0.0.1:{free_port()}"
        words = [word.replace(first, here) for word in container["command"]]
        # Half a minute for nodes that may still come is torchrun's own choice.
        words = [word + ",last_call_timeout=1" * word.startswith("--rdzv-conf=") for word in words]
        self.argv = [word.replace("$(MANYCPU_ADDRESS)", "127.0.0.1") for word in words]
        self.env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        self.folder = folder
        self.output = Path(placement.output)

    def start(self, number: int) -> tuple[Program[bytes], Path]:
        """Start the agent of a pod; the process, and its log."""
        log = self.folder / f"{number}-{len(list(self.folder.glob('*.log')))}.log"
        with log.open("wb") as file:
            env = PLAIN | self.env | {"MANYCPU_HOST": f"node-{number}", "HOME": str(self.folder)}
            env["MANYCPU_NODE_RANK"] = str(number)
            agent: Program[bytes] = Program(
                self.argv, stdout=file, stderr=file, env=env, cwd=self.folder, start_new_session=True
            )
            return agent, log


def test_a_rank_s_end_is_recorded_and_its_program_is_not_run_again(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    exits = tmp_path / "exits"
    script = write("print('trained')\nraise SystemExit(len(__import__('sys').argv) - 1)")
    failed = alone(script, "fails", MANYCPU_EXITS=str(exits), **LIGHT)
    assert (failed.code, finished_round(exits)) == (1, [])
    ended = alone(script, MANYCPU_EXITS=str(exits), **LIGHT)
    (record,) = finished_round(exits)
    assert (record["rank"], record["world_size"], record["code"]) == (0, 1, 0)
    assert [(rank.rank, rank.exit_code) for rank in observe(record["lines"]).ranks] == [(0, 0)]
    again = alone(script, "fails", MANYCPU_EXITS=str(exits), **LIGHT)
    assert (ended.texts(), again.texts(), again.code) == (["trained"], [], 0)
    assert [event["meeting"] for event in again.events("finished")] == [record["meeting"]]


def test_what_a_notebook_s_function_returned_is_recorded_with_its_end(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    script = write("from manycpu.pipeline.node.emit import say\nsay('result', value=[1])")
    alone(script, MANYCPU_EXITS=str(tmp_path / "exits"), **LIGHT)
    observed = Observed()
    add_exit_records(observed, finished_round(tmp_path / "exits"))
    assert observed.result is not None
    assert observed.result.value == [1]


def test_a_volume_that_takes_no_record_ends_no_rank(write: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "full").write_text("no folder can be made in a file")
    ended = alone(write("print('trained')"), MANYCPU_EXITS=str(tmp_path / "full" / "exits"), **LIGHT)
    assert (ended.code, ended.texts()) == (0, ["trained"])


@pytest.mark.parametrize(
    "back", [[0], pytest.param([0, 1], marks=pytest.mark.long)], ids=["the first", "both"]
)
def test_a_finished_training_is_not_done_once_more(
    back: list[int], write: Callable[[str], Path], tmp_path: Path
) -> None:
    """The pods are lost in the moment in which both have finished, and the operator makes new ones."""
    pods = Pods(tmp_path, write(TRAINS))
    agents = [pods.start(number) for number in (0, 1)]
    logs = [log for _, log in agents]
    until(lambda: all(_SUCCEEDED in log.read_text() for log in logs), LONG)
    for agent, _ in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    again = [pods.start(number) for number in back]
    logs += [log for _, log in again]
    ended = [Ended(agent.wait(LONG), log.read_text()) for agent, log in again]
    assert [(each.code, each.out) for each in ended if each.code != 0] == []
    assert (pods.output / "model.txt").read_text() == "trained by 2\n" * 2
    seen = observe(line for log in logs for line in log.read_text().splitlines())
    assert seen.world_size == 2
    assert [rank.exit_code for rank in seen.ranks] == [0, 0]
    assert seen.backend == "gloo"
