"""Choose the checkpoint that a training goes on from, the same on every rank."""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from manycpu.pipeline.recipes import checkpoints
from manycpu.pipeline.recipes.emit import say
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["resume_point"]


def resume_point(folder: str | Path, option: str | bool | None, env: Mapping[str, str]) -> str | None:
    """Choose the checkpoint to resume from, the same on every rank.

    What was asked for comes first (``--resume_from_checkpoint``, then MANYCPU_RESUME_FROM), but a retry goes
    on from what the run itself has written since; otherwise the newest whole one in the folder.

    Args:
        folder: Where the run keeps its checkpoints, which it has to itself.
        option: What ``--resume_from_checkpoint`` says.
        env: Environment of the run.

    Raises:
        BadInputError: The checkpoint asked for is not whole, or a rank cannot see it.
    """
    requested = _requested_checkpoint(option, env)
    first = not dist.is_initialized() or dist.get_rank() == 0
    chosen = _agreed(_choice(Path(folder), env, requested) if first else None)
    if chosen is None:
        return None
    problem = checkpoints.fault(Path(chosen))
    if not all(_everywhere(problem is None)):
        raise BadInputError(
            f"cannot go on from {chosen}: {problem or 'not every rank can read it'}",
            field="run.resume_from" if requested else "run.checkpoints",
            fix="Name a whole checkpoint, in a folder that every node shares",
        )
    say(f"going on from {chosen}, step {checkpoints.step(Path(chosen))}")
    return chosen


def _requested_checkpoint(option: str | bool | None, env: Mapping[str, str]) -> Path | None:
    named = option if isinstance(option, str) and option.lower() not in ("true", "false") else None
    path = named or env.get("MANYCPU_RESUME_FROM")
    return Path(path) if path else None


def _choice(folder: Path, env: Mapping[str, str], requested: Path | None) -> str | None:
    began = _first_resumed(folder, env.get("MANYCPU_RUN", "")) if requested else None
    newest, skipped = (None, []) if requested and began is None else checkpoints.newest(folder, since=began)
    for note in skipped:
        say(f"checkpoint {note}")
    chosen = newest or requested
    others = 0 if chosen else checkpoints.of_others(folder, env.get("MANYCPU_RUN", ""))
    if others:
        say(f"{others} checkpoint(s) of other runs are in {folder.parent}: run.resume_from goes on from one")
    return str(chosen) if chosen else None


def _first_resumed(folder: Path, run: str) -> float | None:
    """Return when this run first resumed from the checkpoint asked for; None when it does so only now."""
    mark = folder / f".resumed-{run}"
    if run and mark.exists():
        return mark.stat().st_mtime
    if run:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return None


def _agreed(choice: str | None) -> str | None:
    if not dist.is_initialized():
        return choice
    box = [choice]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _everywhere(mine: bool) -> list[bool]:
    if not dist.is_initialized():
        return [mine]
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    return answers
