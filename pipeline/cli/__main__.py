"""``python -m manycpu.pipeline.cli``."""

from manycpu.pipeline.cli import main

main()
