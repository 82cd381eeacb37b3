"""What every recipe on Hugging Face's Trainer shares: speed, progress, and resuming from a checkpoint."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from manycpu.pipeline.node.metrics import metrics, progress
from manycpu.pipeline.recipes import checkpoints, ipex
from manycpu.pipeline.recipes.emit import say
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["CpuTrainer", "CpuTrainingOptions", "option", "resume_point", "usable"]

_IN_PROGRESS: Final = ("epoch", "grad_norm", "learning_rate", "loss")


def option(default: Any, text: str) -> Any:
    """Describe an option of a recipe."""
    return field(default=default, metadata={"help": text})


@dataclass
class CpuTrainingOptions(TrainingArguments):
    """Hugging Face's TrainingArguments, with the defaults that fit CPUs; docs/speed.md has the figures."""

    use_cpu: bool = option(default=True, text="Train on CPUs.")
    optim: str = option("adamw_torch_fused", "Optimizer; fused AdamW is the fastest on CPUs.")
    dataloader_pin_memory: bool = option(default=False, text="Only of use with an accelerator.")
    ddp_find_unused_parameters: bool | None = option(
        default=False, text="See torch's DistributedDataParallel."
    )
    logging_steps: float = option(10, "Steps between two reports of progress.")
    gradient_compression: Literal["no", "bf16", "fp16", "power_sgd"] = option(
        "no", "What gradients are sent as: bf16 halves the traffic, power_sgd sends a low-rank part of them."
    )
    use_ipex: bool = option(
        default=False, text="Optimize by Intel's extension, where it is installed: torch 2.8 and earlier."
    )


def usable(options: CpuTrainingOptions) -> list[str]:
    """Switch off options that cannot be used here; returns a note for each."""
    why = ipex.why_not() if options.use_ipex else None
    options.use_ipex = options.use_ipex and why is None
    return [f"--use_ipex is left out: {why}"] if why else []


class CpuTrainer(Trainer):
    """Hugging Face's Trainer that reports its progress, with more settings of torch's DDP."""

    args: CpuTrainingOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(ProgressCallback())
        if self.pop_callback(PrinterCallback):
            self.add_callback(Printer())

    def create_accelerator_and_postprocess(self) -> None:
        """Have gradients live in the buckets that are sent, and compressed there if asked for."""
        super().create_accelerator_and_postprocess()
        handler = self.accelerator.ddp_handler
        handler.gradient_as_bucket_view = True  # no copy from gradients to buckets
        handler.comm_hook = DDPCommunicationHookType(self.args.gradient_compression)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, and let Intel's extension optimize both it and the model if asked for."""
        optimizer = super().create_optimizer(model)
        if self.args.use_ipex:
            dtype = torch.bfloat16 if self.args.bf16 else torch.float32
            self.model, optimizer = ipex.optimize(self.model, optimizer, dtype)
            self.optimizer = optimizer
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; Intel's extension trains in bf16 and saves fp32: the configuration must say so."""
        super().save_model(output_dir, _internal_call)
        if self.args.use_ipex and self.args.should_save and isinstance(self.model, PreTrainedModel):
            self.model.config.dtype = torch.float32
            self.model.config.save_pretrained(str(output_dir or self.args.output_dir))


class Printer(PrinterCallback):
    """Prints what the Trainer logs, once for all nodes of a run, and without what is reported as progress."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print what was logged."""
        logs = logs or {}
        if "MANYCPU_RUN" in os.environ and ("loss" in logs or not state.is_world_process_zero):
            return
        super().on_log(args, state, control, logs, **kwargs)  # type: ignore[no-untyped-call]


class ProgressCallback(TrainerCallback):
    """Reports all that the Trainer logs while it trains; the progress of a step in one line."""

    def __init__(self) -> None:
        self._began, self._first, self._last_step = time.monotonic(), 0, -1
        self._trains = False
        self._metrics: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record where the training begins: after a resume that is not step 0."""
        del args, control, kwargs
        self._began, self._first, self._trains = time.monotonic(), state.global_step, True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the mean loss since the last time as progress, all else that is logged as metrics."""
        del control, kwargs
        logs = logs or {}
        if "loss" in logs:
            self._metrics = {name: logs.get(name) for name in ("grad_norm", "learning_rate")}
            self._metrics["loss"] = round(float(logs["loss"]), 4)
            self._report_progress(args, state)
        others = {name: value for name, value in logs.items() if name not in _IN_PROGRESS}
        if others and self._trains and state.is_world_process_zero:
            metrics(others, step=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report that the last step is done, where the Trainer logged none of it."""
        del control, kwargs
        self._trains = False
        if self._metrics and state.global_step > self._last_step:
            self._report_progress(args, state)

    def _report_progress(self, args: TrainingArguments, state: TrainerState) -> None:
        done, seconds = state.global_step - self._first, time.monotonic() - self._began
        if not state.is_world_process_zero or done == 0:
            return
        self._last_step = state.global_step
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        progress(
            step=state.global_step,
            total_steps=state.max_steps,
            epoch=round(state.epoch or 0.0, 3),
            samples_per_second=round(done * batch / seconds, 2),
            seconds_left=round((state.max_steps - state.global_step) * seconds / done),
            **self._metrics,
        )


def resume_point(args: TrainingArguments, env: Mapping[str, str]) -> str | None:
    """Choose the checkpoint to resume from, the same on every rank.

    What was asked for comes first (``--resume_from_checkpoint``, then MANYCPU_RESUME_FROM), but a retry goes
    on from what the run itself has written since; otherwise the newest whole one in ``args.output_dir``,
    which a run has to itself.

    Raises:
        BadInputError: The checkpoint asked for is not whole, or a rank cannot see it.
    """
    requested = _requested_checkpoint(args, env)
    chosen = _agreed(_choice(args, env, requested) if args.process_index == 0 else None)
    if chosen is None:
        return None
    problem = checkpoints.fault(Path(chosen))
    if not all(_everywhere(problem is None)):
        raise BadInputError(
            f"cannot go on from {chosen}: {problem or 'not every rank can read it'}",
            field="run.resume_from" if requested else "run.checkpoints",
            fix="Name a whole checkpoint, in a folder that every node shares",
        )
    if args.process_index == 0:
        say(f"going on from {chosen}, step {checkpoints.step(Path(chosen))}")
    return chosen


def _requested_checkpoint(args: TrainingArguments, env: Mapping[str, str]) -> Path | None:
    option = args.resume_from_checkpoint
    named = option if isinstance(option, str) and option.lower() not in ("true", "false") else None
    path = named or env.get("MANYCPU_RESUME_FROM")
    return Path(path) if path else None


def _choice(args: TrainingArguments, env: Mapping[str, str], requested: Path | None) -> str | None:
    folder = Path(str(args.output_dir))
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
