"""Parse the options: those of PyTorch's example, with the same names and defaults, and further ones."""

import math
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.machine import Machine

_COUNTS: Final = ("average_every", "batch_size", "epochs", "log_interval", "num_processes", "test_batch_size")
_DEVICES: Final = ("cuda", "mps")  # options that are accepted and ignored


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a training."""

    batch_size: int
    test_batch_size: int
    epochs: int
    lr: float
    momentum: float
    seed: int
    log_interval: int
    num_processes: int
    dry_run: bool
    save_model: bool
    mode: str
    average_every: int
    start_method: str
    threads_per_process: int | None
    """0: torch's own default; None: the processes share the rank's cores."""
    notes: tuple[str, ...] = ()
    """Notes on options that were read in another way than they are written."""

    @property
    def averaged(self) -> bool:
        """Whether each process has a model of its own."""
        return self.mode == "averaged"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInputError(message, field="run.args", fix="`--help` lists all options")


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Parse the options; MANYCPU_SUBPROCESSES in the environment is the default of --num-processes.

    Raises:
        BadInputError: An option cannot be used, or several ranks are to share one model.
    """
    values = vars(_parser(env).parse_args(argv))
    notes = [f"--{name}: this recipe trains on CPUs, as it does now" for name in _DEVICES if values.pop(name)]
    if (device := values.pop("device")) != "cpu":
        raise BadInputError(
            f"--device {device}: this recipe trains on CPUs", field="run.args", fix="Leave it out"
        )
    options = Options(**values, notes=tuple(notes))
    fix_of_option = {name: "Give 1 or more, or leave it out" for name in _COUNTS if values[name] < 1}
    if (options.threads_per_process or 0) < 0:
        fix_of_option["threads_per_process"] = "Give 0 or more, or leave it out"
    if not (math.isfinite(options.lr) and options.lr > 0):
        fix_of_option["lr"] = "Give a number above 0"
    if not 0 <= options.momentum < 1:
        fix_of_option["momentum"] = "Give a number from 0 to below 1"
    if fix_of_option:  # one message is enough
        name, fix = next(iter(fix_of_option.items()))
        message = f"--{name.replace('_', '-')} {values[name]} cannot be used"
        raise BadInputError(message, field="run.args", fix=fix)
    ranks = int(env.get("WORLD_SIZE") or 1)
    if ranks > 1 and not options.averaged:
        raise BadInputError(
            f"--mode shared has one model in the memory of one rank, and there are {ranks} ranks",
            field="run.args",
            fix="Add --mode averaged, or set run.nnodes and run.nproc_per_node to 1 and run.subprocesses to "
            "the number of processes",
        )
    return options


def threads(options: Options, env: Mapping[str, str], default: int) -> int:
    """Choose how many threads each process computes with: floor(the rank's cores / processes), at least 1.

    ``--threads-per-process`` wins. The choice is ``default``, torch's own, if that option is 0, or if run.env
    sets OMP_NUM_THREADS (MANYCPU_USER_ENV has the names that run.env sets).
    """
    if options.threads_per_process:
        return options.threads_per_process
    if options.threads_per_process == 0 or "OMP_NUM_THREADS" in env.get("MANYCPU_USER_ENV", "").split(","):
        return default
    if planned := env.get("MANYCPU_THREADS"):  # of each subprocess of the rank
        cores = int(planned) * int(env.get("MANYCPU_SUBPROCESSES") or 1)
    else:  # outside of a run
        cores = math.floor(Machine.observe().cores)
    return max(1, cores // options.num_processes)


def _parser(env: Mapping[str, str]) -> ArgumentParser:
    """Make the parser; the options of PyTorch's example for devices are accepted, and hidden in the help."""
    parser = _Parser("hogwild", allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--batch-size", type=int, default=64, help="images of a training step")
    add("--test-batch-size", type=int, default=1000, help="images of a test step")
    add("--epochs", type=int, default=10, help="how often each process goes through the data")
    add("--lr", type=float, default=0.01, help="learning rate")
    add("--momentum", type=float, default=0.5, help="momentum of SGD")
    add("--seed", type=int, default=1, help="random seed; each process adds its number")
    add("--log-interval", type=int, default=10, help="steps between reports of a process")
    default = max(2, int(env.get("MANYCPU_SUBPROCESSES") or 1))
    add("--num-processes", type=int, default=default, help="processes that train; run.subprocesses, or 2")
    add("--dry-run", action="store_true", help="take one step of each epoch")
    add("--save_model", "--save-model", action="store_true", help="outside of a run: save the model here")
    add("--mode", choices=("shared", "averaged"), default="shared", help="one model for all, or one each")
    add("--average-every", type=int, default=10, help="steps between averages, with --mode averaged")
    methods = ("spawn", "fork", "forkserver")
    add("--start-method", choices=methods, default="spawn", help="how processes are started")
    add("--threads-per-process", type=int, help="default: the rank's cores, shared; 0: torch's own default")
    for name in _DEVICES:
        add(f"--{name}", action="store_true", help=SUPPRESS)
    add("--device", default="cpu", help=SUPPRESS)
    return parser
