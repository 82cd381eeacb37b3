"""Trains as Accelerate's notebook for TPUs does: the model is declared outside and passed in."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from manycpu.pipeline.node.metrics import metrics

CLASSES, WORDS, LENGTH = 3, 50, 12


class Samples(Dataset):
    def __init__(self, number):
        chance = torch.Generator().manual_seed(1)
        self.words = torch.randint(0, WORDS, (number, LENGTH), generator=chance)
        self.weights = torch.rand((number, LENGTH), generator=chance)
        self.labels = self.words.sum(1) % CLASSES

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"words": self.words[index], "weights": self.weights[index], "labels": self.labels[index]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 16)
        self.hidden = torch.nn.Linear(16, 32)
        self.head = torch.nn.Linear(32, CLASSES)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, words, weights):
        mean = (self.embedding(words) * weights.unsqueeze(-1)).mean(1)
        return self.head(torch.tanh(self.hidden(mean * self.scale.to(mean.dtype))))


def training_function(model, options):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = DataLoader(Samples(options.samples), batch_size=16)
    evaluation = DataLoader(Samples(options.eval_samples), batch_size=options.eval_batch)
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
    losses = []
    for _ in range(options.epochs):
        model.train()
        for batch in train:
            logits = model(batch["words"], batch["weights"])
            loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    model.eval()
    right = seen = 0
    for batch in evaluation:
        with torch.no_grad():
            logits = model(batch["words"], batch["weights"])
        predicted, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
        right, seen = right + int((predicted == labels).sum()), seen + len(labels)
    metrics(
        {
            "losses": [loss.item() for loss in losses],
            "accuracy": right / seen,
            "evaluated": seen,
            "dtypes": sorted(
                {str(tensor.dtype) for tensor in accelerator.unwrap_model(model).state_dict().values()}
            ),
            "batch": str(batch["weights"].dtype),
            "logits": str(logits.dtype),
            "device": accelerator.device.type,
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--eval_samples", type=int, default=16)
    parser.add_argument("--eval_batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    torch.manual_seed(0)
    model = Model()
    training_function(model, parser.parse_args())
