"""Pack documents into sequences in which none sees another: bins, and batches.

A packed batch is one row of tokens: the positions begin again at 0 with each document, and attention is
computed for each document by itself. So nothing is padded, and the result is that of the documents alone.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from manycpu.pipeline.recipes.documents import TOLERANCE, are_alike, probing, rounding, use_documents

IGNORED: Final = -100
"""Label of a token that is no part of the loss."""


def bins(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack documents by best fit decreasing: longest first, each goes where it leaves the least room.

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
        # The fullest bin with enough room; -1 is less than every number of a bin.
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
        table: Rows with ``input_ids`` and ``labels``, lists of equal length, and ``length``, which is that.
        size: Tokens that a sequence takes; None: one document each.
    """

    def __init__(self, table: Any, size: int | None) -> None:
        self._table = table
        lengths = table["length"][:]
        self.tokens: int = sum(lengths)
        self.documents = len(lengths)
        self._packs = bins(lengths, size) if size else [[number] for number in range(len(lengths))]
        self.token_lengths = [sum(lengths[row] for row in pack) for pack in self._packs]
        """Tokens of each sequence."""

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Join the documents of a pack: all tokens, all labels, and the length of each document."""
        documents = self._table[self._packs[number]]
        return {
            "input_ids": [token for values in documents["input_ids"] for token in values],
            "labels": [label for values in documents["labels"] for label in values],
            "lengths": documents["length"],
        }


def flat(packs: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Join packs to one batch of shape (1, tokens): input_ids, labels and position_ids.

    cu_seq_lens_q has the place of each document's first token, and at its end the number of all tokens.
    """
    lengths = torch.tensor([length for pack in packs for length in pack["lengths"]])
    joined = {
        name: torch.tensor([[value for pack in packs for value in pack[name]]])
        for name in ("input_ids", "labels")
    }
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    # The first token of a document has no token before it that could predict it.
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
        labels[:, 0] = IGNORED  # no token before it could predict it
        return {
            "input_ids": padded("input_ids", self._pad),
            "labels": labels,
            "attention_mask": torch.tensor(mask),
        }


def model_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a model takes of a batch, without its labels."""
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"}
    if "cu_seq_lens_q" in inputs:
        # So transformers makes no mask of (tokens, tokens): it passes a mask of four dimensions on unchanged.
        inputs |= {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "use_cache": False}
    return inputs


def loss_sum(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum the cross-entropy of all tokens that have a label.

    A token's loss comes from the logits at the token before it, so logits are computed only at such places.

    Args:
        model: A model for causal language modelling, which may be wrapped.
        batch: As of :func:`flat` or :class:`Padded`.
    """
    next_labels = batch["labels"][:, 1:]
    positions = (next_labels != IGNORED).any(0).nonzero()[:, 0]  # where any row's next token has a label
    if len(positions) == 0:  # compute one, of loss 0: a backward pass needs a path to every parameter
        positions = torch.zeros(1, dtype=torch.long)
    logits = model(**model_inputs(batch), logits_to_keep=positions).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        next_labels[:, positions].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def use_packing(model: PreTrainedModel) -> str | None:
    """Have the model compute attention for each document by itself; returns why it cannot; None: it does.

    A trial packs two short documents, and compares their logits with those of each alone. The trial finds
    models that also mix tokens by other means, such as a convolution or a recurrent state. A sharded model
    that cannot be packed must be loaded again.
    """
    if getattr(model.config, "attention_chunk_size", None):
        return "the model attends within chunks of a sequence"
    untyped_model: Any = model
    vocabulary = untyped_model.get_input_embeddings().weight.shape[0]
    # Two documents of five tokens each; the tokens are arbitrary, but in the vocabulary.
    documents = [[number * 7 % vocabulary for number in range(first, first + 5)] for first in (1, 11)]
    packs = [{"input_ids": ids, "labels": ids, "lengths": [len(ids)]} for ids in documents]
    return use_documents(
        model,
        together=lambda: untyped_model(**model_inputs(flat(packs))).logits[0],
        alone=lambda: torch.cat(
            [untyped_model(torch.tensor([ids]), use_cache=False).logits[0] for ids in documents]
        ),
    )


def is_causal(model: Any) -> bool:
    """Whether a token has no effect on the logits of earlier tokens; two sequences are compared."""
    # Not in one batch: two passes of one shape round alike, in bf16 too, so rounding makes no difference.
    with probing(model):
        first, second = (model(torch.tensor([[1, last]]), use_cache=False).logits[0, 0] for last in (2, 3))
    # An expert computes all tokens that choose it at once: their number changes the rounding.
    has_experts = any("expert" in name for name, _ in model.named_modules())
    return are_alike(first, second, rounding(first) if has_experts else TOLERANCE)
