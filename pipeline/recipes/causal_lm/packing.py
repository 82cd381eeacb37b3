"""Pack documents into sequences in which none sees another: bins, batches, and attention for each document.

A packed batch is one row of tokens: the positions begin again at 0 with each document, and attention is
computed for each document by itself. So nothing is padded, and the result is that of the documents alone.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from manycpu.pipeline.node import sharding

IGNORED: Final = -100
"""Label of a token that is no part of the loss."""
ATTENTION: Final = "manycpu_documents"
"""Name of the attention of packed batches, in transformers' registry."""
_TOLERANCE: Final = 1e-4
"""Largest difference of logits, relative to the largest of them, that rounding explains in fp32."""
_BF16_TOLERANCE: Final = 2e-2


def bins(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack by best fit decreasing: each document goes where it leaves the least room.

    >>> bins([3, 9, 4, 2, 5, 1], 10)
    [[1, 5], [4, 2], [0, 3]]

    Args:
        lengths: Tokens of each document; none is longer than a bin.
        size: Tokens that a bin takes.

    Returns:
        Numbers of the documents in each bin.
    """
    packed: list[list[int]] = []
    room: list[tuple[int, int]] = []  # room left, and number of the bin; sorted
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect_left(room, (lengths[document], -1))
        if place == len(room):
            packed.append([document])
            left, number = size - lengths[document], len(packed) - 1
        else:
            left, number = room.pop(place)
            packed[number].append(document)
            left -= lengths[document]
        insort(room, (left, number))
    return packed


class Packs(Dataset[dict[str, Any]]):
    """Sequences of whole documents.

    Args:
        table: Rows with ``input_ids`` and ``labels``, lists of equal length.
        size: Tokens that a sequence takes; None: one document each.
    """

    def __init__(self, table: Any, size: int | None) -> None:
        self._table, lengths = table, table["length"][:]
        self.tokens: int = sum(lengths)
        self.documents = len(lengths)
        self._packs = bins(lengths, size) if size else [[number] for number in range(len(lengths))]

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        rows = self._table[self._packs[number]]
        return {
            "input_ids": [token for row in rows["input_ids"] for token in row],
            "labels": [label for row in rows["labels"] for label in row],
            "lengths": rows["length"],
        }


def flat(packs: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Join packs to one batch of shape (1, tokens): input_ids, labels, position_ids, and cu_seq_lens_q."""
    lengths = torch.tensor([length for pack in packs for length in pack["lengths"]])
    joined = {
        name: torch.tensor([[value for pack in packs for value in pack[name]]])
        for name in ("input_ids", "labels")
    }
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    # The first token of a document follows none: no token predicts it.
    joined["labels"][0, starts[:-1]] = IGNORED
    return joined | {"position_ids": positions, "cu_seq_lens_q": starts.int()}


class Padded:
    """Makes batches of shape (documents, longest of them), padded on the right.

    Args:
        pad: The token that pads.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, packs: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Pad documents to the longest of the batch."""
        longest = max(len(pack["input_ids"]) for pack in packs)

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([[*pack[name], *[fill] * (longest - len(pack[name]))] for pack in packs])

        mask = [[1] * len(pack["input_ids"]) + [0] * (longest - len(pack["input_ids"])) for pack in packs]
        labels = padded("labels", IGNORED)
        labels[:, 0] = IGNORED
        return {
            "input_ids": padded("input_ids", self._pad),
            "labels": labels,
            "attention_mask": torch.tensor(mask),
        }


def model_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a model takes of a batch, without its labels."""
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"}
    if "cu_seq_lens_q" in inputs:
        # transformers passes a mask of four dimensions on as it is: it makes none of (tokens, tokens).
        inputs |= {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "use_cache": False}
    return inputs


def loss_sum(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum the cross-entropy of all labelled tokens; logits are computed for the tokens before them alone.

    Args:
        model: A model for causal language modelling, which may be wrapped.
        batch: As of :func:`flat` or :class:`Padded`.
    """
    following = batch["labels"][:, 1:]
    kept = (following != IGNORED).any(0).nonzero()[:, 0]
    if len(kept) == 0:  # a backward pass needs a path to every parameter
        kept = torch.zeros(1, dtype=torch.long)
    logits = model(**model_inputs(batch), logits_to_keep=kept).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        following[:, kept].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def use_documents(model: PreTrainedModel) -> str | None:
    """Have the model compute attention for each document by itself; returns why it cannot, or None.

    Two short documents are packed, and their logits compared with those of each alone: a model that mixes
    tokens by other means (a convolution, a recurrent state) is found so. A sharded model that cannot is of no
    more use.
    """
    before = model.config._attn_implementation  # noqa: SLF001 - the name that set_attn_implementation takes
    if getattr(model.config, "attention_chunk_size", None):
        return "the model attends within chunks of a sequence"
    why = None
    try:
        model.set_attn_implementation(ATTENTION)
        why = None if _is_exact(model) else "documents of one sequence change each other's result"
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        why = str(error).splitlines()[0]
    if why:
        model.set_attn_implementation(before or "eager")
    return why


@contextmanager
def _probing(model: Any) -> Iterator[None]:
    """Run a model without dropout and gradients, and leave it as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        sharding.release(model)  # else adapters would freeze gathered weights, and train the shares


def is_causal(model: Any) -> bool:
    """Whether no token of a sequence changes the logits of those before it."""
    # One by one: the same shapes round alike, so that the difference of bf16 logits is no rounding either.
    with _probing(model):
        first, second = (model(torch.tensor([[1, last]]), use_cache=False).logits[0, 0] for last in (2, 3))
    # Experts compute as many tokens at once as choose them, and round differently.
    has_experts = any("expert" in name for name, _ in model.named_modules())
    return _are_alike(first, second, _rounding(first) if has_experts else _TOLERANCE)


def _is_exact(model: Any) -> bool:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    documents = [[number * 7 % vocabulary for number in range(first, first + 5)] for first in (1, 11)]
    packs = [{"input_ids": ids, "labels": ids, "lengths": [len(ids)]} for ids in documents]
    with _probing(model):
        packed = model(**model_inputs(flat(packs))).logits[0]
        alone = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in documents])
    return _are_alike(packed, alone, _rounding(packed))


def _rounding(logits: torch.Tensor) -> float:
    return _TOLERANCE if logits.dtype == torch.float32 else _BF16_TOLERANCE


def _are_alike(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
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
    """Attend within each document; tensors have shape (1, heads, tokens, size)."""
    starts = kwargs.get("cu_seq_lens_q")
    if starts is None or attention_mask is None:  # generation, and models that are asked without packing
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    refused = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if refused:
        raise ValueError(f"its attention has {refused[0]}, which torch's has not")
    groups = query.shape[1] // key.shape[1]
    # Repeated once for all documents: enable_gqa does it for each, which costs more.
    whole = query, repeat_kv(key, groups), repeat_kv(value, groups)
    lengths = starts.diff().tolist()
    outputs = [
        scaled_dot_product_attention(
            *parts,  # type: ignore[misc]
            attn_mask=_window(parts[0].shape[2], sliding_window),
            dropout_p=dropout,
            is_causal=not sliding_window or parts[0].shape[2] <= sliding_window,
            scale=scaling,
        )
        for parts in zip(*(torch.split(tensor, lengths, dim=2) for tensor in whole), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _window(length: int, sliding_window: int | None) -> torch.Tensor | None:
    """Mask of a document that is longer than the window of its layer."""
    if not sliding_window or length <= sliding_window:
        return None
    return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - sliding_window)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
