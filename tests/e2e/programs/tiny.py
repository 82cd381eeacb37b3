"""A training of one process: says that it will take long, and runs until the file $GO exists."""

import os
import time
from pathlib import Path

from manycpu.pipeline.node.metrics import metrics, progress

for step in range(3):
    print(f"line {step} of {os.environ['TAG']}", flush=True)  # noqa: T201 - what ranks do
progress(step=3, total_steps=4, loss=0.5, seconds_left=3600)
while not Path(os.environ["GO"]).exists():
    time.sleep(0.1)
print("the last line", flush=True)  # noqa: T201 - what ranks do
metrics({"answer": 42})
Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("trained")
