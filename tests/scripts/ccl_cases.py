"""Situations of a group of ccl: each function is one, run by every rank of a new world."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import ccl_matrix
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=4)
LARGE = 1_000_003
OVER_ONECCL = dist.ReduceOp.PRODUCT  # also where the ranks share memory


def start(seconds: float = 60) -> tuple[int, int]:
    """Make the world's group, if no case before this one has made it."""
    if not dist.is_initialized():
        dist.init_process_group("ccl", timeout=timedelta(seconds=seconds))
    dist.all_reduce(torch.ones(1))
    return dist.get_rank(), dist.get_world_size()


def ones(
    group: dist.ProcessGroup | None = None, count: int = 10, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> float:
    tensor = torch.ones(count)
    dist.all_reduce(tensor, op, group)
    return float(tensor[-1])


def first_line(call: Callable[[], object]) -> str | None:
    """See what a call raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def error_of_all_reduce() -> dict[str, object]:
    """See how a collective of oneCCL fails, and that the next one of the group fails at once."""
    begun = time.monotonic()
    error = first_line(lambda: ones(op=OVER_ONECCL))
    return {"error": error, "seconds": time.monotonic() - begun, "again": first_line(ones)}


def matrix() -> dict[str, object]:
    _, size = start()
    return ccl_matrix.run({2: (1, 65537), 3: (0, 1009), 4: (1009,)}[size])


def dead_peer() -> dict[str, object]:
    rank, size = start()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of_all_reduce()


def dead_peer_with_a_child() -> dict[str, object]:
    """A data loader's worker that outlives its rank must not keep the others waiting."""
    rank, size = start()
    if rank == size - 1:
        if os.fork() == 0:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of_all_reduce()


def dead_first() -> dict[str, object]:
    rank, _ = start()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of_all_reduce()


def peer_that_exits() -> dict[str, object]:
    rank, _ = start()
    if rank == 0:
        raise SystemExit(3)
    return error_of_all_reduce()


def late_peer() -> dict[str, object]:
    """Wait in vain for a small allreduce, and for a large one of another group meanwhile."""
    rank, _ = start(LIMIT.total_seconds())
    other = dist.new_group(timeout=LIMIT)
    if rank == 0:  # never comes; ends when the others are through
        time.sleep(LIMIT.total_seconds() + 2)
        return {}
    work = dist.all_reduce(torch.ones(LARGE), group=other, async_op=True)
    return error_of_all_reduce() | {"large": first_line(work.wait)}  # type: ignore[union-attr]


def impatient_wait() -> dict[str, object]:
    rank, _ = start()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the ranks' own way to meet
    if rank == 0:
        store.wait(["gave up"], LIMIT)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return {"sum": float(tensor[0])}
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    error = None
    try:
        work.wait(timedelta(milliseconds=200))
    except dist.DistBackendError as caught:
        error = str(caught).splitlines()[0]
    store.set("gave up", "1")
    work.wait()
    return {"error": error, "sum": float(tensor[0])}


def aborted() -> dict[str, object]:
    rank, _ = start()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the ranks' own way to meet
    if rank:
        store.wait(["aborted"], LIMIT)
        with contextlib.suppress(dist.DistBackendError):
            ones()  # rank 0 had sent its part of this one
        return error_of_all_reduce()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr] # noqa: SLF001
    try:
        work.wait()  # type: ignore[union-attr]
    except dist.DistBackendError as error:
        store.set("aborted", "1")
        return {"error": str(error).splitlines()[0]}
    return {"error": None}


def shutdown(order: str) -> dict[str, object]:
    _, size = start()
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    sums = [ones(group) for group in (*groups, None)]
    if order == "newest first":
        for group in reversed(groups):
            dist.destroy_process_group(group)
    if order == "oldest first":
        for group in groups:
            dist.destroy_process_group(group)
    if order != "never":
        dist.destroy_process_group()
    return {"sums": sums}


def shutdown_at_once() -> dict[str, object]:
    return shutdown("at once")


def shutdown_newest_first() -> dict[str, object]:
    return shutdown("newest first")


def shutdown_oldest_first() -> dict[str, object]:
    return shutdown("oldest first")


def shutdown_never() -> dict[str, object]:
    return shutdown("never")


def raise_at_the_end() -> dict[str, object]:
    start()
    raise SystemExit(7)


def child_that_exits() -> dict[str, object]:
    """A child that a rank forks ends as any process does, and sends no goodbye."""
    start()
    child = os.fork()
    if child == 0:
        raise SystemExit(4)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = ones()
    return {"child": code, "sum": found}


def again() -> dict[str, object]:
    """Make the world again in the same process."""
    _, size = start()
    dist.destroy_process_group()
    store = dist.FileStore(os.environ["MEET_AGAIN"], size)
    dist.init_process_group("ccl", store=store, rank=int(os.environ["RANK"]), world_size=size)
    found = ones()
    dist.destroy_process_group()
    return {"sum": found}


def crossed() -> dict[str, object]:
    """Use three groups in another order on each rank, all at the same time."""
    rank, size = start()
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    tensors = [torch.ones(100_003) for _ in range(15)]
    order = range(15) if rank == 0 else range(14, -1, -1)
    works = [dist.all_reduce(tensors[k], group=groups[k // 5], async_op=True) for k in order]
    for work in works:
        assert work is not None
        work.wait()
    return {"right": all(bool((tensor == size).all()) for tensor in tensors)}


def subsets() -> dict[str, object]:
    rank, size = start()
    pair, rest = dist.new_group([0, 1]), dist.new_group(list(range(1, size)))
    alone = [dist.new_group([k]) for k in range(size)]
    found = {"alone": ones(alone[rank])}
    if rank < 2:
        found["pair"] = ones(pair)
    if rank:
        found["rest"] = ones(rest)
    dist.barrier()
    return dict(found)


def futures() -> dict[str, object]:
    """A future's callback sees the sum; many may be under way."""
    _, size = start()
    works = [dist.all_reduce(torch.full((1000,), float(k)), async_op=True) for k in range(20)]
    halves = [
        work.get_future().then(lambda done: done.value()[0] / size) for work in works if work is not None
    ]
    found = [float(half.wait()[0]) for half in halves]
    return {"found": found}


def overlap() -> dict[str, object]:
    """What was posted proceeds while its caller computes and never waits."""
    _, size = start()
    tensor, factor = torch.ones(1 << 20), torch.ones(64, 64)
    work = dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < end:
        factor @ factor
    found = {"completed": work.is_completed(), "right": bool((tensor == size).all())}
    dist.barrier()
    return found


def refusals() -> dict[str, object]:
    """Bad input is refused before anything is sent, so that the group stays usable."""
    start()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))  # noqa: SLF001
    wrong = {
        "device": lambda: backend.allreduce([torch.ones(2, device="meta")]),
        "dtype": lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
        "average": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG),
        "sparse": lambda: backend.broadcast([torch.ones(2).to_sparse()]),
        "size": lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
    }
    found: dict[str, object] = {}
    for name, call in wrong.items():
        try:
            call()
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
    found["sum"] = ones()
    return found


def average() -> dict[str, object]:
    rank, _ = start()
    tensor = torch.full((5,), float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return {"average": float(tensor[0])}


def mismatch_in_detail() -> dict[str, object]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("ccl", timeout=timedelta(seconds=20))
    try:
        dist.all_reduce(torch.ones(10 + dist.get_rank()))
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    return {"error": None}
