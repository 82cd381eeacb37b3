"""Scripts that tests train."""

__all__ = ["ALL_REDUCE"]

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
