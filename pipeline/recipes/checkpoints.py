"""Find the checkpoint that a training resumes from, the same on every rank: the newest complete one."""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from manycpu.pipeline.node import sharding
from manycpu.pipeline.recipes.reporting import say
from manycpu.pipeline.spec.errors import BadInputError

SHARDED: Final = "sharded"
"""Folder of a checkpoint with the shares of all ranks, of model and optimizer."""
_NAME: Final = re.compile(r"checkpoint-(\d+)")


def resume_point(
    folder: str | Path, option: str | bool | None, env: Mapping[str, str], *, by_step: bool = False
) -> str | None:
    """Choose the checkpoint to resume from, the same on every rank; None: begin at step 0.

    If the user names a checkpoint (``--resume_from_checkpoint``, else MANYCPU_RESUME_FROM), the run resumes
    from it. A retry of that run resumes from the newest checkpoint that the run itself has written since. If
    the user names none, it is the newest complete one in the folder, which belongs to this run alone.

    Args:
        folder: Where this run writes its checkpoints.
        option: ``--resume_from_checkpoint``; true or false, also as text, names no checkpoint.
        env: The environment of the run.
        by_step: Whether steps compare even if the number of ranks has changed, as with ``--max_steps``; else
            epochs are compared.

    Raises:
        BadInputError: The checkpoint is incomplete, or not every rank can read it.
    """
    named = option if isinstance(option, str) and option.lower() not in ("true", "false") else None
    requested = named or env.get("MANYCPU_RESUME_FROM")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    # Only rank 0 chooses: the ranks might see different checkpoints, and they must not disagree.
    is_first = ranks == 1 or dist.get_rank() == 0
    shared_choice = [_choose(Path(folder), env, requested, by_step=by_step) if is_first else None]
    if ranks > 1:
        dist.broadcast_object_list(shared_choice, src=0)
    chosen = shared_choice[0]
    if chosen is None:
        return None
    problem = fault(Path(chosen))
    readable_on_ranks = [problem is None] * ranks  # without other ranks, this one's answer is all
    if ranks > 1:
        dist.all_gather_object(readable_on_ranks, problem is None)
    if not all(readable_on_ranks):
        raise BadInputError(
            f"cannot resume from {chosen}: {problem or 'not every rank can read it'}",
            field="run.resume_from" if requested else "run.checkpoints",
            fix="Name a complete checkpoint, in a folder that every node shares",
        )
    say(f"resuming from {chosen}, step {step(Path(chosen))}")
    return chosen


def newest(
    folder: str | Path, *, since: float | None = None, by_step: bool = False
) -> tuple[Path | None, list[str]]:
    """Find the latest complete checkpoint of a folder, in the order of :func:`latest_first`.

    Args:
        folder: The folder of checkpoints.
        since: Skip checkpoints written before this Unix time; None: skip none.
        by_step: Whether the greatest step is the latest, and not the latest epoch.

    Returns:
        Its folder, or None; and a message for each checkpoint that was skipped as incomplete.
    """
    skipped: list[str] = []
    found = latest_first(Path(folder), by_step=by_step)
    # Those without a readable state first, so that each of them is reported; the others stay in their order.
    for checkpoint in sorted(found, key=lambda path: step(path) is not None):
        # Not the folder's time: a step that is trained again is saved into the same, older folder.
        state = checkpoint / "trainer_state.json"
        written = state if state.exists() else checkpoint
        if since is not None and written.stat().st_mtime < since:
            continue
        reason = fault(checkpoint)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint} is skipped: {reason}")
    return None, skipped


def latest_first(folder: Path, *, by_step: bool = False) -> list[Path]:
    """List the checkpoints of a folder, complete or not, the latest epoch first.

    Within an epoch, the greatest step comes first. Steps of different epochs do not compare, because the
    steps of an epoch depend on the number of ranks. With ``by_step``, or if a readable state has no epoch,
    only steps count. Checkpoints without a readable state come last.
    """
    matches = {path: _NAME.fullmatch(path.name) for path in folder.glob("checkpoint-*")}
    steps = {path: int(match[1]) for path, match in matches.items() if match}
    states = {path: _state(path) for path in steps}
    compares_epochs = not by_step and all("epoch" in state for state in states.values() if state)

    def sort_key(path: Path) -> tuple[float, int]:
        epoch = states[path].get("epoch") if compares_epochs else 0.0  # 0.0 for all: only steps count
        if not states[path] or epoch is None:
            return -1.0, steps[path]  # last: its state is not readable, or its epoch is null
        return float(epoch), steps[path]

    return sorted(steps, key=sort_key, reverse=True)


