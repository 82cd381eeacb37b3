"""A training of one process: as many steps as $FOLDER/steps says, until $FOLDER/end is there."""

import os
import time
from pathlib import Path

from manycpu.pipeline.node.metrics import progress

FOLDER = Path(os.environ["FOLDER"])
STEPS = FOLDER / "steps"
done = 0
while not (FOLDER / "end").exists():
    wanted = int(STEPS.read_text() or 0) if STEPS.exists() else 0
    if done < wanted:
        done += 1
        progress(step=done, total_steps=100, loss=2.0 / done, seconds_left=3600)
    time.sleep(0.05)
Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("trained")
