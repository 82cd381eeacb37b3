"""Find the checkpoint that a training resumes from, the same on every rank: the newest complete one."""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch.distributed as dist

from manycpu.pipeline.recipes.reporting import say
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["fault", "latest_first", "newest", "of_others", "resume_point", "step"]

_NAME: Final = re.compile(r"checkpoint-(\d+)")
_TORCH_FILES: Final = ("optimizer", "scheduler")
_TORCH_SUFFIXES: Final = (".pt", ".bin")  # of the Trainer, and of Accelerate


def resume_point(folder: str | Path, option: str | bool | None, env: Mapping[str, str]) -> str | None:
    """Choose the checkpoint to resume from, the same on every rank.

    The one that the user asks for comes first (``--resume_from_checkpoint``, then MANYCPU_RESUME_FROM), but a
    retry resumes from what the run itself has written since; else the newest complete one in the folder.

    Args:
        folder: Where the run keeps its checkpoints, and no other run does.
        option: The value of ``--resume_from_checkpoint``.
        env: Environment of the run.

    Raises:
        BadInputError: The checkpoint that was asked for is incomplete, or a rank cannot see it.
    """
    named = option if isinstance(option, str) and option.lower() not in ("true", "false") else None
    path = named or env.get("MANYCPU_RESUME_FROM")
    requested = Path(path) if path else None
    first = not dist.is_initialized() or dist.get_rank() == 0
    choice = [_choose(Path(folder), env, requested) if first else None]
    if dist.is_initialized():
        dist.broadcast_object_list(choice, src=0)
    chosen = choice[0]
    if chosen is None:
        return None
    problem = fault(Path(chosen))
    readable = [problem is None]
    if dist.is_initialized():
        readable = [False] * dist.get_world_size()
        dist.all_gather_object(readable, problem is None)
    if not all(readable):
        raise BadInputError(
            f"cannot resume from {chosen}: {problem or 'not every rank can read it'}",
            field="run.resume_from" if requested else "run.checkpoints",
            fix="Name a complete checkpoint, in a folder that every node shares",
        )
    say(f"resuming from {chosen}, step {step(Path(chosen))}")
    return chosen


def newest(folder: str | Path, *, since: float | None = None) -> tuple[Path | None, list[str]]:
    """Find the complete checkpoint with the greatest step.

    Args:
        folder: Where the checkpoints are.
        since: Leave out what was written before this time, in seconds since 1970.

    Returns:
        Its folder, or None; and what is wrong with each later one.
    """
    skipped: list[str] = []
    for checkpoint in latest_first(Path(folder)):
        if since is not None and _written(checkpoint) < since:
            continue
        reason = fault(checkpoint)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint} is skipped: {reason}")
    return None, skipped


def latest_first(folder: Path) -> list[Path]:
    """List the checkpoints of a folder by their steps, complete or not."""
    numbered = [
        (int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


def of_others(folder: Path, run: str) -> int:
    """Count the checkpoints beside a run's own folder: of other runs, or of earlier versions of manycpu."""
    if folder.name != run:
        return 0
    shared = folder.parent
    paths = [*shared.glob("checkpoint-*"), *shared.glob("*/checkpoint-*")]
    return sum(path.parent != folder and _NAME.fullmatch(path.name) is not None for path in paths)


def fault(checkpoint: Path) -> str | None:
    """Explain why a checkpoint of a recipe cannot be resumed from; None when it is complete."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    # The state is written last.
    if step(checkpoint) is None:
        return "it has no readable trainer_state.json: it was not written to its end"
    weights = sorted(checkpoint.glob("model*.safetensors"))
    if not weights:
        return "it has no model*.safetensors"
    if broken := [file.name for file in weights if not _is_whole(file)]:
        return f"{broken[0]} is cut short or damaged"
    return next((problem for name in _TORCH_FILES if (problem := _torch_fault(checkpoint, name))), None)


def step(checkpoint: Path) -> int | None:
    """Read the step of a checkpoint; None when it cannot be read."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _choose(folder: Path, env: Mapping[str, str], requested: Path | None) -> str | None:
    run = env.get("MANYCPU_RUN", "")
    began = _first_resumed(folder, run) if requested else None
    latest, skipped = (None, []) if requested and began is None else newest(folder, since=began)
    for note in skipped:
        say(f"checkpoint {note}")
    chosen = latest or requested
    others = 0 if chosen else of_others(folder, run)
    if others:
        say(f"{others} checkpoint(s) of other runs are in {folder.parent}: run.resume_from resumes from one")
    return str(chosen) if chosen else None


def _first_resumed(folder: Path, run: str) -> float | None:
    """Return when this run first resumed from the checkpoint asked for; None: it does so only now."""
    mark = folder / f".resumed-{run}"
    if run and mark.exists():
        return mark.stat().st_mtime
    if run:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return None


def _torch_fault(checkpoint: Path, name: str) -> str | None:
    files = [checkpoint / f"{name}{suffix}" for suffix in _TORCH_SUFFIXES]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return f"it has no {files[0].name}"
    # torch.save writes a zip, whose table of contents comes last.
    return None if zipfile.is_zipfile(file) else f"{file.name} is cut short or damaged"


def _written(checkpoint: Path) -> float:
    # The folder may be older than its state: a step that is done again is saved into the same one.
    state = checkpoint / "trainer_state.json"
    return state.stat().st_mtime if state.exists() else checkpoint.stat().st_mtime


def _is_whole(file: Path) -> bool:
    """Compare a safetensors file's size with its header: 8 bytes of length, a JSON header, the tensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)
