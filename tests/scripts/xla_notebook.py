"""Launches the training function of `xla_train.py` as a notebook would: the model outside, and inside."""

import argparse
import json

from xla_train import Model
from xla_train import training_function as train

from manycpu.pipeline import notebook_launcher

options = argparse.Namespace(samples=64, eval_samples=32, eval_batch=16, epochs=1)


def inside(options):
    train(Model(), options)


def training_function(model, options):
    train(model, options)
    return sum(value.numel() for value in model.parameters())


def count(options):
    model = Model()
    return notebook_launcher(training_function, (model, options), device="xla")


if __name__ == "__main__":
    print(json.dumps({"weights": count(options)}))
    notebook_launcher(inside, (options,), num_processes=8, device="xla", mixed_precision="bf16")
