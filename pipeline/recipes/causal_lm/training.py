"""Run the training from end to end: data, model, packs, Trainer, and what is written to the output."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import EvalLoopOutput

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes.causal_lm import inputs
from manycpu.pipeline.recipes.causal_lm.card import base_of, card
from manycpu.pipeline.recipes.causal_lm.inputs import Documents
from manycpu.pipeline.recipes.causal_lm.options import Options
from manycpu.pipeline.recipes.causal_lm.packing import (
    IGNORED,
    Packs,
    Padded,
    flat,
    is_causal,
    loss_sum,
    use_packing,
)
from manycpu.pipeline.recipes.checkpoints import step
from manycpu.pipeline.recipes.reporting import say, write_results
from manycpu.pipeline.recipes.trainer import CpuTrainer, begin, trained_config
from manycpu.pipeline.spec.errors import BadInputError

ADAPTER: Final = "adapter"
"""Folder of the adapter in the output; the merged model is the output itself."""
_LARGEST_EXPONENT: Final = 700.0  # of a perplexity that is a number


def run(options: Options, env: Mapping[str, str]) -> dict[str, Any]:
    """Train and evaluate; write the model, the adapter, samples and a model card to ``options.output``.

    Returns:
        The results by name.

    Raises:
        BadInputError: Data, model or checkpoint cannot be used with these options.
    """
    training = options.training
    begin(training, options.notes, env)
    config, tokenizer = inputs.read_config(options.model)
    if not options.data.packing:
        inputs.check_pad(tokenizer)
    length = inputs.usable_length(options.data, config)
    # The first process of a node prepares the data; the others find it in the cache.
    with training.main_process_first(local=True, desc="preparing the data"):
        splits = inputs.read_data(options.model, options.data, env, training.seed)
        prepared = inputs.prepare(splits, options.data, tokenizer, length)
    if options.data.early_stopping_patience and "validation" not in prepared:
        fix = "Give a validation split, or --validation_split_percentage"
        raise BadInputError("--early_stopping_patience has nothing to evaluate on", field="run.args", fix=fix)
    set_seed(training.seed)  # random weights do not depend on whether the data was cached
    trainer = _trainer(options, config, tokenizer, prepared, length)
    resume = trainer.resume_point(env)
    if resume:
        _check_method(resume, options.model.method)
        if options.model.method != "full":
            _check_adapter(Path(resume), trainer.model)
    resumed_step = step(Path(resume)) if resume else None  # the training may delete that checkpoint
    trained = trainer.train(resume_from_checkpoint=resume)
    packs: Any = trainer.train_dataset
    results: dict[str, Any] = {
        **trained.metrics,
        "train_steps": trained.global_step,
        "train_tokens": packs.tokens,
        **({"resumed_from_step": resumed_step} if resume else {}),
    }
    if "train_loss" in trained.metrics:  # CpuTrainer leaves it out if no step was left after a resume
        # The Trainer reports the loss of rank 0 only.
        mean_loss = trainer.accelerator.reduce(torch.tensor(trained.metrics["train_loss"]), "mean")
        # The Trainer's samples are packs: each has this many tokens in the mean.
        tokens_per_second = trained.metrics["train_samples_per_second"] * packs.tokens / len(packs)
        results |= {
            "train_loss": float(mean_loss),
            "train_tokens_per_second": round(tokens_per_second, 1),
        }
    if "validation" in prepared:
        results |= trainer.evaluate()
    metrics(results)
    _export(options, env, trainer, tokenizer, prepared, results)
    if dist.is_initialized():
        dist.barrier()  # until rank 0 has written
    return results


def _check_method(checkpoint: str, method: str) -> None:
    """Raise BadInputError if another method than this training's wrote a checkpoint."""
    checkpoint_method = _method_of(Path(checkpoint))
    if checkpoint_method != method:
        fix = f"Give --method {checkpoint_method}, or another folder of checkpoints"
        raise BadInputError(
            f"{checkpoint} is of a training by --method {checkpoint_method}", field="run.args", fix=fix
        )


def _check_adapter(checkpoint: Path, model: Any) -> None:
    """Raise BadInputError if a checkpoint's adapters have another ``lora_r`` or are of other layers."""
    saved = json.loads((checkpoint / "adapter_config.json").read_text(encoding="utf-8"))
    config = model.peft_config["default"]
    # peft records whole names of layers, or their ends: the last parts are compared.
    layer_names = [
        " ".join(sorted({name.rpartition(".")[2] for name in names}))
        for names in (saved["target_modules"], config.target_modules)
    ]
    for name, saved_value, own_value in (
        ("lora_r", saved["r"], config.r),
        ("lora_target_modules", *layer_names),
    ):
        if saved_value != own_value:
            fix = f"Give these instead of {own_value}, or another folder of checkpoints"
            raise BadInputError(
                f"{checkpoint} has adapters of --{name} {saved_value}", field="run.args", fix=fix
            )


