"""Training scripts for tests."""

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), flush=True)
if dist.get_rank() == 0:
    open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model.txt"), "w").write(f"sum {int(total)}")
dist.destroy_process_group()
"""


def goes_on(world: int) -> str:
    """Return a script that counts its steps without an end, but only while ``world`` ranks take part.

    If it resumes at step 5 or later, it takes 5 more steps with any number of ranks, and then ends.
    """
    return f"""
import os, pathlib, time, torch, torch.distributed as dist
from manycpu.pipeline.node.metrics import metrics
dist.init_process_group()
checkpoint = pathlib.Path(os.environ["MANYCPU_CHECKPOINTS"], "step")
step = begun = int(checkpoint.read_text()) if checkpoint.exists() else 0
while begun < 5 or step < begun + 5:
    dist.all_reduce(torch.ones(1))
    step += begun >= 5 or dist.get_world_size() == {world}
    if dist.get_rank() == 0:
        checkpoint.with_suffix(".part").write_text(str(step))
        checkpoint.with_suffix(".part").replace(checkpoint)
    if step == 5:
        print("reached step 5", flush=True)
    time.sleep(0.1)
metrics({{"begun_at": begun, "ended_at": step}})
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("trained")
"""
