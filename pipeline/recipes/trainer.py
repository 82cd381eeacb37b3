"""What every recipe on Hugging Face's Trainer shares: CPU defaults, progress, and Intel's extension."""

import contextlib
import copy
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import datasets  # type: ignore[import-untyped]
import torch
import transformers
from accelerate.utils import DDPCommunicationHookType
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from manycpu.pipeline.node import sharding
from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes.arguments import check_least, option
from manycpu.pipeline.recipes.checkpoints import SHARDED, resume_point
from manycpu.pipeline.recipes.lengths import LengthGroups, token_lengths
from manycpu.pipeline.recipes.reporting import Pace, say, say_notes
from manycpu.pipeline.spec.errors import BadInputError

_COUNTS: Final = (
    *("per_device_train_batch_size", "per_device_eval_batch_size"),
    *("gradient_accumulation_steps", "dataloader_prefetch_factor"),
)
_REPLACED: Final = (
    "torch itself has bf16 autocast, fused AdamW and torch.compile, which are as fast (docs/speed.md)"
)
_EPOCH_TOLERANCE: Final = 1e-9  # largest rounding error of an epoch, which is a float such as 1.5
_STEP_METRICS: Final = ("train_loss", "train_samples_per_second", "train_steps_per_second")


@dataclass
class CpuTrainingOptions(TrainingArguments):
    """Hugging Face's TrainingArguments, with the defaults that fit CPUs; docs/speed.md has the figures."""

    use_cpu: bool = option(True, "Train on CPUs.")
    optim: str = option("adamw_torch_fused", "Optimizer; fused AdamW is the fastest on CPUs.")
    dataloader_pin_memory: bool = option(False, "Only of use with an accelerator.")
    ddp_find_unused_parameters: bool | None = option(False, "See torch's DistributedDataParallel.")
    logging_steps: float = option(10, "Steps between two reports of progress.")
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = option(
        "random",
        "Order of the samples: group_by_length puts those of like length into a step, the longest first and "
        "the others in random order: little padding, but a short training may learn less (docs/speed.md).",
    )
    gradient_compression: Literal["no", "bf16", "fp16", "power_sgd"] = option(
        "no", "What gradients are sent as: bf16 halves the traffic, power_sgd sends a low-rank part of them."
    )
    shard: Literal["auto", "no", "full", "hybrid"] = option(
        "auto",
        "What each rank holds: no: a replica of the model; full: a share over all ranks; hybrid: a share "
        "over the ranks of a node, and a replica on each node; auto: full where a replica does not fit "
        "the node's memory, else no (docs/large_models.md).",
    )
    per_device_eval_batch_size: int = option(
        None, "Samples of a rank's batch of an evaluation; default: as many as of a step."
    )
    use_ipex: bool = option(
        False, "Optimize by Intel's extension, where it is installed: torch 2.8 and earlier."
    )

    def __post_init__(self) -> None:
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self.per_device_train_batch_size
        super().__post_init__()  # type: ignore[no-untyped-call]


def usable(options: CpuTrainingOptions) -> list[str]:
    """Check the options, and switch off ``--use_ipex`` where it cannot be used; returns notes that say why.

    Raises:
        BadInputError: An option is a secret that would be saved, or a number cannot be used.
    """
    check_least(options, 1, *_COUNTS)
    check_least(options, 0, "learning_rate")
    if options.hub_token:
        fix = "Give it as HF_TOKEN, by run.env or run.env_from"
        raise BadInputError("--hub_token is written into each checkpoint", field="run.args", fix=fix)
    why = why_no_ipex() if options.use_ipex else None
    options.use_ipex = options.use_ipex and why is None
    return [f"--use_ipex is left out: {why}"] if why else []


def begin(options: CpuTrainingOptions, notes: Iterable[str], env: Mapping[str, str]) -> None:
    """Begin a training on a rank: hide bars in logs and repeated warnings, write notes, set the seed."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        options.disable_tqdm = True
    if options.process_index > 0:
        # Warnings are the same on all ranks: print them once.
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    say_notes(notes, env, bf16=options.bf16)
    set_seed(options.seed)


def why_no_ipex() -> str | None:
    """Explain why Intel's extension for PyTorch cannot be used here; None where it can."""
    try:
        return misfit(version("intel-extension-for-pytorch"), version("torch"))
    except PackageNotFoundError:
        return f"intel-extension-for-pytorch is not installed, and ended at torch 2.8; {_REPLACED}"


def misfit(extension: str, torch: str) -> str | None:
    """Explain why the extension's version does not fit torch's; None: major and minor numbers are equal."""
    needed, present = (".".join(number.split(".")[:2]) for number in (extension, torch))
    if needed == present:
        return None
    message = f"intel-extension-for-pytorch {extension} needs torch {needed}, and this is torch {torch}"
    return f"{message}; {_REPLACED}"


