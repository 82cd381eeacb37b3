"""Attention for each document by itself, and encoders that compute nothing on padding.

A batch is one row of tokens: documents one after another. The argument ``cu_seq_lens_q`` of transformers says
where each begins. A model may mix tokens by other means than attention. So a trial compares the results with
those of each document by itself, and such a model keeps its own attention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from manycpu.pipeline.node import sharding

ATTENTION: Final = "manycpu_documents"
"""Name of the attention, in transformers' registry."""
TOLERANCE: Final = 1e-4
"""Largest difference of results that rounding explains in fp32, relative to the largest result."""
_BF16_TOLERANCE: Final = 2e-2


def use_documents(
    model: PreTrainedModel, together: Callable[[], torch.Tensor], alone: Callable[[], torch.Tensor]
) -> str | None:
    """Have a model compute attention for each document by itself; returns why it cannot; None: it does.

    If it cannot, the model gets its own attention back. A sharded model must then be loaded again, because
    the trial may have ended in the middle of a forward pass.

    Args:
        model: The model.
        together: Computes some documents in one row, with the attention of this module.
        alone: Computes each of the same documents by itself, with the model's own attention.
    """
    reason: str | None = None
    original_attention = model.config._attn_implementation  # noqa: SLF001 - the name that set_attn_implementation takes
    try:
        with probing(model):
            expected = alone()  # while the model still has its own attention
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:  # noqa: SLF001
            reason = "transformers cannot replace its attention"
        else:
            with probing(model):
                packed = together()
            if not are_alike(packed, expected, rounding(expected)):
                reason = "documents of one sequence change each other's result"
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
    if reason:
        model.set_attn_implementation(original_attention or "eager")
    return reason


def unpad(model: PreTrainedModel) -> str | None:
    """Have an encoder's blocks compute nothing on padding; returns why they cannot; None: they do.

    Before the first block, a batch of shape (rows, tokens, size) becomes one row without padding. After the
    last block, it gets its shape again; padding gets the values of its row's last token. A batch without
    ``attention_mask``, or with padding on the left, is computed as it is.
    """
    # transformers derives the blocks of a model from GradientCheckpointingLayer.
    block_lists = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module)
        and isinstance(module[0], GradientCheckpointingLayer)
    ]
    if len(block_lists) != 1:
        return "its blocks are not one list"
    padding_hooks = _PaddingHooks()
    hooks = [
        model.base_model.register_forward_pre_hook(padding_hooks.read_mask, with_kwargs=True),
        block_lists[0][0].register_forward_pre_hook(padding_hooks.drop_padding),
        block_lists[0][-1].register_forward_hook(padding_hooks.restore_shape),
    ]
    # With the hooks, the padded batch is computed as one row; rows without a mask are computed as they are.
    why = use_documents(
        model,
        together=lambda: _states_of_padded_batch(model),
        alone=lambda: _states_of_single_rows(model),
    )
    if why:
        for hook in hooks:
            hook.remove()
    return why


