"""The base checkpoint: a model with a head for question answering, and its tokenizer."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from manycpu.pipeline.recipes.question_answering.options import ModelOptions
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["load", "positions"]


def load(options: ModelOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer, from a folder or the Hub.

    Raises:
        BadInputError: There is no such checkpoint, or it has no fast tokenizer.
    """
    name = options.model_name_or_path
    if not name:
        raise BadInputError(
            "there is no base checkpoint",
            field="run.model",
            fix="Name a folder or a model there, or give --model_name_or_path in run.args",
        )
    common: dict[str, Any] = {
        "cache_dir": options.cache_dir,
        "revision": options.model_revision,
        "token": options.token,
        "trust_remote_code": options.trust_remote_code,
    }
    try:
        config = AutoConfig.from_pretrained(options.config_name or name, **common)
        _override(config, options.config_overrides)
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer_name or name, use_fast=True, **common)
        # Weights are fp32 also where the checkpoint has others: bf16 is for the computation (autocast) alone.
        model = AutoModelForQuestionAnswering.from_pretrained(
            name, config=config, dtype=torch.float32, **common
        )
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"the checkpoint {name!r} cannot be loaded: {error}",
            field="run.model",
            fix="Check the name, the access to the Hub, and HF_TOKEN; or name a folder with config.json",
        ) from error
    if options.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(requires_grad=False)
    return model, _usable(tokenizer, name)


def positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens the model has position embeddings for; None: no limit is known."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    # RoBERTa and related models begin to count after the padding token.
    shifted = model.config.model_type in ("camembert", "longformer", "mpnet", "roberta", "xlm-roberta")
    return limit - (model.config.pad_token_id or 0) - 1 if shifted else limit


def _override(config: PretrainedConfig, changes: str | None) -> None:
    try:
        if changes:
            config.update_from_string(changes)
    except (ValueError, TypeError) as error:
        raise BadInputError(
            f"--config_overrides {changes}: {error}",
            field="run.args",
            fix="Write it as name=value,name=value",
        ) from error


def _usable(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    if not tokenizer.is_fast:
        raise BadInputError(
            f"the tokenizer of {name!r} is not a fast one: it does not report its tokens' places in the text",
            field="run.model",
            fix="Choose a checkpoint with tokenizer.json",
        )
    tokenizer.padding_side = "right"
    return tokenizer