def trained_config(model: Any) -> Any:
    """Return a copy of a model's configuration, without the part that says how this training shards it."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "distributed_config"):
        del config.distributed_config
    return config


class CpuTrainer(Trainer):
    """Hugging Face's Trainer that reports its progress, with more settings of torch's DDP."""

    args: CpuTrainingOptions
    # Any: the Trainer's own types name all that they may be, before a training begins too.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, model: Any, args: CpuTrainingOptions, **kwargs: Any) -> None:
        is_model_only = args.save_only_model
        # For super().__init__ alone: it refuses to save a sharded optimizer, which this class can save.
        args.save_only_model = True
        super().__init__(model, args, **kwargs)
        args.save_only_model = is_model_only
        self.is_sharded: bool = getattr(self, "is_distributed_loading_by_transformers", False)
        """Whether each rank holds a share of the model, whatever the options ask for."""
        if self.is_sharded:
            if sharding.spans_nodes():
                sharding.overlap(model)  # gather the next block while one computes
            if is_model_only:
                say("--save_only_model is left out: a sharded checkpoint has model and optimizer in one")
                args.save_only_model = False
        self.add_callback(ProgressCallback())
        if self.pop_callback(PrinterCallback):  # the Trainer has it where bars are off
            self.add_callback(Printer())

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Return the order of the rows to train on; the Trainer chooses it unless it is ``group_by_length``.

        With ``group_by_length``, rows of like length come together in a step of all ranks. If all rows have
        one length, or their lengths are unknown, the order is random.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        options = self.args
        if options.train_sampling_strategy != "group_by_length" or not isinstance(dataset, Sized):
            return super()._get_train_sampler(train_dataset)
        lengths = token_lengths(dataset)
        if lengths is None or not len(lengths) or lengths.min() == lengths.max():
            return RandomSampler(dataset)
        group = options.train_batch_size * options.gradient_accumulation_steps * options.world_size
        seed = options.seed if options.data_seed is None else options.data_seed
        # The Trainer's own count: Accelerate reports no epoch to a sampler whose first batches are skipped.
        return LengthGroups(lengths, group, seed, epoch=lambda: int(self.state.epoch or 0))

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """Keep the order of the rows, by which scores are matched with questions; None: no known length."""
        return SequentialSampler(eval_dataset) if isinstance(eval_dataset, Sized) else None

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and set how torch's DDP stores gradients, and compresses them if asked to."""
        super().create_accelerator_and_postprocess()
        handler = self.accelerator.ddp_handler
        handler.gradient_as_bucket_view = True  # no copy from gradients to buckets
        handler.comm_hook = DDPCommunicationHookType(self.args.gradient_compression)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer; with ``--use_ipex``, Intel's extension replaces it and the model."""
        if self.is_sharded:
            sharding.release(self.model)  # an evaluation before the training leaves weights gathered
        optimizer = super().create_optimizer(model)
        if self.args.use_ipex:
            import intel_extension_for_pytorch as ipex  # type: ignore[import-not-found,unused-ignore]

            say(f"Intel's extension {version('intel-extension-for-pytorch')} optimizes model and optimizer")
            dtype = torch.bfloat16 if self.args.bf16 else torch.float32
            model_used: Any = self.model
            model_used.train()
            self.model, optimizer = ipex.optimize(model_used, optimizer=optimizer, dtype=dtype, inplace=True)
            self.optimizer = optimizer
        return optimizer

    def resume_point(self, env: Mapping[str, str]) -> str | None:
        """Choose the checkpoint to resume from by the options and ``env``; None: begin at step 0."""
        args = self.args
        by_step = args.max_steps > 0  # else _init_training_state counts by epochs
        return resume_point(str(args.output_dir), args.resume_from_checkpoint, env, by_step=by_step)

    def _init_training_state(
        self, max_steps: int, epoch_steps: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Resume: convert the checkpoint's step to the step of this training at the same place in the data.

        An epoch of this training may have another number of steps, which depends on the number of ranks and
        their batches. With ``--max_steps``, the step stays. If the checkpoint is of another training, its
        evaluations do not count, so that the best model is one of this training.

        Returns:
            Epochs that are done, and the batches to skip in the present epoch.
        """
        trainer_result: tuple[int, int] = super()._init_training_state(
            max_steps, epoch_steps, epochs, checkpoint, trial
        )
        if checkpoint and Path(checkpoint).parent.resolve() != Path(str(self.args.output_dir)).resolve():
            state: Any = self.state  # its own types are those before a checkpoint is read
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            state.stateful_callbacks.pop("EarlyStopping", None)  # it counts evaluations
        accumulated = self.args.gradient_accumulation_steps
        done = steps_done(self.state.epoch or 0.0, self._epoch_batches, accumulated)
        if self.args.max_steps > 0 or done == self.state.global_step:  # the step needs no conversion
            return trainer_result
        say(
            f"step {self.state.global_step} of the checkpoint is step {done} here: epoch {self.state.epoch:g}"
        )
        self.state.global_step = done
        self.state.best_global_step = None  # here, that number is another step's
        # The Trainer skips batches, of which a step has `accumulated`.
        steps_to_skip = 0 if self.args.ignore_data_skip else done % epoch_steps
        return done // epoch_steps, steps_to_skip * accumulated

    def get_train_dataloader(self) -> Any:
        """Make the loader of the batches of this rank, and remember how many an epoch has."""
        loader = super().get_train_dataloader()
        self._epoch_batches = len(loader)
        return loader

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as the Trainer does; leave out loss and speed if this process has trained no step.

        Raises:
            BadInputError: The options leave no step to train.
        """
        trained = super().train(*args, **kwargs)
        if not self.state.global_step:
            raise BadInputError(
                "no step was trained: the options leave no batch, or no epoch",
                field="run.args",
                fix="See --num_train_epochs, --max_steps, --per_device_train_batch_size and "
                "--dataloader_drop_last",
            )
        return trained._replace(metrics=self._drop_metrics_of_no_step(trained.metrics))

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Log values, as the Trainer does; leave out loss and speed if this process has trained no step."""
        super().log(self._drop_metrics_of_no_step(logs), start_time)

    def _drop_metrics_of_no_step(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Drop loss and speed if this process has trained no step, as after a resume from the last one.

        The Trainer would report 0 for them.
        """
        # The Trainer sets _initial_global_step when a training begins: before, an evaluation may log values.
        has_trained = self.state.global_step > getattr(self, "_initial_global_step", -1)
        return {name: value for name, value in values.items() if has_trained or name not in _STEP_METRICS}

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch, unless all steps are done, or a callback has stopped the training before it.

        The Trainer checks these two only after a step, so it would train one step too many.
        """
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Reduce the gradients after each batch and not once at the end of a step, unless ``--shard hybrid``.

        Until it reduces them, a rank holds the gradients of the whole model.
        """
        if self.args.shard == "hybrid":  # where only the reduction between nodes is deferred
            with super()._defer_fsdp_gradient_reduction():
                yield
        else:
            yield

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, unless its folder already holds the best model, which is of another step.

        A resume with another number of ranks renumbers the steps. So two steps can have the same number, and
        the same folder.
        """
        folder = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        best, best_step = self.state.best_model_checkpoint, self.state.best_global_step
        if best and Path(best) == folder and best_step != self.state.global_step:
            say(f"{folder} is not written: it holds the best model, of an earlier epoch")
            return
        # The folder may have files of an earlier save: without a state, a mix of both is incomplete.
        if self.args.should_save:
            (folder / "trainer_state.json").unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the Trainer does; if it is sharded, save it from the shares of all ranks.

        Intel's extension trains in bf16 and saves fp32, so the configuration is corrected to fp32. If the
        model is not sharded, shares that an earlier attempt left in the checkpoint's folder are deleted.

        Args:
            output_dir: The folder to write to; default: that of the options.
            _internal_call: Whether the model becomes part of a checkpoint.
        """
        if _internal_call and self.args.should_save and not self.is_sharded:
            # A resume prefers shares, and an earlier sharded attempt may have left stale ones in this folder.
            shutil.rmtree(Path(str(output_dir), SHARDED), ignore_errors=True)
        if self.is_sharded and isinstance(self.model, PreTrainedModel):
            self._save_sharded(Path(str(output_dir or self.args.output_dir)), is_checkpoint=_internal_call)
            return
        super().save_model(output_dir, _internal_call)
        if self.args.use_ipex and self.args.should_save and isinstance(self.model, PreTrainedModel):
            self.model.config.dtype = torch.float32
            self.model.config.save_pretrained(str(output_dir or self.args.output_dir))

    def _save_sharded(self, folder: Path, *, is_checkpoint: bool) -> None:
        """Save configuration and tokenizer, and the whole weights unless it is a checkpoint.

        A checkpoint has the weights as shares of the ranks, which are saved with the optimizer.
        """
        if self.args.should_save:
            config = trained_config(self.model)
            # torch's fully_shard puts FSDP before the name of the model's class.
            config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
            config.dtype = torch.float32  # of the weights; bf16 is for the computation alone
            config.save_pretrained(folder)
            if self.model.can_generate():
                self.model.generation_config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        if not is_checkpoint:
            sharding.export(self.model, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer and scheduler; if the model is sharded, each rank also saves its share of it."""
        if not self.is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))
        sharding.save(Path(output_dir, SHARDED), self.model, self._plain_optimizer())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, unless the checkpoint is sharded.

        Raises:
            BadInputError: The model is sharded, and the checkpoint is not.
        """
        if Path(resume_from_checkpoint, SHARDED).is_dir():
            return  # _load_optimizer_and_scheduler loads the weights too
        if self.is_sharded:
            raise BadInputError(
                f"{resume_from_checkpoint} is of a training that was not sharded",
                field="run.args",
                fix="Resume it with --shard no, or begin again in another folder of checkpoints",
            )
        if model is None and isinstance(self.model, PreTrainedModel):
            # A checkpoint names weights as the base does: from_pretrained translates the names; the Trainer
            # skips those that the model does not have.
            saved = type(self.model).from_pretrained(resume_from_checkpoint)
            self.model.load_state_dict(saved.state_dict())
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer and scheduler, and set the scheduler to this training's step.

        From a sharded checkpoint, load the weights too.
        """
        if checkpoint is None or not Path(checkpoint, SHARDED).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            sharding.load(Path(checkpoint, SHARDED), self.model, self._plain_optimizer())
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))
        # With other ranks or batches, _init_training_state has changed the step. A LambdaLR computes the rate
        # from the step alone.
        scheduler, step = self.lr_scheduler, self.state.global_step
        if checkpoint and isinstance(scheduler, LambdaLR) and scheduler.last_epoch != step:
            scheduler.last_epoch = step - 1
            scheduler.step()  # adds 1, and gives the optimizer the learning rate of that step

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, which may be sharded."""
        best = Path(str(self.state.best_model_checkpoint))
        if (best / SHARDED).is_dir():
            sharding.load_weights(best / SHARDED, self.model)
        # A whole model, not an adapter alone: its weights may have other names than the model's. With
        # Accelerate's FSDP, the Trainer has a way of its own.
        elif not self.is_fsdp_enabled and any(best.glob("model*.safetensors")):
            self._load_from_checkpoint(str(best))
        else:
            super()._load_best_model()

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer without Accelerate's wrapper."""
        plain: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return plain


def steps_done(epoch: float, epoch_batches: int, accumulated: int) -> int:
    """Convert an epoch, such as 1.5, to the number of steps done; a part of a step does not count.

    Args:
        epoch: Epochs that are done, and the share of batches of the present one, as the Trainer writes it.
        epoch_batches: Batches of this rank in an epoch.
        accumulated: Batches of a step; the last step of an epoch may have fewer.
    """
    whole_epochs = int(epoch + _EPOCH_TOLERANCE)
    batches = round((epoch - whole_epochs) * epoch_batches)
    return whole_epochs * math.ceil(epoch_batches / accumulated) + batches // accumulated


class Printer(PrinterCallback):
    """Prints what the Trainer logs; in a run, only on rank 0 and without what is reported as progress."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the values; in a run, only on rank 0, and only if there is no loss among them."""
        is_progress = "loss" in (logs or {})
        if "MANYCPU_RUN" not in os.environ or (state.is_world_process_zero and not is_progress):
            super().on_log(args, state, control, logs, **kwargs)  # type: ignore[no-untyped-call]


class ProgressCallback(TrainerCallback):
    """Reports what the Trainer logs while it trains; the progress of a step in one line."""

    _trains = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Begin to measure the speed, from the step that is resumed from."""
        samples = args.train_batch_size * args.gradient_accumulation_steps
        self._pace = Pace(state.global_step, samples, args.world_size)
        self._trains = True
        self._metrics: dict[str, Any] = {}  # of the last progress; empty: none was reported

    def on_log(self, args: Any, state: TrainerState, *_: Any, logs: Any = None, **__: Any) -> None:
        """Report the mean loss since the last report as progress, and the other logged values as metrics.

        Only the first rank does, and only during the training.
        """
        del args
        logs = logs or {}
        if not self._trains or not state.is_world_process_zero:
            return
        if "loss" in logs:
            self._metrics = {name: logs.get(name) for name in ("grad_norm", "learning_rate")}
            self._metrics["loss"] = round(float(logs["loss"]), 4)
            self._report(state)
        in_progress = ("epoch", "grad_norm", "learning_rate", "loss")
        other_values = {name: value for name, value in logs.items() if name not in in_progress}
        if other_values:
            metrics(other_values, step=state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Report that the last step is done, where the Trainer has not logged it."""
        del args
        self._trains = False
        if self._metrics and state.global_step > self._last_step:
            self._report(state)

    def _report(self, state: TrainerState) -> None:
        self._last_step = state.global_step
        epoch = round(state.epoch or 0.0, 3)
        self._pace.report(state.global_step, state.max_steps, epoch=epoch, **self._metrics)
