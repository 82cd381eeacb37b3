"""Fine-tuning of decoder language models: LoRA, DoRA or full, on documents that are packed without mixing them.

Run it as ``python -m manycpu.pipeline.recipes.causal_lm``; it takes the options of Hugging Face's Trainer, and
finds its data, model and folders in the environment of a run.
"""
