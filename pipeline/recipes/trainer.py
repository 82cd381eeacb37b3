"""What every recipe on Hugging Face's Trainer shares: telling progress, and going on from a checkpoint."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from manycpu.pipeline.node.metrics import progress
from manycpu.pipeline.recipes import checkpoints
from manycpu.pipeline.recipes.speak import say
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["ProgressCallback", "resume_point"]


class ProgressCallback(TrainerCallback):
    """Tells steps, loss, speed and the time left, whenever the Trainer logs."""

    def __init__(self) -> None:
        self._began, self._first, self._loss = time.monotonic(), 0, math.nan

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note where the training begins: after a resume that is not step 0."""
        del args, control, kwargs
        self._began, self._first = time.monotonic(), state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Tell the mean loss since the last time; other logs are metrics, not progress."""
        del control, kwargs
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])
            self._tell(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell that the last step is done."""
        del control, kwargs
        if not math.isnan(self._loss):
            self._tell(args, state)

    def _tell(self, args: TrainingArguments, state: TrainerState) -> None:
        done, seconds = state.global_step - self._first, time.monotonic() - self._began
        if not state.is_world_process_zero or done == 0:
            return
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        progress(
            step=state.global_step,
            total_steps=state.max_steps,
            epoch=round(state.epoch or 0.0, 3),
            loss=round(self._loss, 4),
            samples_per_second=round(done * batch / seconds, 2),
            seconds_left=round((state.max_steps - state.global_step) * seconds / done),
        )


def resume_point(args: TrainingArguments, env: Mapping[str, str]) -> str | None:
    """Decide which checkpoint to go on from, the same on every rank.

    What was asked for comes first (``--resume_from_checkpoint``, then MANYCPU_RESUME_FROM), but a retry goes
    on from what the run itself has written since; otherwise the newest whole one in ``args.output_dir``.

    Raises:
        BadInputError: The checkpoint asked for is not whole, or a rank cannot see it.
    """
    asked = _asked(args, env)
    chosen = _agreed(_choice(args, env, asked) if args.process_index == 0 else None)
    if chosen is None:
        return None
    problem = checkpoints.fault(Path(chosen))
    if not all(_everywhere(problem is None)):
        raise BadInputError(
            f"cannot go on from {chosen}: {problem or 'not every rank can read it'}",
            field="run.resume_from" if asked else "run.checkpoints",
            fix="Name a whole checkpoint, in a folder that every node shares",
        )
    if args.process_index == 0:
        say(f"going on from {chosen}, step {checkpoints.step(Path(chosen))}")
    return chosen


def _asked(args: TrainingArguments, env: Mapping[str, str]) -> Path | None:
    option = args.resume_from_checkpoint
    named = option if isinstance(option, str) and option.lower() not in ("true", "false") else None
    path = named or env.get("MANYCPU_RESUME_FROM")
    return Path(path) if path else None


def _choice(args: TrainingArguments, env: Mapping[str, str], asked: Path | None) -> str | None:
    folder = Path(str(args.output_dir))
    began = _first_begun(folder, env.get("MANYCPU_RUN", "")) if asked else None
    found, skipped = (None, []) if asked and began is None else checkpoints.newest(folder, since=began)
    for note in skipped:
        say(f"checkpoint {note}")
    chosen = found or asked
    return str(chosen) if chosen else None


def _first_begun(folder: Path, run: str) -> float | None:
    """Tell when this run first began from a checkpoint asked for; None when it does so only now."""
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
