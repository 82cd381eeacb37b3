"""Encoders that compute nothing on padding: results and gradients are those of a padded batch."""

from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    RobertaConfig,
    SplinterConfig,
    set_seed,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from manycpu.pipeline.recipes.documents import unpad
from manycpu.pipeline.recipes.question_answering.inputs import exclude_padding

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
CAN = {
    "BERT": BertConfig(**SMALL),
    "RoBERTa": RobertaConfig(**SMALL),
    "ELECTRA": ElectraConfig(**SMALL, embedding_size=16),
    "DistilBERT": DistilBertConfig(vocab_size=50, dim=32, hidden_dim=64, n_layers=2, n_heads=4),
}
CANNOT = {
    "its blocks are not one list": AlbertConfig(**SMALL, embedding_size=16),
    "transformers cannot replace its attention": DebertaV2Config(**SMALL, pos_att_type=["p2c"]),
    # Its attention does not say that it looks to both sides.
    "change each other's result": SplinterConfig(**SMALL),
    "size of tensor": ModernBertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    ),
}  # fmt: skip
LENGTHS = (9, 1, 14, 5)
REAL = torch.arange(14) < torch.tensor(LENGTHS)[:, None]


def made(config: Any, kind: Any = AutoModel) -> Any:
    set_seed(0)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.dropout = config.attention_dropout = config.qa_dropout = 0.0
    return kind.from_config(config, dtype=torch.float32).train()


def batch(real: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 50, real.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": torch.where(real, ids, 1), "attention_mask": real.long()}


def results(model: Any, real: torch.Tensor) -> list[torch.Tensor]:
    """Return the hidden states of real tokens, and the gradients of a function of them."""
    hidden = model(**batch(real))[0][real]
    model.zero_grad()
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    return [hidden.detach(), *(parameter.grad.clone() for parameter in parameters)]


@pytest.mark.parametrize("name", CAN)
def test_real_tokens_and_gradients_are_those_of_a_padded_batch(name: str) -> None:
    model = made(CAN[name])
    expected = results(model, REAL)
    assert unpad(model) is None
    torch.testing.assert_close(results(model, REAL), expected, rtol=1e-4, atol=1e-5)


def test_blocks_compute_real_tokens_alone_and_padding_repeats_the_last() -> None:
    model, shapes = made(CAN["BERT"]), []
    assert unpad(model) is None
    for block in model.encoder.layer:
        block.intermediate.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    hidden = model(**batch(REAL))[0]
    assert shapes == [(1, sum(LENGTHS), 32)] * 3
    for row, length in zip(hidden, LENGTHS, strict=True):
        torch.testing.assert_close(row[length:], row[length - 1].expand(14 - length, 32), rtol=0, atol=0)


@pytest.mark.parametrize("name", CAN)
def test_answers_losses_and_gradients_are_those_of_a_padded_batch(name: str) -> None:
    model = made(CAN[name], AutoModelForQuestionAnswering)
    exclude_padding(model)
    # Answers end with the last token of a row, which its padding repeats.
    ends = torch.tensor(LENGTHS) - 1
    found, shapes = [], set[Any]()
    for each in model.modules():
        if isinstance(each, GradientCheckpointingLayer):
            each.register_forward_hook(lambda _, args, __: shapes.add(tuple(args[0].shape[:2])))
    for _ in range(2):
        shapes.clear()
        model.zero_grad()
        outputs = model(**batch(REAL), start_positions=ends // 2, end_positions=ends)
        outputs.loss.backward()
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        found.append([outputs.loss.detach(), outputs.start_logits.detach(), *gradients])
        assert (outputs.end_logits[~REAL] <= -1e4).all()
        if len(found) == 1:
            assert unpad(model) is None
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert shapes == {(1, sum(LENGTHS))}


def test_blocks_that_are_computed_again_in_the_backward_pass_have_the_same_gradients() -> None:
    model = made(CAN["BERT"])
    expected = results(model, REAL)
    assert unpad(model) is None
    model.activation_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(results(model, REAL), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("real", [REAL.flip(1), torch.ones(2, 7, dtype=torch.bool)], ids=["left", "none"])
def test_a_batch_with_padding_on_the_left_or_without_any_is_as_it_was(real: torch.Tensor) -> None:
    model = made(CAN["BERT"])
    expected = results(model, real)
    assert unpad(model) is None
    torch.testing.assert_close(results(model, real), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results(model, REAL)[0].shape, torch.Size([sum(LENGTHS), 32]))


@pytest.mark.parametrize("why", CANNOT)
def test_a_model_that_cannot_says_why_and_stays_as_it_was(why: str) -> None:
    model = made(CANNOT[why])
    before, attention = results(model, REAL), model.config._attn_implementation  # noqa: SLF001
    assert why in str(unpad(model))
    assert model.config._attn_implementation == attention  # noqa: SLF001
    torch.testing.assert_close(results(model, REAL), before, rtol=0, atol=0)
