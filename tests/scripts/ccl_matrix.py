"""Every collective of ccl against gloo's, for each dtype and size: one launch for a whole world."""

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MOVED = (*FLOATS, *INTS, torch.bool, torch.complex64, torch.complex128)
Op = dist.ReduceOp
Call = Callable[[dist.ProcessGroup, Tensor], list[Tensor]]


def values(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Make numbers small enough that a sum of ints never wraps around, and no product of floats overflows."""
    made = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=made).bool()
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn(size, 2, generator=made, dtype=dtype.to_real()))
    if dtype.is_floating_point:
        return (torch.rand(size, generator=made) + 0.5).to(dtype)
    return torch.randint(0, 4, (size,), generator=made).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """Lay a tensor out with gaps between its elements."""
    wide = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
    wide[:, 0] = tensor
    return wide[:, 0]


def all_reduce(op: dist.ReduceOp.RedOpType) -> Call:
    def call(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
        dist.all_reduce(tensor, op, group)
        return [tensor]

    return call


def reduce(op: dist.ReduceOp.RedOpType) -> Call:
    def call(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
        root = group.size() - 1
        dist.reduce(tensor, root, op, group)
        return [tensor] if group.rank() == root else []

    return call


def all_reduce_coalesced(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    tensors = [tensor, tensor[: tensor.numel() // 2].clone()]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def broadcast(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    dist.broadcast(tensor, group.size() - 1, group)
    return [tensor]


def all_gather(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    parts = [strided(tensor.new_zeros(tensor.shape)) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group)
    return parts


def all_gather_into_tensor(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(group.size() * tensor.numel())
    dist.all_gather_into_tensor(out, tensor, group)
    return [out]


def all_gather_in_place(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(group.size(), tensor.numel())
    out[group.rank()] = tensor
    dist.all_gather_into_tensor(out.view(-1), out[group.rank()], group)
    return [out]


def reduce_scatter_tensor(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(tensor.shape)
    dist.reduce_scatter_tensor(out, tensor.repeat(group.size()), Op.SUM, group)
    return [out]


def reduce_scatter(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(tensor.shape)
    dist.reduce_scatter(out, [strided(tensor) for _ in range(group.size())], Op.MAX, group)
    return [out]


def all_to_all_single(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(tensor.numel() * group.size())
    dist.all_to_all_single(out, tensor.repeat(group.size()), group=group)
    return [out]


def all_to_all_uneven(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Send k + 1 copies to rank k, nothing to rank 0."""
    me, size = group.rank(), group.size()
    sent = [0 if k == 0 else k + 1 for k in range(size)]
    received = [sent[me]] * size
    rows = tensor[:3].repeat(sum(sent), 1)
    out = tensor.new_zeros(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows, received, sent, group)
    return [out]


def gather(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    root = group.size() - 1
    parts = [torch.zeros_like(tensor) for _ in range(group.size())] if group.rank() == root else None
    dist.gather(tensor, parts, root, group)
    return parts or []


def scatter(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    parts = [tensor + k if tensor.dtype != torch.bool else tensor for k in range(group.size())]
    out = torch.zeros_like(tensor)
    dist.scatter(out, parts if group.rank() == 0 else None, 0, group)
    return [out]


def send_recv(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Pass on to the right, with two tags that cross."""
    me, size = group.rank(), group.size()
    right, left = (me + 1) % size, (me - 1) % size
    first, second = torch.zeros_like(tensor), torch.zeros_like(tensor)
    works = [
        dist.isend(tensor, right, group, 1),
        dist.isend(tensor.clone(), right, group, 2),
        dist.irecv(second, left, group, 2),
        dist.irecv(first, left, group, 1),
    ]
    for work in works:
        if work is not None:
            work.wait()
    return [first, second]


def cases() -> Iterator[tuple[str, Call, torch.dtype]]:
    """List what is compared."""
    for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX):
        for dtype in (*FLOATS, *INTS):
            yield f"all_reduce {op}", all_reduce(op), dtype
            yield f"reduce {op}", reduce(op), dtype
    for op in (Op.BAND, Op.BOR, Op.BXOR):
        for dtype in INTS:
            yield f"all_reduce {op}", all_reduce(op), dtype
    reducing = (all_reduce_coalesced, reduce_scatter_tensor, reduce_scatter)
    for call, dtype in itertools.product(reducing, (*FLOATS, *INTS)):
        yield call.__name__, call, dtype
    moving = (
        broadcast,
        all_gather,
        all_gather_into_tensor,
        all_gather_in_place,
        all_to_all_single,
        all_to_all_uneven,
        gather,
        scatter,
        send_recv,
    )
    for call, dtype in itertools.product(moving, MOVED):
        yield call.__name__, call, dtype


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Allow for another order of additions; ints and what is only moved are equal bit for bit."""
    if not dtype.is_floating_point:
        return {"rtol": 0, "atol": 0}
    return {"rtol": 8 * torch.finfo(dtype).eps, "atol": 0}


def outcome(call: Call, group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor] | str:
    try:
        return call(group, tensor)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]


def compare(name: str, call: Call, dtype: torch.dtype, size: int, gloo: dist.ProcessGroup) -> str | None:
    world = dist.group.WORLD
    assert world is not None
    given = values(dtype, size, 100 * dist.get_rank() + size)
    layout = strided if size % 2 else torch.clone
    expected = outcome(call, gloo, given.clone())
    if isinstance(expected, str):  # gloo cannot: what ccl does is then checked by other tests
        return None
    found = outcome(call, world, layout(given))
    if isinstance(found, str):
        return f"{name} {dtype} {size}: {found}"
    for a, b in zip(found, expected, strict=True):
        try:
            torch.testing.assert_close(a, b, check_stride=False, **tolerance(dtype))
        except AssertionError as error:
            return f"{name} {dtype} {size}: {str(error).splitlines()[0]}"
    return None


def run(sizes: tuple[int, ...]) -> dict[str, object]:
    """Compare everything; what differs."""
    gloo = dist.new_group(backend="gloo")
    assert gloo is not None
    faults, compared = [], 0
    for (name, call, dtype), size in itertools.product(cases(), sizes):
        fault = compare(name, call, dtype, size, gloo)
        compared += 1
        if fault:
            faults.append(fault)
    return {"compared": compared, "faults": faults}