def _method_of(checkpoint: Path) -> str:
    """Return the method that wrote a checkpoint: full, lora or dora."""
    adapter = checkpoint / "adapter_config.json"
    if not adapter.exists():
        return "full"
    return "dora" if json.loads(adapter.read_text(encoding="utf-8")).get("use_dora") else "lora"


def _trainer(
    options: Options,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Mapping[str, Documents],
    length: int,
) -> "LanguageTrainer":
    """Make the model, with adapters if asked for, and its Trainer.

    Writes to the log how many documents and tokens each split has.
    """
    model, is_packed = _load_model(options, config, tokenizer, length)
    if options.model.method != "full":
        model = inputs.with_adapter(model, options.model)
    packs = {
        split: Packs(split_data.table, size=length if is_packed else None)
        for split, split_data in prepared.items()
    }
    for split, split_data in packs.items():
        filled = split_data.tokens / (len(split_data) * length)
        packing = f", in {len(split_data)} sequences of {length}, {filled:.1%} filled" if is_packed else ""
        say(f"{split}: {split_data.documents} documents of {split_data.tokens} tokens{packing}")
    patience = options.data.early_stopping_patience
    return LanguageTrainer(
        model=model,
        args=options.training,
        train_dataset=packs["train"],
        eval_dataset=packs.get("validation"),
        processing_class=tokenizer,
        data_collator=flat if is_packed else Padded(int(tokenizer.pad_token_id or 0)),
        callbacks=[EarlyStopping(patience)] if patience else [],
    )


def _load_model(
    options: Options, config: Any, tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[Any, bool]:
    """Load the model, and have it compute packed batches if the options ask for it.

    Returns:
        The model, and whether it computes packed batches. If it cannot, the log says why.

    Raises:
        BadInputError: The model is not causal, or batches must be padded and the tokenizer has no pad token.
    """
    load = partial(inputs.load_model, options.model, config, options.training, length)
    model: Any = load()
    if not is_causal(model):
        message = f"{type(model).__name__} sees later tokens too: it is no causal language model"
        raise BadInputError(
            message, field="run.model", fix="Choose a decoder, or set is_decoder in config.json"
        )
    if not options.data.packing:
        return model, False
    why_unpacked = use_packing(model)
    if why_unpacked is None:
        return model, True
    if isinstance(model, FSDPModule):
        del model  # first, so that memory has one model only
        model = load()  # a forward pass that ended in the middle leaves FSDP's shares in a wrong state
    say(f"--packing is left out: {why_unpacked}; batches are padded")
    inputs.check_pad(tokenizer)
    return model, False


class EarlyStopping(EarlyStoppingCallback):
    """Stops a training whose evaluations no longer improve; after a resume, it continues to count."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue the checkpoint's count of evaluations; if it shows that the training had stopped, stop."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        # Without a checkpoint there is no count yet: it begins with this object's own, 0.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            say(f"the training had stopped early, at step {state.global_step}")
            control.should_training_stop = True


class LanguageTrainer(CpuTrainer):
    """A Trainer whose losses are means over tokens, exact for any number of ranks and accumulated batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # so the Trainer counts the tokens of a step of all ranks

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return what a batch adds to the mean loss over all tokens of a step.

        ``num_items_in_batch`` counts the tokens of all ranks; None: the mean is over this batch alone. DDP
        divides the sum of the gradients by the number of ranks, so the loss is multiplied by that number.
        """
        if num_items_in_batch is None:  # then the mean is over this batch alone
            token_count = (inputs["labels"][:, 1:] != IGNORED).sum()
        else:
            token_count = num_items_in_batch
        tokens = torch.as_tensor(token_count).clamp(min=1)
        is_global = num_items_in_batch is not None and self.args.average_tokens_across_devices
        loss = loss_sum(model, inputs) / tokens * (self.args.world_size if is_global else 1)
        return (loss, {}) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate each pack once, whatever the number of ranks; the loss is the mean over all tokens."""
        del description, prediction_loss_only, ignore_keys
        packs, size = dataloader.dataset, self.args.eval_batch_size
        batches = [range(start, min(start + size, len(packs))) for start in range(0, len(packs), size)]
        ranks, rank = self.args.world_size, self.args.process_index
        model: Any = self.model
        model.eval()
        sums = torch.zeros(2)  # of the losses, and of the tokens that have one
        # Every rank computes as many batches, because ranks may have to meet in each: a rank without a batch
        # of its own computes the first one, which does not count.
        for first_batch in range(0, len(batches), ranks):
            is_own = first_batch + rank < len(batches)
            pack_numbers = batches[first_batch + rank if is_own else 0]
            batch = self.data_collator([packs[number] for number in pack_numbers])
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = loss_sum(model, batch)
            if is_own:
                sums += torch.stack([loss.float(), (batch["labels"][:, 1:] != IGNORED).sum().float()])
        total, tokens = self.accelerator.reduce(sums, "sum").tolist()
        mean = total / max(tokens, 1)
        values = {"loss": mean, "perplexity": math.exp(min(mean, _LARGEST_EXPONENT))}
        return EvalLoopOutput(
            predictions=(),  # type: ignore[arg-type]
            label_ids=None,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in values.items()},
            num_samples=len(packs),
        )


