"""What is done with a run: one file for each verb."""

from manycpu.pipeline.verbs.train import train

__all__ = ["train"]
