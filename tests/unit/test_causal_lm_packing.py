"""Documents in one sequence: bins, and that losses and gradients are those of each document alone."""

import random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    set_seed,
)

from manycpu.pipeline.recipes.causal_lm.inputs import with_adapter
from manycpu.pipeline.recipes.causal_lm.options import ModelOptions
from manycpu.pipeline.recipes.causal_lm.packing import (
    IGNORED,
    Padded,
    bins,
    flat,
    is_causal,
    loss_sum,
    use_packing,
)
from manycpu.pipeline.recipes.documents import ATTENTION

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTHS = (7, 1, 13, 2, 20)


def documents() -> list[dict[str, Any]]:
    """Make documents of several lengths, of which the first third is no part of the loss."""
    rng = random.Random(1)  # noqa: S311 - tokens
    found = []
    for length in LENGTHS:
        ids = [rng.randrange(3, 50) for _ in range(length)]
        labels = [IGNORED if number < length // 3 else token for number, token in enumerate(ids)]
        found.append({"input_ids": ids, "labels": labels, "lengths": [length]})
    return found


def made(config: Any) -> Any:
    set_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]


CONFIGS = [
    pytest.param(LlamaConfig(**SMALL), id="llama"),
    pytest.param(Qwen2Config(**SMALL), id="qwen2"),
    # Some documents are longer than its window.
    pytest.param(MistralConfig(**SMALL, sliding_window=6), id="mistral"),
    pytest.param(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0,
                   embd_pdrop=0.0, resid_pdrop=0.0), id="gpt2"),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_a_packed_batch_has_the_loss_and_gradients_of_its_documents(config: Any) -> None:
    alone, packed = made(config), made(config)
    assert use_packing(packed) is None
    total = torch.zeros(())
    for one in documents():
        # The model's own way: no labels before a document's second token, logits of all tokens.
        ids, labels = torch.tensor([one["input_ids"]]), torch.tensor([one["labels"]])
        logits = alone(input_ids=ids).logits[0, :-1].float()
        total = total + torch.nn.functional.cross_entropy(
            logits, labels[0, 1:], ignore_index=IGNORED, reduction="sum"
        )
    total.backward()  # type: ignore[no-untyped-call]
    loss = loss_sum(packed, flat(documents()))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    for (name, own), (_, theirs) in zip(packed.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_documents_of_torchs_own_attention_would_see_each_other() -> None:
    """What the test above would find: without the attention of documents the loss is another one."""
    model, other = made(LlamaConfig(**SMALL)), made(LlamaConfig(**SMALL))
    assert use_packing(model) is None
    batch = flat(documents())
    mixed = {**batch, "position_ids": torch.arange(sum(LENGTHS))[None]}
    del mixed["cu_seq_lens_q"]
    assert loss_sum(other, mixed).item() != pytest.approx(loss_sum(model, batch).item(), rel=1e-4)


def test_a_padded_batch_has_the_loss_of_a_packed_one() -> None:
    model, packed = made(LlamaConfig(**SMALL)), made(LlamaConfig(**SMALL))
    assert use_packing(packed) is None
    padded = Padded(0)(documents())
    assert padded["input_ids"].shape == (len(LENGTHS), max(LENGTHS))
    assert loss_sum(model, padded).item() == pytest.approx(
        loss_sum(packed, flat(documents())).item(), rel=1e-5
    )


def test_a_model_that_mixes_documents_by_other_means_is_found() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = made(config)
    before = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name
    assert use_packing(model)
    assert model.config._attn_implementation == before != ATTENTION  # noqa: SLF001


@pytest.mark.parametrize(("kind", "expected"), [(LlamaConfig, True), (GPT2Config, True), (BertConfig, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_sees_later_tokens_is_not_causal(kind: Any, expected: bool, dtype: torch.dtype) -> None:
    set_seed(0)
    model: Any = AutoModelForCausalLM
    assert is_causal(model.from_config(kind(**SMALL), dtype=dtype)) is expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_models_with_layers_of_gpt2() -> None:
    model: Any = AutoModelForCausalLM
    adapted = with_adapter(
        model.from_config(GPT2Config(**SMALL)), ModelOptions(lora_target_modules=["c_attn"])
    )
    trained = [name for name, value in adapted.named_parameters() if value.requires_grad]
    assert trained
    assert all("c_attn.lora_" in name for name in trained)


def test_a_packed_model_generates_as_it_did() -> None:
    plain, packed = made(LlamaConfig(**SMALL)), made(LlamaConfig(**SMALL))
    assert use_packing(packed) is None
    prompt = torch.tensor([[3, 4, 5, 6]])
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert plain.generate(prompt, **options).tolist() == packed.generate(prompt, **options).tolist()


def test_a_batch_without_labels_has_gradients_of_nothing() -> None:
    model = made(LlamaConfig(**SMALL))
    assert use_packing(model) is None
    loss = loss_sum(model, flat([{"input_ids": [3, 4], "labels": [IGNORED] * 2, "lengths": [2]}]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert all(not weight.grad.any() for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("seed", range(5))
def test_bins_hold_each_document_once_and_no_more_than_fits(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - lengths
    lengths = [rng.randint(1, 100) for _ in range(500)]
    packed = bins(lengths, 100)
    assert sorted(number for each in packed for number in each) == list(range(500))
    assert max(sum(lengths[number] for number in each) for each in packed) <= 100
    assert len(packed) <= 1.05 * sum(lengths) / 100 + 1