def _export(  # noqa: PLR0913, PLR0917 - what a model card tells
    options: Options,
    env: Mapping[str, str],
    trainer: LanguageTrainer,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Mapping[str, Documents],
    results: Mapping[str, Any],
) -> None:
    """Write the trained model or adapter; on rank 0 also the merged model, samples, results and a card."""
    output, is_adapter = Path(options.output), options.model.method != "full"
    trained_folder = output / ADAPTER if is_adapter else output
    trainer.save_model(str(trained_folder))  # on every rank: each may hold a share of the model
    if not trainer.is_world_process_zero():
        return
    # A pickle of the options is not part of a model, and it may hold a token.
    (trained_folder / "training_args.bin").unlink(missing_ok=True)
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_sharded:  # rank 0 holds a share, which neither generates nor merges
        merge_note = "; --merge_adapter too: merge it by peft's merge_and_unload" if is_adapter else ""
        say(f"the model is sharded: samples of its text are left out{merge_note}")
    samples = [] if trainer.is_sharded else _samples(options, model, tokenizer, prepared)
    if is_adapter and options.model.merge_adapter and not trainer.is_sharded:
        # In place, in the dtype of the base: the sum with the adapter, which is fp32, is rounded once.
        model.merge_and_unload().save_pretrained(output)
    if is_adapter:
        _complete_adapter(trained_folder, options, env, model)
        tokenizer.save_pretrained(output)
    if samples:
        _write_samples(output, samples)
    (output / "README.md").write_text(card(options, env, prepared, results, samples), encoding="utf-8")
    write_results(output, results)


def _complete_adapter(folder: Path, options: Options, env: Mapping[str, str], model: Any) -> None:
    """Correct the name of the base model in an adapter's folder; add the configuration if it was changed."""
    adapter_config = folder / "adapter_config.json"
    fields = json.loads(adapter_config.read_text())
    base = base_of(options, env)  # as the user named it: the fields name the staged copy
    fields |= {"base_model_name_or_path": base.name, "revision": base.revision}
    adapter_config.write_text(json.dumps(fields, indent=2, sort_keys=True))
    if options.data.rope_scaling or options.model.config_overrides:
        # The base needs these, and the adapter does not record them.
        trained_config(model).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # peft's form, with nothing filled in


def _write_samples(output: Path, samples: list[tuple[str, str]]) -> None:
    """Report samples as metrics, which a run's report shows, and write them as JSON lines."""
    metrics(
        {
            f"sample_{number}": f"{prompt} → {continuation}"
            for number, (prompt, continuation) in enumerate(samples, 1)
        }
    )
    text = "".join(
        json.dumps({"prompt": prompt, "generated": continuation}, ensure_ascii=False) + "\n"
        for prompt, continuation in samples
    )
    (output / "samples.jsonl").write_text(text, encoding="utf-8")


def _samples(
    options: Options, model: Any, tokenizer: PreTrainedTokenizerBase, prepared: Mapping[str, Documents]
) -> list[tuple[str, str]]:
    """Have the model continue prompts, always by the likeliest token.

    Returns each prompt with its continuation; none if ``--sample_tokens`` is 0. Without a validation split,
    the prompts are of train. A sample that fails is left out.
    """
    split = prepared.get("validation") or prepared["train"]
    samples = []
    model.eval()
    for prompt, ids in split.prompts if options.data.sample_tokens else ():
        input_ids = torch.tensor([ids])
        try:
            with torch.inference_mode():
                generated = model.generate(
                    input_ids=input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    max_new_tokens=options.data.sample_tokens,
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
                )
        except Exception as error:  # noqa: BLE001 - else the merged model, written later, would be lost
            say(f"a sample of {len(ids)} tokens is left out: {error}")
            continue
        continuation = tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True)
        samples.append((prompt, str(continuation)))
    return samples
