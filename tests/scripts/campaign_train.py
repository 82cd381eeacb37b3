"""A training for campaigns of faults: it tells a server outside when it starts, saves, is alive and ends.

usage: campaign_train.py TOKEN URL STEPS. Step n adds n to the weight, so the sum shows which steps were done.
"""

import hashlib
import json
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import torch
import torch.distributed as dist

token, url, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
me, ended = uuid.uuid4().hex, threading.Event()
output, checkpoint = Path(os.environ["MANYCPU_OUTPUT"]), Path(os.environ["MANYCPU_CHECKPOINTS"], "state.json")


def post(what, tries=40, **more):
    """Tell the server, also after the network was cut; it takes a line that comes twice as one."""
    said = {"what": what, "run": token, "process": me, "rank": rank, "attempt": attempt, **more}
    said["line"] = uuid.uuid4().hex
    for _ in range(tries):
        with suppress(OSError), urlopen(url, json.dumps(said).encode(), timeout=3):  # noqa: S310 - the server of the test
            return
        time.sleep(0.1)


def beat():
    while not ended.wait(0.5):
        post("beat", tries=1)


dist.init_process_group()
rank, world, attempt = dist.get_rank(), dist.get_world_size(), os.environ["MANYCPU_ATTEMPT"]
done, weight = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0)
post("start", done=done, world=world)
threading.Thread(target=beat, daemon=True).start()
for step in range(done + 1, steps + 1):
    ended.wait(0.2)
    weight += step
    if rank == 0 and step % 4 == 0:
        partial = checkpoint.with_suffix(".partial")
        partial.write_text(json.dumps((step, weight)))
        partial.replace(checkpoint)
        post("saved", done=step)
    print("step", step, flush=True)
digest = None
if rank == 0:
    blob = os.urandom(2_000_000)
    digest = hashlib.sha256(blob).hexdigest()
    (output / "blob.bin").write_bytes(blob)
    (output / "sum.txt").write_text(str(weight))
dist.all_reduce(torch.ones(1))
ended.set()
post("end", digest=digest)
dist.destroy_process_group()
