"""torchrun on one machine: its agent starts the ranks, watches them, and restarts them if asked to."""

from typing import Any

from manycpu.pipeline.launchers.environment import environment, node_command
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.spec.training_run import TrainingRun

UNSUPPORTED = {
    "env_from": "secrets by name exist on Kubernetes only; set them where the worker starts",
    "resources.memory": "memory cannot be limited by torchrun",
}


def objects(run: TrainingRun, target: Local, placement: Placement) -> list[dict[str, Any]]:  # noqa: ARG001
    """Return one command, ``{argv, env, cwd, files}``, that starts the ranks by torchrun."""
    argv = [
        placement.python,
        "-m",
        "torch.distributed.run",
        "--standalone",  # a rendezvous on a free port: concurrent runs do not meet
        f"--nproc-per-node={run.processes}",
        f"--max-restarts={run.max_restarts}",
        f"--log-dir={placement.attempt_directory}/torchrun",  # else it leaves a folder in /tmp
        "--no-python",  # what follows is a rank's whole command
        placement.python,
        *node_command(run, placement),
    ]
    # Without it torchrun warns and sets 1 thread; each rank's CPU plan replaces it.
    env = {"OMP_NUM_THREADS": "1"} | environment(run, placement)
    if run.max_restarts:  # else gloo finds addresses of dead ranks in a store that outlives a restart
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [{"argv": argv, "env": env, "cwd": placement.code, "files": {}}]
