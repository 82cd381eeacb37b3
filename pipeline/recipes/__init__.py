"""Training programs that come with manycpu; each runs as ``python -m manycpu.pipeline.recipes.NAME``."""
