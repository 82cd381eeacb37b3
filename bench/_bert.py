"""The model of the benchmarks: BERT with six layers, 67M parameters; sentences of 128 random tokens."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

BATCH, LENGTH = 8, 128


def model(layers: int = 6) -> Any:
    """Create the model, with the same weights each time."""
    torch.manual_seed(0)
    bert = BertForSequenceClassification(BertConfig(num_hidden_layers=layers))
    return bert.train()


def batch(size: int = BATCH) -> dict[str, torch.Tensor]:
    """Create a batch of random tokens."""
    return {"input_ids": torch.randint(1000, 30000, (size, LENGTH)), "labels": torch.randint(0, 2, (size,))}


def stepper(
    called: Any, optimizer: torch.optim.Optimizer, data: dict[str, torch.Tensor], *, bf16: bool
) -> Callable[..., None]:
    """Make a training step: forward, backward, optimizer."""

    def step(around: Any = contextlib.nullcontext) -> None:
        with around():
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = called(**data).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
