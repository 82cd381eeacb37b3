"""What a training begins with: tokenizer, documents as tokens with labels, and the model with adapters."""

import glob
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import datasets  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError  # type: ignore[import-untyped]
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from manycpu.pipeline.recipes import base_model
from manycpu.pipeline.recipes.causal_lm import records
from manycpu.pipeline.recipes.causal_lm.options import DataOptions, ModelOptions, Options
from manycpu.pipeline.recipes.causal_lm.packing import IGNORED
from manycpu.pipeline.recipes.causal_lm.records import Columns
from manycpu.pipeline.recipes.loading import loader
from manycpu.pipeline.recipes.reporting import say
from manycpu.pipeline.recipes.trainer import CpuTrainingOptions
from manycpu.pipeline.spec.errors import BadInputError, install
from manycpu.pipeline.spec.memory_plan import FLOAT, HALF, adapter_parameters
from manycpu.pipeline.spec.model_shape import layout_of

_DEFAULT_LENGTH: Final = 1024  # tokens of a document without --max_seq_length
_SAMPLE_PROMPT_TOKENS: Final = 32  # of a text that a sample begins with
_SAMPLE_RECORDS: Final = 1000  # that may be passed over, because they have no tokens to continue


def read_config(options: ModelOptions) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Read configuration and tokenizer of the base checkpoint, and set ``--pad_token`` in the tokenizer.

    Raises:
        BadInputError: There is no such checkpoint, its tokenizer is not a fast one or lacks the token, or an
            override is wrong.
    """
    config, tokenizer = base_model.read_config(options)
    if options.pad_token:
        if options.pad_token not in tokenizer.get_vocab():
            message = f"--pad_token {options.pad_token!r} is no token of the tokenizer"
            raise BadInputError(
                message, field="run.args", fix=f"Give one of it, such as {tokenizer.eos_token}"
            )
        tokenizer.pad_token = options.pad_token
    return config, tokenizer


def check_base(options: Options) -> None:
    """Raise BadInputError if the folder of the base checkpoint shows that it does not suit the options.

    A model on the Hub passes unchecked, and so does one with code of its own, which would run here. A folder
    that the installed transformers cannot read passes too, because the ranks may have another version.
    """
    model, data = options.model, options.data
    if model.trust_remote_code or not Path(str(model.model_name_or_path)).is_dir():
        return
    try:
        config, tokenizer = read_config(model)
        with torch.device("meta"):  # without memory for weights
            meta_model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (BadInputError, ImportError, ValueError) as error:
        if isinstance(error, BadInputError) and error.field == "run.args":
            raise  # an option is wrong
        return  # the ranks may be able to read it
    if not data.packing:
        check_pad(tokenizer)
    usable_length(data, config)
    if model.method != "full":
        check_targets(meta_model, model)


def check_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BadInputError if the tokenizer has no pad token, without which batches cannot be padded."""
    if tokenizer.pad_token_id is None:
        raise BadInputError(
            "the tokenizer has no pad token, and batches are padded",
            field="run.model",
            fix=f"Add --pad_token '{tokenizer.eos_token or '<pad>'}' to run.args, or leave --packing on",
        )


def usable_length(data: DataOptions, config: PretrainedConfig) -> int:
    """Return how many tokens a document may have; stretch the positions in ``config`` if the options say so.

    Raises:
        BadInputError: The model has fewer positions, and they cannot or must not be stretched.
    """
    positions = getattr(config, "max_position_embeddings", None)
    requested = data.max_seq_length
    if not isinstance(positions, int) or positions <= 0:  # the configuration names no limit
        return requested or _DEFAULT_LENGTH
    if requested is None or requested <= positions:  # no need to stretch
        return requested or min(_DEFAULT_LENGTH, positions)
    rope = getattr(config, "rope_parameters", None) or {}
    is_rotary = "rope_theta" in rope  # only rotary positions can be stretched
    if data.rope_scaling is None or not is_rotary:
        fix = "Give less, or add --rope_scaling yarn (or linear)" if is_rotary else "Give less"
        message = f"--max_seq_length {requested} is more than the model's {positions} positions"
        raise BadInputError(message, field="run.args", fix=fix)
    if (present_scaling := rope.get("rope_type", "default")) != "default":
        message = f"the model's positions are stretched already, by {present_scaling}"
        raise BadInputError(message, field="run.args", fix=f"Give --max_seq_length {positions} or less")
    scaling: dict[str, Any] = {"rope_type": data.rope_scaling, "factor": requested / positions}
    if data.rope_scaling == "yarn":
        scaling["original_max_position_embeddings"] = positions
    config.rope_parameters = {**rope, **scaling}
    config.max_position_embeddings = requested
    say(f"positions are stretched from {positions} to {requested} by {data.rope_scaling}")
    return requested


