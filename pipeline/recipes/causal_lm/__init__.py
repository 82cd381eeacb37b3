"""Fine-tuning of decoder language models: LoRA, DoRA or full, on packed documents.

Run it as ``python -m manycpu.pipeline.recipes.causal_lm``; it takes the options of Hugging Face's
Trainer, and finds its data, model and folders in the environment of a run.
"""
