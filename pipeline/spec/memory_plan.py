"""Compute the memory of a rank that trains a model: as a replica of its own (DDP), or sharded (FSDP).

Pure arithmetic in bytes; knows no torch, so that ``manycpu plan``, preflight and ranks share it.
docs/large_models.md explains the formula; a test compares it with what trainings take.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

Family = Literal["encoder", "gated", "gpt2"]
Shard = Literal["no", "full", "hybrid"]

FLOAT: Final = 4
"""Bytes of a parameter, a gradient and a number of the optimizer: they are fp32, whatever is computed in."""
HALF: Final = 2
"""Bytes of a bf16 number."""
ADAMW: Final = 8
"""Bytes for each trained parameter: two moments in fp32."""
PROCESS: Final = 750 << 20
"""Bytes of a rank before it has a model: Python, torch, transformers and the model's code, measured."""
SPARE: Final = 0.1
"""Share of a node's memory that is planned for nothing: allocators, page cache, the data, the system."""
_HEAP: Final = 1.4
"""Memory that a step's tensors take, over their size; measured: glibc keeps holes where small ones were."""
_MAPPED: Final = 32 << 20
"""Bytes from which on glibc maps a tensor by itself, and leaves no hole."""
_MATRICES: Final = 8  # of a block, about: each is gathered into a tensor of its own
_LOGIT_COPIES: Final = 3  # the logits, their log-softmax, and their gradient, which an evaluation lacks
_SCORE_COPIES: Final = 3  # where attention scores are kept: softmax, the mask of dropout, their product


class _Saved(NamedTuple):
    """Numbers that a layer keeps of each token for its backward pass, counted by saved_tensors_hooks."""

    fp32: int
    """Multiples of the hidden size, if all is computed in fp32."""
    kept: int
    """Multiples of the hidden size that stay fp32 under autocast: inputs of norms."""
    cast: int
    """Multiples of the hidden size that are bf16 under autocast: inputs of linear layers."""
    wide: int
    """Multiples of the intermediate size."""


