"""Run the training from end to end: data, model, features, Trainer, and what is written to the output."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import DataCollatorWithPadding, PretrainedConfig, PreTrainedTokenizerBase

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes.checkpoints import step
from manycpu.pipeline.recipes.documents import unpad
from manycpu.pipeline.recipes.lengths import longest_first
from manycpu.pipeline.recipes.question_answering.features import MULTIPLE, Shape, build, usable_length
from manycpu.pipeline.recipes.question_answering.inputs import exclude_padding, load_model, read_data
from manycpu.pipeline.recipes.question_answering.options import DataOptions, Options
from manycpu.pipeline.recipes.question_answering.scoring import Limits, Scorer
from manycpu.pipeline.recipes.question_answering.squad import repeated_id
from manycpu.pipeline.recipes.reporting import say, write_results
from manycpu.pipeline.recipes.trainer import CpuTrainer, begin
from manycpu.pipeline.spec.errors import BadInputError

_MAX_EVALUATION_SHARE: Final = 0.1
"""Evaluate before training where that costs at most this share of the training."""
_FORWARD_SHARE: Final = 1 / 3  # of a training step: the backward pass costs about twice the forward pass


def run(options: Options, env: Mapping[str, str]) -> dict[str, Any]:
    """Train, evaluate and predict, as chosen; write the model and the predictions to ``options.output``."""
    training = options.training
    begin(training, options.notes, env)
    model, tokenizer = load_model(options.model, training, options.data.max_seq_length)
    if not (training.torch_compile or training.use_ipex):  # their code serves one shape, and calls no hooks
        exclude_padding(model)
        # Not if it is sharded: a model that cannot compute without padding would stay half gathered.
        if options.data.unpad and training.shard == "no":
            why = unpad(model)
            if why:
                say(f"padding is computed, too: {why}")
    # The first process of a node prepares the data; the others find it in the cache.
    with training.main_process_first(local=True, desc="preparing the data"):
        splits = _chosen_splits(options, read_data(options.model, options.data, env))
        prepared = _prepare(splits, options.data, tokenizer, model.config)
    validation_scorer = prepared.get("validation")
    trainer = CpuTrainer(
        model=model,
        args=training,
        train_dataset=prepared["train"].features if "train" in prepared else None,
        eval_dataset=validation_scorer.features if validation_scorer else None,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=MULTIPLE),
        compute_metrics=validation_scorer,
        # Some models return more than starts and ends, such as BART the states of its encoder.
        preprocess_logits_for_metrics=lambda scores, _: scores[:2],
    )
    results = _train_and_evaluate(options, env, trainer, prepared)
    metrics(results)
    if trainer.is_world_process_zero():
        output = Path(options.output)
        write_results(output, results)
        for split, prefix in (("validation", "eval"), ("test", "predict")):
            if split in prepared:
                prepared[split].write(output, prefix)
    if dist.is_initialized():
        dist.barrier()  # until rank 0 has written
    return results


def _chosen_splits(options: Options, splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """Return the splits to train, evaluate or predict on, as the options choose.

    If no option chooses, ``do_train`` is set, and ``do_eval`` if there is a validation split.

    Raises:
        BadInputError: A chosen split does not exist, or no split is chosen.
    """
    training = options.training
    if not options.chosen:
        training.do_train, training.do_eval = True, "validation" in splits
    chosen = {"train": training.do_train, "validation": training.do_eval, "test": training.do_predict}
    for split, is_chosen in chosen.items():
        if is_chosen and split not in splits:
            raise BadInputError(
                f"there is no {split} split; there is {', '.join(splits)}",
                field="run.data",
                fix=f"Give --{split}_file in run.args, or a data set with a {split} split; --do_train, "
                "--do_eval and --do_predict choose what to do",
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
    config: PretrainedConfig,
) -> dict[str, Scorer]:
    """Return a scorer for each split, which has the split's features and the questions they come from.

    Features are kept in the cache of ``datasets``.

    Raises:
        BadInputError: An id names two questions, or no answer to train on fits into a feature.
    """
    length = usable_length(options.max_seq_length, tokenizer, config)
    if length < options.max_seq_length:
        say(f"--max_seq_length {options.max_seq_length} is more than the model takes: {length} is used")
    shape = Shape(length, options.doc_stride, pad=options.pad_to_max_length)
    threshold = options.null_score_diff_threshold if options.version_2_with_negative else None
    limits = Limits(options.n_best_size, options.max_answer_length, null_threshold=threshold)
    # The tokenizer's state is part of the cache's key, and its first use changes the state (the truncation):
    # use it before, on one row, so that every rank has the same key.
    build(next(iter(splits.values()))[:1], [0], tokenizer, shape)
    prepared = {}
    for split, table in splits.items():
        if split != "train" and (repeated := repeated_id(table["id"])):  # answers are written by their ids
            fix = "Give each question an id of its own"
            raise BadInputError(f"the {split} split: {repeated}", field="run.data", fix=fix)
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
        if split == "train" and not any(features["start_positions"]):  # all are NOWHERE, which is 0
            raise BadInputError(
                f"no training question has an answer that fits into {length} tokens",
                field="run.data",
                fix="Give a greater --max_seq_length, or data with answers",
            )
        # The scorer finds a feature's question by its number, so their order is free.
        prepared[split] = Scorer(table, features if split == "train" else longest_first(features), limits)
    return prepared


def _train_and_evaluate(
    options: Options, env: Mapping[str, str], trainer: CpuTrainer, prepared: dict[str, Scorer]
) -> dict[str, Any]:
    """Train, evaluate and predict, each if its split is prepared; returns all results by their names.

    After the training, writes the model to the output. Names of the evaluation before the training end in
    ``_before``. Names of the split test begin with ``predict_``.
    """
    results: dict[str, Any] = {}
    if "train" in prepared:
        resume = trainer.resume_point(env)
        if resume is None and _worth_evaluating_before(options, prepared):
            before_training = trainer.evaluate(metric_key_prefix="before")
            results |= {f"{name}_before": before_training[f"before_{name}"] for name in ("exact_match", "f1")}
        resumed_step = step(Path(resume)) if resume else None  # the training may delete that checkpoint
        trained = trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(options.output)
        # A pickle of the options is not part of a model, and it may hold a token.
        if trainer.is_world_process_zero():
            Path(options.output, "training_args.bin").unlink(missing_ok=True)
        results |= {**trained.metrics, "train_steps": trained.global_step}
        if resume:
            results["resumed_from_step"] = resumed_step
    if "validation" in prepared:
        evaluation = trainer.evaluate()
        # Scores get their usual names, speed and loss keep the Trainer's; other values are left out.
        kept_names = ("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
        for name, value in evaluation.items():
            if name in kept_names:
                results[name] = value
            elif name.endswith(("exact_match", "f1")):
                results[name.removeprefix("eval_")] = value
    if "test" in prepared:
        trainer.compute_metrics = None  # it belongs to the validation split
        scores = prepared["test"](trainer.predict(prepared["test"].features))
        results |= {f"predict_{name}": value for name, value in scores.items()}
    return results


def _worth_evaluating_before(options: Options, prepared: dict[str, Scorer]) -> bool:
    """Whether to evaluate before the training too; False without a validation split.

    The option ``evaluate_before`` decides. If it is not given, the evaluation must cost at most a tenth of
    the training.
    """
    if "validation" not in prepared:
        return False
    if options.data.evaluate_before is not None:
        return options.data.evaluate_before
    training, rows = options.training, len(prepared["train"].features)
    batch = int(training.train_batch_size * training.gradient_accumulation_steps * training.world_size)
    trained_samples = (
        training.max_steps * batch if training.max_steps > 0 else rows * training.num_train_epochs
    )
    # Costs are in training steps of one sample.
    return len(prepared["validation"].features) * _FORWARD_SHARE <= _MAX_EVALUATION_SHARE * trained_samples