def read_data(
    model: ModelOptions, data: DataOptions, env: Mapping[str, str], seed: int
) -> dict[str, Dataset]:
    """Read the splits train and validation; if there is no validation split, a share of train becomes it.

    The data set is the first that is given: one of the Hub, files named by options, or MANYCPU_DATA.

    Returns:
        Split -> its records, at most as many as the options ask for.

    Raises:
        BadInputError: There is no data set, it cannot be read, or it has nothing to train on.
    """
    common = {"cache_dir": model.cache_dir}
    source = data.dataset_name or data.train_file or env.get("MANYCPU_DATA")
    try:
        if data.dataset_name:
            loaded = datasets.load_dataset(
                data.dataset_name, data.dataset_config_name, token=model.token, **common
            )
            tables = {split: loaded[split] for split in records.SPLITS if split in loaded}
        else:
            tables = {split: _table(files, common, data) for split, files in files_of(data, env).items()}
    except DatasetGenerationError as error:  # its cause says what is wrong with the file
        message = f"{source} cannot be read: {error.__cause__ or error}"
        raise BadInputError(message, field="run.data", fix="Give JSON lines or Parquet") from error
    except (OSError, ValueError, RuntimeError) as error:
        message = f"the data set {source!r} cannot be loaded: {error}"
        fix = "Check the name, the access to the Hub, and HF_TOKEN; or stage a copy through run.data"
        raise BadInputError(message, field="run.data", fix=fix) from error
    if not len(tables.get("train", ())):
        message = "there is nothing to train on" if tables else "there is no data set"
        fix = "Name a folder or a file there, or give --dataset_name or --train_file in run.args"
        raise BadInputError(message, field="run.data", fix=fix)
    if "validation" not in tables and data.validation_split_percentage and len(tables["train"]) > 1:
        # One record at least; with a single record there would be none to train on.
        held_out = max(1, len(tables["train"]) * data.validation_split_percentage // 100)
        parts = tables["train"].train_test_split(test_size=held_out, seed=seed)
        tables = {"train": parts["train"], "validation": parts["test"]}
    limits = {"train": data.max_train_samples, "validation": data.max_eval_samples}
    for split, limit in limits.items():
        if limit and split in tables:
            table = tables[split]
            tables[split] = table.select(range(min(limit, len(table))))
    return tables


def files_of(data: DataOptions, env: Mapping[str, str]) -> dict[str, list[Path]]:
    """Return the files of each split: those that options name, else those in MANYCPU_DATA; empty: neither.

    Raises:
        BadInputError: A file does not exist, or the files of a split have no common format.
    """
    option_values = {"train": data.train_file, "validation": data.validation_file}
    named_files = {split: [Path(file)] for split, file in option_values.items() if file}
    for split, files in named_files.items():
        if not files[0].is_file():
            message = f"there is no file {files[0]}"
            raise BadInputError(message, field="run.args", fix=f"Check --{split}_file")
    if not named_files and (folder := env.get("MANYCPU_DATA")):
        return records.splits(folder)
    return records.of_one_format(named_files)


def _table(files: Sequence[Path], common: dict[str, Any], data: DataOptions) -> Dataset:
    """Read the files of a split as one table; ``common`` has arguments that both readers take."""
    names = [glob.escape(str(file)) for file in files]
    if files[0].suffix == ".parquet":
        return Dataset.from_parquet(names, **common)
    table = Dataset.from_json(names, **common)
    for column in (data.text_column, data.prompt_column, data.completion_column, data.messages_column):
        # The reader takes texts for times if all of them are dates: these are read again, as they stand.
        if "timestamp[" in str(table.features.get(column)):  # also in messages
            values = [record.get(column) for file in files for record in records.read(file)]
            as_text = f"{column} as text"  # a column of the same name cannot be added
            table = table.add_column(as_text, values).remove_columns(column).rename_column(as_text, column)
    return table


class Documents(NamedTuple):
    """A split as tokens."""

    table: Dataset
    """Columns ``input_ids``, ``labels`` and ``length``."""
    prompts: list[tuple[str, list[int]]]
    """What the model is asked to continue, as samples: each a text and its tokens, at least one."""


def prepare(
    splits: Mapping[str, Dataset], data: DataOptions, tokenizer: PreTrainedTokenizerBase, length: int
) -> dict[str, Documents]:
    """Turn the records of each split into documents of at most ``length`` tokens.

    The result is kept in the cache of ``datasets``: the ranks of a node that come later read it from there.

    Raises:
        BadInputError: A record cannot be trained on, or no answer fits.
    """
    columns = Columns(data.text_column, data.prompt_column, data.completion_column, data.messages_column)
    prepared = {}
    for split, table in splits.items():
        kind = records.kind_of(columns, table.column_names, f"the {split} split")
        if kind == "messages" and not tokenizer.chat_template:
            raise records.no_template()
        writer = _Writer(kind, columns, tokenizer, length)
        documents = table.map(
            writer.documents,
            with_indices=True,
            batched=True,
            remove_columns=table.column_names,
            num_proc=data.preprocessing_num_workers,
            load_from_cache_file=not data.overwrite_cache,
            desc=f"{split} documents",
        )
        if not len(documents):
            missing = "text has two tokens" if kind == "text" else f"answer begins within {length} tokens"
            message = f"no {missing} in the {split} split"
            raise BadInputError(
                message, field="run.data", fix="Give other data, or a greater --max_seq_length"
            )
        cut = sum(documents["cut"][:])
        # A text may become several documents: then the counts cannot be compared.
        dropped = 0 if kind == "text" else len(table) - len(documents)
        if cut or dropped:
            say(
                f"of {len(table)} {split} records, {cut} are cut to {length} tokens, and {dropped} are left "
                "out: their answers begin after that"
            )
        prepared[split] = Documents(documents.remove_columns("cut"), _sample_prompts(table, data, writer))
    return prepared


def _sample_prompts(table: Dataset, data: DataOptions, writer: "_Writer") -> list[tuple[str, list[int]]]:
    """Return the prompts that the trained model continues as samples: of the first records with tokens."""
    # Prompt and continuation fit the model, unless the continuation needs more than half of it.
    room = max(writer.length - data.sample_tokens, writer.length // 2)
    rows = range(min(len(table), data.samples + _SAMPLE_RECORDS))
    prompts = (writer.prompt(table[row], room) for row in rows)
    return list(islice((prompt for prompt in prompts if prompt[1]), data.samples))


class _Writer(NamedTuple):
    """Writes records of one kind as tokens, with labels; ``length``: the most tokens of a document."""

    kind: str
    columns: Columns
    tokenizer: PreTrainedTokenizerBase
    length: int

    def documents(self, batch: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> dict[str, list[Any]]:
        """Turn a batch of records into documents; a text longer than ``length`` becomes several.

        A document is left out if no token of it is to be predicted, such as one whose answer begins too late.

        Args:
            batch: Column -> its value in each record.
            rows: Number of each record in its table, from 0.

        Raises:
            BadInputError: A record cannot be trained on.
        """
        output: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": [], "cut": []}
        names = list(batch)
        for row, values in zip(rows, zip(*batch.values(), strict=True), strict=True):
            record = dict(zip(names, values, strict=True))
            if fault := self.columns.fault(record, self.kind):
                raise BadInputError(f"record {row + 1}: {fault}", field="run.data", fix=records.FIX)
            for ids, labels in self._tokenized(record, row):
                kept_labels = labels[: self.length]
                if any(label != IGNORED for label in kept_labels[1:]):  # no token predicts the first one
                    output["input_ids"].append(ids[: self.length])
                    output["labels"].append(kept_labels)
                    output["length"].append(len(kept_labels))
                    output["cut"].append(len(ids) > self.length)
        return output

    def _tokenized(self, record: Mapping[str, Any], row: int) -> list[tuple[list[int], list[int]]]:
        """Return the token ids and the labels of each document that a record becomes.

        A label is the token's own id, or IGNORED in a prompt. Only texts are divided at ``length``.
        """
        if self.kind == "messages":
            return [self._conversation(record[self.columns.messages], f"record {row + 1}")]
        end = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []
        if self.kind == "text":
            ids = self._encode_without_end(record[self.columns.text]) + end
            # All tokens of a text are to be predicted: its labels are its ids.
            return [
                (ids[start : start + self.length], ids[start : start + self.length])
                for start in range(0, len(ids), self.length)
            ]
        prompt = self._encode_without_end(record[self.columns.prompt])
        answer = [*self.tokenizer.encode(record[self.columns.completion], add_special_tokens=False), *end]
        return [(prompt + answer, [IGNORED] * len(prompt) + answer)]

    def _encode_without_end(self, text: str) -> list[int]:
        """Encode a text with the tokenizer's special token at its beginning, without the one at its end."""
        ids: list[int] = self.tokenizer.encode(text)
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _render(self, messages: Sequence[Mapping[str, Any]], *, begins_answer: bool) -> str:
        """Return messages as the text that the tokenizer's chat template makes of them.

        With ``begins_answer``, the text ends with what the template writes before an answer of the assistant.
        """
        return str(
            self.tokenizer.apply_chat_template(
                [*map(dict, messages)], tokenize=False, add_generation_prompt=begins_answer
            )
        )

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], source: str
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation, and a label for each token.

        The label is the token's own id in an answer and at the end of its turn, else IGNORED.
        """
        text, answers = records.answer_spans(messages, self._render, source)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        labels = [IGNORED] * len(ids)
        special_ids = set(self.tokenizer.all_special_ids)
        special_tokens = tuple(self.tokenizer.all_special_tokens)
        # Templates may write the token that ends a turn only where another turn follows: then it is no part
        # of the answer's span, but stands where the span stops.
        turn_ends = {
            stop for start, stop in answers if not text[start:stop].rstrip().endswith(special_tokens)
        }
        for index, (begin, end) in enumerate(encoded["offset_mapping"]):
            overlaps_answer = any(begin < stop and end > start for start, stop in answers)
            ends_turn = index > 0 and ids[index] in special_ids and begin in turn_ends
            if overlaps_answer or ends_turn:
                labels[index] = ids[index]
        return ids, labels

    def prompt(self, record: Mapping[str, Any], room: int) -> tuple[str, list[int]]:
        """Return the beginning of a record, which the trained model continues as a sample: text and tokens.

        It is the prompt, or the conversation up to its last answer; of their tokens the last ``room`` are
        kept. Of a text, it is the first half, at most 32 and at most ``room`` tokens. The tokens are made as
        for the training.
        """
        if self.kind == "completion":
            text = str(record[self.columns.prompt])
            return text, self._encode_without_end(text)[-room:]
        if self.kind == "text":
            ids = self._encode_without_end(record[self.columns.text])
            half = 1 + len(ids) // 2  # of a short text, one token at least
            ids = ids[: min(_SAMPLE_PROMPT_TOKENS, room, half)]
            return str(self.tokenizer.decode(ids, skip_special_tokens=True)), ids
        messages = record[self.columns.messages]
        whole, spans = records.answer_spans(messages, self._render, "a sample")
        text = whole[: spans[-1][0]] or whole  # all of it, if nothing is before the answer
        return text, self.tokenizer.encode(text, add_special_tokens=False)[-room:]


def load_model(
    options: ModelOptions, config: PretrainedConfig, training: CpuTrainingOptions, length: int
) -> PreTrainedModel:
    """Load the model, or make it with random weights; ``length`` is the number of tokens of a sequence.

    Random weights are never sharded. For a model that is loaded, ``no`` or ``full`` replaces the value
    ``auto`` of ``training.shard``.

    Trained weights are fp32; bf16 is for the computation (autocast). With adapters, the model's own weights
    are frozen. In a training by bf16, they stay bf16 if the checkpoint has bf16. That takes half the memory,
    and no conversion in each step.

    Raises:
        BadInputError: The checkpoint cannot be loaded, or cannot be sharded as asked (``loader``).
    """
    if options.from_scratch:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
        say(f"{model.num_parameters():,} weights begin at random")
        return model
    has_adapters = options.method != "full"
    stored_dtype = getattr(config, "dtype", None)
    is_frozen_bf16 = has_adapters and training.bf16 and stored_dtype == torch.bfloat16
    layout = layout_of(config.to_dict())
    adapters = adapter_parameters(layout, options.lora_r) if has_adapters else 0
    name = str(options.model_name_or_path)
    try:
        load = loader(
            AutoModelForCausalLM,
            config,
            training,
            length,
            causal=True,
            trained=0 if has_adapters else None,  # of the model's own parameters; None: all
            adapters=adapters,
            frozen=HALF if is_frozen_bf16 else FLOAT,
        )
        model = load(
            name,
            config=config,
            dtype=torch.bfloat16 if is_frozen_bf16 else torch.float32,
            **base_model.hub_arguments(options),
        )
    except base_model.LOAD_ERRORS as error:
        raise base_model.unloadable(name, error) from error
    _complete_sampling(model)
    return model


def _complete_sampling(model: PreTrainedModel) -> None:
    """Set ``do_sample`` in the model's generation settings if other settings need it.

    The Trainer may change the settings, as it sets special tokens. Without ``do_sample``, transformers would
    then refuse to save them.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:  # a model with code of its own may have none
        return
    try:
        generation.validate(strict=True)
    except ValueError as error:
        if "`do_sample=True`" in str(error):  # transformers advises it
            generation.do_sample = True
            say("generation_config.json has flags of sampling without do_sample; it is set")


def with_adapter(model: PreTrainedModel, options: ModelOptions) -> Any:
    """Add adapters to the layers that the options name; only the adapters are trained then.

    Raises:
        BadInputError: peft is not installed, or a target is no layer or cannot have a merged adapter.
    """
    check_targets(model, options)
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ModuleNotFoundError as error:
        fix = f"{install('language')}; or give --method full"
        raise BadInputError("peft is not installed", field="run.args", fix=fix) from error
    targets: Any = options.lora_target_modules
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=records.ALL_LINEAR if targets == [records.ALL_LINEAR] else targets,
        use_dora=options.method == "dora",
        # Conv1D, the linear layer of GPT-2, stores its weights transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        fix = "Name other layers, or give --method full"
        message = f"--lora_target_modules {' '.join(targets)}: {error}"
        raise BadInputError(message, field="run.args", fix=fix) from error
    trained, total = adapted.get_nb_trainable_parameters()
    say(f"{trained:,} weights of adapters are trained, {trained / total:.2%} of {total:,}")
    return adapted


def check_targets(model: Any, options: ModelOptions) -> None:
    """Raise BadInputError if a target of the adapters names no layer, or a tied layer while merging is on.

    Tied layers are a head and embeddings that share their weights: a merged adapter would change both.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    if problem := records.missing_target(options.lora_target_modules, layers):
        raise BadInputError(problem[0], field="run.args", fix=problem[1])
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = getattr(head, "weight", None) is embeddings.weight
    if not options.merge_adapter or not is_tied:
        return
    tied_modules = {id(embeddings), id(head)}
    names = [name for name, module in model.named_modules() if id(module) in tied_modules]
    for name in names:
        for target in options.lora_target_modules:
            if records.is_target(name, target):
                message, fix = records.tied_target(target)
                raise BadInputError(message, field="run.args", fix=fix)
