"""Extractive question answering: any encoder checkpoint, data in SQuAD's format, on the Hugging Face Trainer.

Run it as ``python -m manycpu.pipeline.recipes.question_answering``; it takes the options that users of
``run_qa.py`` know, and finds its data, model and folders in the environment of a run.
"""