def count_foreign(folder: Path, run: str) -> int:
    """Count the checkpoints beside a run's own folder: those of other trainings and of older versions.

    Also 0 if ``folder`` is not named after the run, because then runs do not share the folder around it.
    """
    # A run that trains again after a success has a folder whose name has a time too.
    if folder.name != run and not folder.name.startswith(f"{run}-"):
        return 0
    # Each run has a folder in the parent; earlier versions wrote into the parent itself.
    folders = (folder.parent, *folder.parent.glob("*/"))
    return sum(len(latest_first(other)) for other in folders if other != folder)


def fault(checkpoint: Path) -> str | None:
    """Explain why a checkpoint of a recipe cannot be resumed from; None when it is complete."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    # Rank 0 writes the state as the last of its own files.
    if step(checkpoint) is None:
        return "it has no readable trainer_state.json: it was not written to its end"
    # Each rank writes a rng_state; rank 0 does not wait for those of other ranks, so they may be cut short.
    for file in checkpoint.glob("rng_state*.pth"):
        if not zipfile.is_zipfile(file):
            return f"{file.name} is cut short or damaged"
    if (checkpoint / SHARDED).is_dir():
        return sharding.fault(checkpoint / SHARDED)
    return _fault_of_unsharded(checkpoint)


def _fault_of_unsharded(checkpoint: Path) -> str | None:
    """Explain what is wrong with weights, optimizer or scheduler of a checkpoint that is not sharded.

    None: nothing is wrong.
    """
    weights = sorted([*checkpoint.glob("model*.safetensors"), *checkpoint.glob("adapter_model*.safetensors")])
    if not weights:
        return "it has no model*.safetensors"
    is_whole = {file: _is_whole(file) for file in weights}
    for name in ("optimizer", "scheduler"):
        # The Trainer writes .pt, Accelerate .bin.
        candidates = [checkpoint / f"{name}{suffix}" for suffix in (".pt", ".bin")]
        file = next((candidate for candidate in candidates if candidate.exists()), None)
        if file is None:
            return f"it has no {name}.pt"
        is_whole[file] = zipfile.is_zipfile(file)  # torch.save writes the table of contents last
    cut = next((file.name for file in is_whole if not is_whole[file]), None)
    return f"{cut} is cut short or damaged" if cut else None


def step(checkpoint: Path) -> int | None:
    """Read the step of a checkpoint; None when it cannot be read."""
    try:
        return int(_state(checkpoint)["global_step"])
    except (ValueError, KeyError, TypeError):
        return None


def _state(checkpoint: Path) -> dict[str, Any]:
    """Read what the Trainer recorded of a checkpoint; empty: it cannot be read."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _choose(folder: Path, env: Mapping[str, str], requested: str | None, *, by_step: bool) -> str | None:
    """Choose a checkpoint as :func:`resume_point` describes; None: there is none. Only rank 0 calls this.

    When the run first resumes from ``requested``, create an empty file. Checkpoints that are newer than this
    file are the run's own.
    """
    run = env.get("MANYCPU_RUN", "")
    latest: Path | None = None
    skipped: list[str] = []
    first_resume_file = folder / f".resumed-{run}"  # its time is that of the first resume
    if not requested:
        latest, skipped = newest(folder, by_step=by_step)
    elif run and first_resume_file.exists():  # a retry: it may have checkpoints of its own by now
        latest, skipped = newest(folder, since=first_resume_file.stat().st_mtime, by_step=by_step)
    elif run:  # outside of a run there are no retries to tell apart
        folder.mkdir(parents=True, exist_ok=True)
        first_resume_file.touch()
    for note in skipped:
        say(f"checkpoint {note}")
    if latest or requested:
        return str(latest or requested)
    if foreign := count_foreign(folder, run):
        place = f"{foreign} checkpoint(s) of other trainings are in {folder.parent}"
        say(f"{place}: run.resume_from resumes from one")
    return None


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file was written to its end."""
    try:
        with safe_open(file, framework="pt"):  # compares the file's size with its header
            return True
    except (OSError, SafetensorError):
        return False
