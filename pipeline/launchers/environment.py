"""Build the environment and the command that every launcher gives to every rank."""

from pathlib import PurePosixPath
from typing import Final

from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.exit_records import FOLDER
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.program import RECIPES
from manycpu.pipeline.spec.training_run import TrainingRun

PLACEHOLDERS: Final = ("data", "model", "output", "checkpoints")
"""Words in braces in a program's arguments that are replaced by paths of the placement."""


def environment(run: TrainingRun, placement: Placement) -> dict[str, str]:
    """Build the environment variables that all ranks share; those of the user's ``run.env`` win."""
    low, high = run.nodes  # they differ only for a range, such as 2:4
    on_xla = run.device == "xla"
    backend = run.backend or "auto"  # auto: the ranks choose, since they know what is installed
    default_dtype = "auto" if run.program in RECIPES else "fp32"  # a recipe takes bf16 where the CPU has it
    variables = {
        "MANYCPU_RUN": placement.name,
        "MANYCPU_ATTEMPT": str(placement.attempt),
        "MANYCPU_NNODES": str(run.nnodes) if low != high else str(high),
        "MANYCPU_NPROC_PER_NODE": str(run.processes),
        "MANYCPU_SUBPROCESSES": str(run.subprocesses) if run.subprocesses > 1 else "",
        "MANYCPU_XLA_DEVICES": str(run.nproc_per_node) if on_xla else "",
        "MANYCPU_BACKEND": "" if on_xla else backend,  # XLA has collectives of its own
        "MANYCPU_DTYPE": run.dtype or default_dtype,
        "ACCELERATE_DOWNCAST_BF16": "true" if run.downcast_bf16 else "",
        "MANYCPU_SPREAD": run.spread,
        "MANYCPU_CPUS": str(run.resources.cpu or ""),
        "MANYCPU_START_TIMEOUT": str(run.start_timeout),
        "MANYCPU_STALL_TIMEOUT": str(run.stall_timeout or ""),
        # Names only: these variables win over the node's CPU plan, with a warning.
        "MANYCPU_USER_ENV": ",".join(sorted(run.env)),
        "MANYCPU_DATA": placement.data,
        "MANYCPU_MODEL": placement.model,
        "MANYCPU_MODEL_NAME": redacted(run.model or ""),
        "MANYCPU_OUTPUT": placement.output,
        "MANYCPU_CHECKPOINTS": placement.checkpoints,
        "MANYCPU_EXITS": str(PurePosixPath(placement.output).with_name(FOLDER)),  # beside the output
        "MANYCPU_RESUME_FROM": placement.resume_from,
        "HF_HOME": f"{placement.caches}/huggingface",
        "HF_DATASETS_CACHE": f"{placement.caches}/datasets",
        "PYTHONUNBUFFERED": "1",
    }
    # An empty value means that the run does not use the variable.
    return {name: value for name, value in variables.items() if value} | run.env


def node_command(run: TrainingRun, placement: Placement) -> list[str]:
    """Build Python's arguments that run the program through ``manycpu.pipeline.node``, equal on all ranks."""
    return ["-m", "manycpu.pipeline.node", *placement.program, *arguments(run, placement)]


def arguments(run: TrainingRun, placement: Placement) -> list[str]:
    """Return ``run.args`` with paths in place of ``{data}`` and the other placeholders; other braces stay."""
    words = list(run.args)
    for name in PLACEHOLDERS:
        path: str | None = getattr(placement, name)
        if path:  # a run without data or model has no such path: the placeholder stays
            words = [word.replace(f"{{{name}}}", path) for word in words]
    return words
