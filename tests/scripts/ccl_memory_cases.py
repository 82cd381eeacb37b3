"""Situations of a group of ccl whose ranks share memory, as those of ccl_cases."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import ccl_matrix
import torch
import torch.distributed as dist
from ccl_cases import LARGE, first_line, ones, start


def dead_in_the_middle() -> dict[str, object]:
    tensor = torch.ones(32 << 20)
    return dying(lambda: dist.all_reduce(tensor, async_op=True), tensor)


def dead_in_a_scatter() -> dict[str, object]:
    tensor = torch.zeros(8 << 20)
    size = int(os.environ["WORLD_SIZE"])
    return dying(
        lambda: dist.reduce_scatter_tensor(tensor, torch.ones(size * (8 << 20)), async_op=True), tensor
    )


def dead_in_a_gather() -> dict[str, object]:
    tensor, part = torch.zeros(int(os.environ["WORLD_SIZE"]), 8 << 20), torch.full((8 << 20,), 3.0)
    return dying(lambda: dist.all_gather_into_tensor(tensor.view(-1), part, async_op=True), tensor[0])


def dying(call: Callable[[], dist.Work | None], result: torch.Tensor) -> dict[str, object]:
    """Have the last rank die after the first element of its result is there: it is then the number of ranks."""
    rank, size = start()
    work = call()
    assert work is not None
    if rank == size - 1:
        while result[0] != size:
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
            total = ccl_matrix.in_order(op, inputs)
            if not ccl_matrix.is_same(tensor, total):
                found["wrong"].append(f"{op} of {count} {dtype} in {members}")
            mine = total.new_zeros(count)
            dist.reduce_scatter_tensor(mine, inputs[members.index(rank)].repeat(len(members)), op, group)
            if not ccl_matrix.is_same(mine, total):
                found["wrong"].append(f"reduce_scatter by {op} of {count} {dtype} in {members}")
        whole = inputs[0].new_zeros(count * len(members))
        dist.all_gather_into_tensor(whole, inputs[members.index(rank)], group)
        if not ccl_matrix.is_same(whole, torch.cat(inputs)):
            found["wrong"].append(f"all_gather of {count} {dtype} in {members}")
    dist.destroy_process_group()
    end = time.monotonic() + 10  # the engine leaves when the other ranks do
    while shares_memory() and time.monotonic() < end:
        time.sleep(0.01)
    return found | {"kept": shares_memory()}


def unlike_sizes() -> dict[str, object]:
    """Reduce two sizes, which are compared before anything is added."""
    rank, _ = start()
    return {"error": first_line(lambda: ones(count=LARGE - rank)), "again": first_line(ones)}


def unlike_gathered() -> dict[str, object]:
    """Gather rows of two sizes."""
    rank, size = start()
    row = torch.ones(1001 - rank)
    error = first_line(lambda: dist.all_gather_into_tensor(row.new_zeros(size * row.numel()), row))
    return {"error": error, "again": first_line(ones)}


def another_collective() -> dict[str, object]:
    """Scatter a sum on one rank, where the other gathers as many elements."""
    rank, size = start()
    row, whole = torch.ones(1000), torch.ones(size * 1000)
    calls = (
        lambda: dist.all_gather_into_tensor(whole, row),
        lambda: dist.reduce_scatter_tensor(row, whole),
    )
    return {"error": first_line(calls[rank]), "again": first_line(ones)}
