"""What oneCCL has not, and a group of ccl does all the same, as those of ccl_cases."""

import itertools
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from ccl_cases import first_line, ones, start
from torch.nn.parallel import DistributedDataParallel


def embedded(group: dist.ProcessGroup) -> tuple[torch.Tensor, str]:
    """Train an embedding whose gradients are sparse; its weights, and what DDP's records call the backend."""
    torch.manual_seed(0)
    module = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True), process_group=group)
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    for step in range(3):
        module(torch.tensor([step, 4 * dist.get_rank()])).square().sum().backward()
        assert module.module.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    return module.module.weight.detach(), module._get_ddp_logging_data()["backend_name"]


def sparse() -> dict[str, object]:
    start()
    (ours, name), (gloos, _) = embedded(dist.group.WORLD), embedded(dist.new_group(backend="gloo"))
    return {"name": name, "trained": not bool((ours == ours[0]).all()), "same": bool((ours == gloos).all())}


def several_at_once() -> dict[str, object]:
    """Gather several tensors of unlike sizes from each rank, one of them empty."""
    rank, size = start()
    of = [[torch.full((2, 3), k + 1.0), torch.full((5,), k - 1.0), torch.empty(0)] for k in range(size)]
    found = [[torch.zeros_like(tensor) for tensor in tensors] for tensors in of]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_coalesced(found, of[rank])
    right = all(map(torch.equal, itertools.chain(*found), itertools.chain(*of)))
    error = first_line(lambda: dist.group.WORLD.allgather_coalesced([found[0]], of[rank]).wait())
    return {"right": right, "error": error}


def monitored_barrier(timeout: timedelta | None = None) -> None:
    """Call the function of torch, which takes gloo alone before torch 2.14: there, the method of the group."""
    if torch.__version__ < (2, 14):
        dist.group.WORLD.monitored_barrier(timeout)
    else:
        dist.monitored_barrier(timeout=timeout)


def monitored() -> dict[str, object]:
    """A barrier that names who is late; what comes after it works."""
    rank, _ = start()
    monitored_barrier()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the ranks' own way to meet
    error = None
    if rank == 0:
        error = first_line(lambda: monitored_barrier(timedelta(seconds=1)))
        store.set("gave up", "1")
    store.wait(["gave up"], timedelta(seconds=60))
    return {"error": error, "sum": ones()}


def profiled() -> dict[str, object]:
    """A profiler shows it under its name, with the shape of what went in."""
    start()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
    shapes = [event.input_shapes for event in profile.events() if event.name == "ccl:all_gather"]
    return {"shapes": shapes}


def alone() -> dict[str, object]:
    """A group of one rank does it as well."""
    start()
    tensor = torch.ones(3).to_sparse()
    dist.all_reduce(tensor)
    monitored_barrier()
    found = {"sum": float(tensor.to_dense().sum())}
    dist.destroy_process_group()
    return found


def hasty() -> dict[str, object]:
    """A group's timeout is for its collectives: to meet takes as long as it takes."""
    rank, size = start()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the ranks' own way to meet
    make = dist.Backend._plugins["CCL"].creator_fn
    group = make(dist.PrefixStore("hasty", store), rank, size, timedelta(milliseconds=1))
    error = first_line(lambda: group.barrier().wait()) if rank == 0 else None
    store.set(f"hasty {rank}", "1")
    store.wait([f"hasty {other}" for other in range(size)], timedelta(seconds=60))
    return {"error": error}
