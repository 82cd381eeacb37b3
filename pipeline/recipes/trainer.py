"""What every recipe on Hugging Face's Trainer shares: speed and progress."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
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

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes import ipex
from manycpu.pipeline.recipes.arguments import option
from manycpu.pipeline.recipes.pace import Pace
from manycpu.pipeline.spec.events import set_samples_per_step

__all__ = ["CpuTrainer", "CpuTrainingOptions", "usable"]

_IN_PROGRESS: Final = ("epoch", "grad_norm", "learning_rate", "loss")


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
        self._pace, self._last_step = Pace(), -1
        self._trains = False
        self._metrics: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record where the training begins: after a resume that is not step 0."""
        del control, kwargs
        self._pace, self._trains = Pace(state.global_step), True
        set_samples_per_step(args.train_batch_size * args.gradient_accumulation_steps)

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
        if not state.is_world_process_zero:
            return
        self._last_step = state.global_step
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        epoch = round(state.epoch or 0.0, 3)
        self._pace.report(state.global_step, state.max_steps, batch, epoch=epoch, **self._metrics)