class _PaddingHooks:
    """Hooks that keep padding out of a model's blocks; each batch calls the methods in this order."""

    _real: torch.Tensor | None = None
    """Indices of the real tokens in the flattened batch, (real,); None: the batch is computed as it is."""
    _last: torch.Tensor
    """Index among the real tokens for each place of the batch, (rows, tokens); padding has its row's last."""

    def read_mask(
        self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Read the mask of a batch, and replace it by one without padding, before the model runs.

        A batch without a mask, or with one that this class cannot handle, is computed as it is.
        """
        mask = kwargs.get("attention_mask")
        self._real = None
        if mask is None:
            return args, kwargs
        lengths = mask.sum(1)  # real tokens of each row
        positions = torch.arange(mask.shape[1])
        has_empty_row = not lengths.min()
        is_padded_on_the_right = torch.equal(mask.bool(), positions < lengths[:, None])
        if has_empty_row or not is_padded_on_the_right:
            return args, kwargs
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        self._real = mask.flatten().nonzero()[:, 0]
        self._last = starts[:-1, None] + torch.minimum(positions, lengths[:, None] - 1)
        # The batch becomes one row without padding, so no token is masked; transformers passes a mask of four
        # dimensions on as it is, and `_attention` takes the documents from cu_seq_lens_q.
        full_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return args, kwargs | {"attention_mask": full_mask, "cu_seq_lens_q": starts.int()}

    def drop_padding(self, _: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Turn hidden states of shape (rows, tokens, size) into (1, real, size); None: they stay."""
        return None if self._real is None else (args[0].flatten(0, 1)[self._real][None], *args[1:])

    def restore_shape(self, _: torch.nn.Module, args: tuple[Any, ...], hidden: torch.Tensor) -> torch.Tensor:
        """Turn hidden states of shape (1, real, size) into (rows, tokens, size)."""
        del args
        return hidden if self._real is None else hidden[0][self._last]


def _probe_rows(model: Any) -> list[list[int]]:
    """Return two rows to test a model with, of five and three tokens, none of which is the padding token."""
    pad = _padding(model)
    # The numbers from that of the padding token on move up by one, to leave it out.
    return [
        [token + (token >= pad) for token in range(first, first + length)]
        for first, length in ((1, 5), (11, 3))
    ]


def _padding(model: Any) -> int:
    """Return the id of the padding token; 0 also if the model has none."""
    return model.config.pad_token_id or 0


def _states_of_single_rows(model: Any) -> torch.Tensor:
    """Compute the hidden states of the probe rows' tokens, each row by itself."""
    # Of each output the first item, the hidden states, and of these the only row.
    return torch.cat([model.base_model(input_ids=torch.tensor([row]))[0][0] for row in _probe_rows(model)])


def _states_of_padded_batch(model: Any) -> torch.Tensor:
    """Compute the hidden states of the probe rows' tokens in one padded batch, without those of padding."""
    first, second = _probe_rows(model)
    batch = torch.tensor([first, second + [_padding(model)] * 2])
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    hidden: torch.Tensor = model.base_model(input_ids=batch, attention_mask=mask)[0][mask.bool()]
    return hidden


@contextmanager
def probing(model: Any) -> Iterator[None]:
    """Run a model without dropout and gradients, and leave it as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        sharding.release(model)  # else adapters would freeze the gathered weights, and not the shares


def rounding(logits: torch.Tensor) -> float:
    """Return the largest relative difference that rounding explains in the number format of logits."""
    return TOLERANCE if logits.dtype == torch.float32 else _BF16_TOLERANCE


def are_alike(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether no difference is larger than ``tolerance`` times the largest expected value."""
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max())


def _attention(  # noqa: PLR0913, PLR0917 - transformers' signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each document; query, key and value have shape (1, heads, tokens, size of a head).

    Returns what transformers expects: the result of shape (1, tokens, heads, size), and None for the weights.

    Raises:
        ValueError: The model's attention has a feature that is not computed here.
    """
    starts = kwargs.get("cu_seq_lens_q")
    if starts is None or attention_mask is None:  # the batch is not packed, as in generation
        unpacked: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return unpacked
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unsupported:
        raise ValueError(f"its attention has {unsupported[0]}, which torch's has not")
    is_causal = kwargs.get("is_causal")
    if is_causal is None:  # then the module says it, as in transformers' own attention
        is_causal = getattr(module, "is_causal", True)
    if sliding_window and not is_causal:
        raise ValueError("its attention has a window to both sides, which is not known here")
    groups = query.shape[1] // key.shape[1]
    # Repeated once for all documents: enable_gqa does it for each, which costs more.
    tensors = query, repeat_kv(key, groups), repeat_kv(value, groups)
    lengths = starts.diff().tolist()
    outputs = [
        scaled_dot_product_attention(
            *document,  # type: ignore[misc]
            attn_mask=_window(document[0].shape[2], sliding_window),
            dropout_p=dropout,
            # torch takes a mask or is_causal, not both; the mask of a window is causal itself.
            is_causal=is_causal and (not sliding_window or document[0].shape[2] <= sliding_window),
            scale=scaling,
        )
        for document in zip(*(torch.split(tensor, lengths, dim=2) for tensor in tensors), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _window(length: int, sliding_window: int | None) -> torch.Tensor | None:
    """Return the mask of a document under a sliding window; None: the window covers the whole document.

    The mask has shape (tokens, tokens): a token sees itself and the ``sliding_window`` - 1 tokens before it.
    """
    if not sliding_window or length <= sliding_window:
        return None
    return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - sliding_window)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