_SAVED: Final[dict[Family, _Saved]] = {
    "encoder": _Saved(4, 2, 4, 2),
    "gated": _Saved(6, 4, 5, 4),
    "gpt2": _Saved(6, 2, 4, 5),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a transformer's activations depend on."""

    family: Family
    layers: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    """Width of all queries: heads times the size of a head."""
    keys: int
    """Width of all keys, and of all values."""
    vocabulary: int
    attention_dropout: bool = False
    """Whether attention has dropout: torch has no fused kernel for it on CPUs, and keeps the scores."""
    hidden_dropout: bool = False


@dataclass(frozen=True, kw_only=True)
class Model:
    """The numbers of parameters of a model; what is not known is left out."""

    parameters: int
    block: int = 0
    """Parameters of the largest block: what sharding gathers at a time. 0: not known, not counted."""
    outside: int = 0
    """Parameters outside the blocks: embeddings, and the head."""
    layout: Layout | None = None
    """None: activations are not known, and count as nothing."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, as far as memory depends on it."""

    batch: int = 1
    """Samples of a rank's step, which are computed together."""
    evaluated: int = 0
    """Samples of a rank's batch of an evaluation."""
    length: int = 1
    """Tokens of each."""
    bf16: bool = False
    """Whether it is computed in bf16, beside weights in fp32."""
    checkpointing: bool = False
    """Whether a block keeps its input alone, and is computed again in the backward pass."""
    causal: bool = False
    """Whether each token has logits over the vocabulary."""
    trained: int | None = None
    """Parameters that have gradients (adapters count as additional); None: all."""
    adapters: int = 0
    """Parameters of adapters (LoRA): trained, beside the model's own."""
    frozen: int = FLOAT
    """Bytes of a parameter that is not trained: 4, or 2 where it is stored as bf16."""
    optimizer: int = ADAMW
    """Bytes of the optimizer for each trained parameter."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The memory of a rank, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    copies: int
    """Weights beside the rank's own: in bf16, or gathered from the other ranks, with their gradients."""
    process: int

    @property
    def total(self) -> int:
        """All memory of the rank."""
        return self.states + self.activations + self.copies + self.process

    @property
    def states(self) -> int:
        """What sharding divides: parameters, gradients and the optimizer's numbers."""
        return self.parameters + self.gradients + self.optimizer


def replica(model: Model, training: Training) -> Parts:
    """Compute the memory of a rank that holds the whole model, as under DDP.

    Gradients are views of DDP's buckets, and take no memory beside them.
    """
    parameters, gradients, optimizer = _states(model, training)
    # Autocast casts the weights of linear layers once in a step, and keeps them for the backward pass.
    cast = _count_cast_weights(model, training) if training.bf16 else 0
    return Parts(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations(model, training),
        copies=HALF * cast,
        process=PROCESS,
    )


def sharded(model: Model, training: Training, ranks: int) -> Parts:
    """Compute the memory of one of ``ranks`` that share the model, as under FSDP.

    Beside its part of the model, a rank holds gathered weights: those outside of the blocks, those of the
    present block and of the next one. For the largest of these units it also holds the buffer in which the
    unit was gathered, its gradients, and two copies of these gradients in fp32, since gloo reduces a copy.
    """
    number_bytes = HALF if training.bf16 else FLOAT
    trains = training.trained is None or training.trained > 0
    largest = max(model.block, model.outside)
    # The present block and the next one; a model with one block has no next one.
    two_blocks = min(2 * model.block, model.parameters - model.outside)
    gathered = number_bytes * (model.outside + two_blocks + largest)
    reduced = (number_bytes + 2 * FLOAT) * largest if trains else 0  # gradients, and their two copies
    # Only small tensors leave holes in the heap. The size of one: a block's bytes over its matrices.
    heap_factor = _HEAP if number_bytes * model.block / _MATRICES < _MAPPED else 1
    parameters, gradients, optimizer = (math.ceil(part / ranks) for part in _states(model, training))
    return Parts(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations(model, training),
        copies=int(heap_factor * (gathered + reduced)),
        process=PROCESS,
    )


def _states(model: Model, training: Training) -> tuple[int, int, int]:
    """Compute the bytes of parameters, gradients and optimizer of the whole model."""
    own_trained = model.parameters if training.trained is None else training.trained
    trained = own_trained + training.adapters
    frozen = (model.parameters - own_trained) * training.frozen
    parameters = frozen + FLOAT * trained
    return parameters, FLOAT * trained, training.optimizer * trained


def _count_cast_weights(model: Model, training: Training) -> int:
    """Count the weights that autocast casts to bf16: all but embeddings, and frozen weights that are bf16."""
    if training.frozen == HALF and training.trained is not None:  # some are frozen, and are bf16 already
        return training.trained + training.adapters
    # Of what is outside the blocks, only the head of a causal model is a linear layer.
    head = model.layout.vocabulary * model.layout.hidden if model.layout and training.causal else 0
    return model.parameters - model.outside + head + training.adapters


def activations(model: Model, training: Training) -> int:
    """Compute the bytes of a rank's activations; 0: the model's layout is not known.

    They are what a step keeps for its backward pass, or what an evaluation has at once, if that is more.

    After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
    4.1: a layer keeps s b h (34 + 5 a s / h) bytes in 16 bits (s: tokens of a sample, b: samples, h: hidden
    size, a: heads). Here the numbers are those of today's layers (``_SAVED``), and for fp32 too. Attention
    scores, the second part, are kept only where attention has dropout.
    """
    layout = model.layout
    if layout is None:
        return 0
    tokens = training.batch * training.length
    saved_of_layer = tokens * _saved_of_token(layout, training)
    # The gradients of the layer in its backward pass: of the widest tensors, and of the residual stream. An
    # evaluation has tensors of the same sizes at once.
    wide_of_token = (HALF if training.bf16 else FLOAT) * (2 * layout.intermediate + 2 * layout.hidden)
    layer_gradients = tokens * wide_of_token
    # With checkpointing, each layer keeps only its input, and one layer at a time is computed again.
    kept = tokens * FLOAT * layout.hidden if training.checkpointing else saved_of_layer
    layers = layout.layers * kept + layer_gradients + (saved_of_layer if training.checkpointing else 0)
    embeddings_and_norm = tokens * FLOAT * 3 * layout.hidden  # of the embeddings, and of the last norm
    logits = _LOGIT_COPIES * FLOAT * tokens * layout.vocabulary if training.causal else 0
    if training.checkpointing:
        # The logits are freed before the layers' gradients are made: the larger sum counts.
        layers_and_logits = max(layers, layout.layers * kept + logits)
    else:
        layers_and_logits = layers + logits
    evaluation = _evaluation(layout, training, wide_of_token)
    return int(_HEAP * max(embeddings_and_norm + layers_and_logits, evaluation))


def _evaluation(layout: Layout, training: Training, wide_of_token: int) -> int:
    """Compute the bytes that a batch of an evaluation needs at once: in a layer, or for the logits.

    ``wide_of_token``: bytes of a token in the widest tensors of a layer.
    """
    tokens = training.evaluated * training.length
    logits_of_token = (_LOGIT_COPIES - 1) * FLOAT * layout.vocabulary if training.causal else 0
    # The 3: of the embeddings and the last norm, as in a step.
    return tokens * (FLOAT * 3 * layout.hidden + max(wide_of_token, logits_of_token))


def _saved_of_token(layout: Layout, training: Training) -> int:
    """Compute the bytes that a layer keeps of each token for its backward pass."""
    saved = _SAVED[layout.family]
    # Queries, keys, values and what attention returns; and the wide tensors of the feed-forward network.
    inner = 2 * layout.queries + 2 * layout.keys + saved.wide * layout.intermediate
    inner += 2 * layout.hidden if layout.hidden_dropout else 0
    scores = 0
    if layout.attention_dropout:
        scores = FLOAT * _SCORE_COPIES * layout.heads * training.length
    if training.bf16:  # autocast leaves the inputs of norms in fp32, and attention scores
        return FLOAT * saved.kept * layout.hidden + HALF * (saved.cast * layout.hidden + inner) + scores
    return FLOAT * (saved.fp32 * layout.hidden + inner) + scores


def adapter_parameters(layout: Layout | None, rank: int) -> int:
    """Count the parameters of LoRA at every linear layer: at each, rank x (inputs + outputs).

    ``rank`` is the rank of LoRA's matrices, not a process. Returns 0 if the model's layout is not known:
    adapters have few parameters beside the model's.
    """
    if layout is None:
        return 0
    # The matrices of queries and of the output, and those of keys and of values: inputs + outputs of each.
    attention = 2 * (layout.hidden + layout.queries) + 2 * (layout.hidden + layout.keys)
    matrices = 3 if layout.family == "gated" else 2
    return layout.layers * rank * (attention + matrices * (layout.hidden + layout.intermediate))


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes that a training runs on."""

    nodes: int
    processes: int
    """Ranks of each node."""
    memory: int
    """Bytes of each node."""

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.processes

    @property
    def share(self) -> int:
        """Bytes that each rank may use: its part of a node's memory, of which ``SPARE`` is kept free."""
        return int(self.memory * (1 - SPARE)) // self.processes


def parts(model: Model, training: Training, nodes: Nodes, shard: Shard) -> Parts:
    """Compute the memory of a rank on these nodes.

    ``full`` divides the model among all ranks, ``hybrid`` among the ranks of each node; with ``no``, or with
    one rank, each rank holds a replica.
    """
    if shard == "no" or nodes.ranks == 1:
        return replica(model, training)
    return sharded(model, training, nodes.processes if shard == "hybrid" else nodes.ranks)


def fits(model: Model, training: Training, nodes: Nodes, shard: Shard) -> bool:
    """Whether each rank's share of its node's memory is enough for the training."""
    return parts(model, training, nodes, shard).total <= nodes.share


def nodes_needed(model: Model, training: Training, nodes: Nodes, shard: Shard) -> int | None:
    """Count the nodes of this kind that the training needs; None: no number of them is enough."""
    if fits(model, training, replace(nodes, nodes=1), shard):
        return 1
    if shard != "full":  # more nodes do not make a rank's part smaller
        return None
    on_one_rank = sharded(model, training, ranks=1)
    # More ranks make only the states of a rank smaller, so its share must have room beside all else.
    room = nodes.share - (on_one_rank.total - on_one_rank.states)
    if room <= 0:
        return None
    count = max(1, math.ceil(on_one_rank.states / room / nodes.processes))
    # Each of the three states is rounded up by itself, so that one more node may be needed.
    return count if fits(model, training, replace(nodes, nodes=count), shard) else count + 1


def processes_possible(model: Model, training: Training, nodes: Nodes) -> int:
    """Count the ranks with a replica each that fit the memory of a node; 0: not even one fits."""
    return int(nodes.memory * (1 - SPARE)) // replica(model, training).total


def choose(model: Model, training: Training, nodes: Nodes) -> Shard:
    """Choose how ``--shard auto`` trains: by replicas where they fit, else sharded over all ranks."""
    return "no" if fits(model, training, nodes, "no") else "full"
