"""Situations of a group of ccl whose ranks share memory, as those of ccl_cases."""

import itertools
import os
import signal
import time
from pathlib import Path

import ccl_matrix
import torch
import torch.distributed as dist
from ccl_cases import LARGE, first_line, ones, start


def dead_in_the_middle() -> dict[str, object]:
    rank, size = start()
    tensor = torch.ones(32 << 20)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if rank == size - 1:
        while tensor[0] != size:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    error = first_line(work.wait)
    return {"error": error, "seconds": time.monotonic() - begun, "again": first_line(ones)}


def shares_memory() -> bool:
    return "/memfd:manycpu-" in Path("/proc/self/maps").read_text()


def in_memory() -> dict[str, object]:
    """Reduce in the memory that the ranks share, around the sizes of its chunks."""
    rank, size = start()
    groups = [dist.group.WORLD, dist.new_group([0, size - 1])]
    found = {"wrong": [], "shared": shares_memory()}
    for group, dtype, count in itertools.product(groups, ccl_matrix.SHARED, (1, 1025, 8192, 65537)):
        members = dist.get_process_group_ranks(group)
        if rank not in members:
            continue
        inputs = [ccl_matrix.extremes(dtype, count, 10 * member + count) for member in members]
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = inputs[members.index(rank)].clone()
            dist.all_reduce(tensor, op, group)
            if not ccl_matrix.is_same(tensor, ccl_matrix.in_order(op, inputs)):
                found["wrong"].append(f"{op} of {count} {dtype} in {members}")
    dist.destroy_process_group()
    end = time.monotonic() + 10  # the engine leaves when the other ranks do
    while shares_memory() and time.monotonic() < end:
        time.sleep(0.01)
    return found | {"kept": shares_memory()}


def unlike() -> dict[str, object]:
    """Reduce two sizes, which are compared before anything is added."""
    rank, _ = start()
    return {"error": first_line(lambda: ones(count=LARGE - rank)), "again": first_line(ones)}
