"""Read the base checkpoint of a training on transformers: what every such recipe asks for and refuses."""

from pickle import UnpicklingError
from typing import Any, Final, Protocol

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from manycpu.pipeline.spec.errors import BadInputError

LOAD_ERRORS: Final = (OSError, ValueError, SafetensorError, UnpicklingError)
"""What transformers raises for a checkpoint that is missing, cut off or damaged."""
_FIX: Final = "Check the name, the access to the Hub, and HF_TOKEN; or name a folder with config.json"


class Options(Protocol):
    """The options that name a base checkpoint, by the same names in each recipe."""

    model_name_or_path: str | None
    config_overrides: str | None
    tokenizer_name: str | None
    cache_dir: str | None
    model_revision: str
    token: str | None
    trust_remote_code: bool


def hub_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that configuration, tokenizer and model share."""
    return {
        "cache_dir": options.cache_dir,
        "revision": options.model_revision,
        "token": options.token,
        "trust_remote_code": options.trust_remote_code,
    }


def read_config(
    options: Options, config_name: str | None = None
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Read configuration and tokenizer of the base checkpoint.

    ``config_name`` is a folder or a model of the Hub whose configuration is read instead.

    Raises:
        BadInputError: There is no such checkpoint, its tokenizer is not a fast one, or an override is wrong.
    """
    name = options.model_name_or_path
    if not name:
        raise BadInputError(
            "there is no base checkpoint",
            field="run.model",
            fix="Name a folder or a model there, or give --model_name_or_path in run.args",
        )
    hub = hub_arguments(options)
    try:
        config = AutoConfig.from_pretrained(config_name or name, **hub)
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer_name or name, use_fast=True, **hub)
    except LOAD_ERRORS as error:
        raise unloadable(name, error) from error
    if options.config_overrides:
        try:
            config.update_from_string(options.config_overrides)
        except (ValueError, TypeError) as error:
            message = f"--config_overrides {options.config_overrides}: {error}"
            raise BadInputError(message, field="run.args", fix="Write it as name=value,name=value") from error
    if not tokenizer.is_fast:
        raise BadInputError(
            f"the tokenizer of {name!r} is not a fast one: it does not report its tokens' places in the text",
            field="run.model",
            fix="Choose a checkpoint with tokenizer.json",
        )
    return config, tokenizer


def unloadable(name: str, error: Exception) -> BadInputError:
    """Return the error to raise for a checkpoint that cannot be loaded."""
    return BadInputError(f"the checkpoint {name!r} cannot be loaded: {error}", field="run.model", fix=_FIX)
