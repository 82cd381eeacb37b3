"""Run the training from end to end: data, model, features, Trainer, and what is written to the output."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import datasets  # type: ignore[import-untyped]
import torch.distributed as dist
import transformers
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes.checkpoints import resume_point
from manycpu.pipeline.recipes.question_answering import checkpoint, data
from manycpu.pipeline.recipes.question_answering.features import Shape, build, usable_length
from manycpu.pipeline.recipes.question_answering.options import DataOptions, Options
from manycpu.pipeline.recipes.question_answering.scoring import Limits, Scorer
from manycpu.pipeline.recipes.reporting import bf16_notes, say
from manycpu.pipeline.recipes.trainer import CpuTrainer
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["run"]

_MAX_EVALUATION_SHARE: Final = 0.1
"""Evaluate before training where that costs at most this share of the training."""
_FORWARD_SHARE: Final = 1 / 3  # of a training step: the backward pass costs about twice the forward pass


class Prepared(NamedTuple):
    """A split as features, and the scorer that answers its questions."""

    features: Dataset
    scorer: Scorer


def run(options: Options, env: Mapping[str, str]) -> dict[str, Any]:
    """Train, evaluate and predict, as chosen; write the model and the predictions to ``options.output``.

    Returns:
        The metrics; those of evaluation are the same on every rank.

    Raises:
        BadInputError: Data, model or options cannot be used.
    """
    _configure_output(options, env)
    set_seed(options.training.seed)
    model, tokenizer = checkpoint.load(options.model)
    # The first process of a node prepares the data; the others find it in the cache.
    with options.training.main_process_first(local=True, desc="preparing the data"):
        splits = _chosen_splits(options, data.read(options.model, options.data, env))
        prepared = _prepare(splits, options.data, tokenizer, checkpoint.positions(model))
    trainer = _trainer(options, model, tokenizer, prepared)
    results = _results(options, env, trainer, prepared)
    _write(trainer, options, prepared, results)
    return results


def _configure_output(options: Options, env: Mapping[str, str]) -> None:
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        options.training.disable_tqdm = True
    if options.training.process_index > 0:
        # Warnings are the same on all ranks: print them once.
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for note in (*options.notes, *bf16_notes(env, bf16=options.training.bf16)):
        say(note)


def _chosen_splits(options: Options, splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """Select the splits that the options train, evaluate or predict on."""
    training = options.training
    if not options.chosen:
        training.do_train, training.do_eval = "train" in splits, "validation" in splits
    chosen = {"train": training.do_train, "validation": training.do_eval, "test": training.do_predict}
    for split, is_chosen in chosen.items():
        if is_chosen and split not in splits:
            raise BadInputError(
                f"there is no {split} split; there is {', '.join(splits)}",
                field="run.data",
                fix=f"Give --{split}_file in run.args, or a data set with a {split} split",
            )
    if not any(chosen.values()):
        raise BadInputError(
            "there is nothing to do", field="run.args", fix="Add --do_train, --do_eval or --do_predict"
        )
    return {split: table for split, table in splits.items() if chosen[split]}


def _prepare(
    splits: dict[str, Dataset],
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
) -> dict[str, Prepared]:
    """Make the features of every split, through the cache of ``datasets``."""
    length = usable_length(options.max_seq_length, tokenizer, positions)
    if length < options.max_seq_length:
        say(f"--max_seq_length {options.max_seq_length} is more than the model takes: {length} is used")
    shape = Shape(length, options.doc_stride, options.pad_to_max_length)
    # Use the tokenizer once: it then keeps its truncation, which is part of the cache's key on every rank.
    build(next(iter(splits.values()))[:1], [0], tokenizer, shape)
    return {split: _prepare_split(split, table, options, tokenizer, shape) for split, table in splits.items()}


def _prepare_split(
    split: str, table: Dataset, options: DataOptions, tokenizer: PreTrainedTokenizerBase, shape: Shape
) -> Prepared:
    names = ["id", "question", "context", *(["answers"] if split != "test" else [])]
    features = table.select_columns(names).map(
        build,
        with_indices=True,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "shape": shape},
        remove_columns=names,
        num_proc=options.preprocessing_num_workers,
        load_from_cache_file=not options.overwrite_cache,
        desc=f"{split} features",
    )
    if split == "train" and not any(features["start_positions"]):
        raise BadInputError(
            f"no training question has an answer that fits into {shape.length} tokens",
            field="run.data",
            fix="Give a greater --max_seq_length, or data with answers",
        )
    limits = Limits(
        options.n_best_size,
        options.max_answer_length,
        options.null_score_diff_threshold if options.version_2_with_negative else None,
    )
    return Prepared(features, Scorer(table, features, limits))


def _trainer(
    options: Options,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prepared: dict[str, Prepared],
) -> Trainer:
    evaluated = prepared.get("validation")
    # Multiples of 8 suit the matrix units; a fixed length suits torch.compile.
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    return CpuTrainer(
        model=model,
        args=options.training,
        train_dataset=prepared["train"].features if "train" in prepared else None,
        eval_dataset=evaluated.features if evaluated else None,
        processing_class=tokenizer,
        data_collator=collate,
        compute_metrics=evaluated.scorer if evaluated else None,
    )


def _results(
    options: Options, env: Mapping[str, str], trainer: Trainer, prepared: dict[str, Prepared]
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if "train" in prepared:
        resume = resume_point(str(options.training.output_dir), options.training.resume_from_checkpoint, env)
        if resume is None and _worth_evaluating_before(options, prepared):
            before = trainer.evaluate(metric_key_prefix="before")
            results |= {f"{name}_before": before[f"before_{name}"] for name in ("exact_match", "f1")}
        results |= _train(trainer, resume, options.output)
    if "validation" in prepared:
        results |= _evaluate(trainer)
    if "test" in prepared:
        trainer.compute_metrics = None  # it belongs to the validation split
        predictions = trainer.predict(prepared["test"].features).predictions
        scores = prepared["test"].scorer.score(*predictions)
        results |= {f"predict_{name}": value for name, value in scores.items()}
    return results


def _worth_evaluating_before(options: Options, prepared: dict[str, Prepared]) -> bool:
    if "validation" not in prepared:
        return False
    if options.data.evaluate_before is not None:
        return options.data.evaluate_before
    steps, rows = options.training.max_steps, len(prepared["train"].features)
    training = options.training
    batch = int(training.train_batch_size * training.gradient_accumulation_steps * training.world_size)
    trained = steps * batch if steps > 0 else rows * options.training.num_train_epochs
    return len(prepared["validation"].features) * _FORWARD_SHARE <= _MAX_EVALUATION_SHARE * trained


def _train(trainer: Trainer, resume: str | None, output: str) -> dict[str, Any]:
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(output)
    # A pickle of the options is not part of a model, and it may hold a token.
    if trainer.is_world_process_zero():
        Path(output, "training_args.bin").unlink(missing_ok=True)
    resumed = {"resumed_from_step": int(resume.rpartition("-")[2])} if resume else {}
    return {**result.metrics, "train_steps": result.global_step, **resumed}


def _evaluate(trainer: Trainer) -> dict[str, Any]:
    """Evaluate; scores get their usual names, speed and loss keep the Trainer's."""
    metrics = trainer.evaluate()
    own = ("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    scores = {
        name.removeprefix("eval_"): metrics[name] for name in metrics if name.endswith(("exact_match", "f1"))
    }
    return scores | {name: metrics[name] for name in own if name in metrics}


def _write(
    trainer: Trainer, options: Options, prepared: dict[str, Prepared], results: dict[str, Any]
) -> None:
    metrics(results)
    if trainer.is_world_process_zero():
        output = Path(options.output)
        output.mkdir(parents=True, exist_ok=True)
        for split, prefix in (("validation", "eval"), ("test", "predict")):
            if split in prepared:
                prepared[split].scorer.write(output, prefix)
        text = json.dumps(results, indent=2, sort_keys=True)
        (output / "all_results.json").write_text(text + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
