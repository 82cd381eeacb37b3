"""Every collective of ccl for each dtype and size, beside what plain torch says and, where it can, gloo."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SHARED = (*FLOATS, *INTS)
REDUCED = (*FLOATS, *INTS, torch.bool)
MOVED = (*REDUCED, torch.complex64, torch.complex128)
Op = dist.ReduceOp
Group = dist.ProcessGroup
Call = Callable[[Group, Tensor], list[Tensor]]
Expected = Callable[[list[Tensor], int], list[Tensor]]  # of every rank's input, and the own rank
BITWISE = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}


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


def extremes(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Make numbers of every magnitude, also such that their sum overflows; none is negative or NaN."""
    made = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(
            torch.iinfo(dtype).min, torch.iinfo(dtype).max, (size,), generator=made, dtype=dtype
        )
    signed = torch.randn(size, generator=made, dtype=torch.float64)
    limits = torch.finfo(dtype)
    exponents = torch.rand(size, generator=made, dtype=torch.float64)
    low, high = math.log2(limits.smallest_normal) - 5, math.log2(limits.max)
    return (signed * torch.exp2(low + (high - low) * exponents)).to(dtype).abs()


def strided(tensor: Tensor) -> Tensor:
    """Lay a tensor out with gaps between its elements."""
    wide = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
    wide[:, 0] = tensor
    return wide[:, 0]


def spread_out(group: Group, tensor: Tensor) -> Tensor:
    """Lay out with gaps for ccl; gloo would silently write into them."""
    return strided(tensor) if group is dist.group.WORLD else tensor


def combined(op: object, inputs: list[Tensor]) -> Tensor:
    """Reduce in plain torch: floats in double precision, bools as any and all."""
    dtype = inputs[0].dtype
    if op in BITWISE:
        return functools.reduce(BITWISE[op], inputs)
    wide = torch.stack(inputs)
    wide = wide.double() if dtype.is_floating_point else wide if dtype.is_complex else wide.long()
    found = {
        Op.SUM: lambda: wide.sum(0),
        Op.AVG: lambda: wide.mean(0),
        Op.PRODUCT: lambda: wide.prod(0),
        Op.MIN: lambda: wide.amin(0),
        Op.MAX: lambda: wide.amax(0),
    }[op]()
    return found.to(dtype)


def in_order(op: object, inputs: list[Tensor]) -> Tensor:
    """Reduce rank by rank; what is narrow is rounded once, at the end."""
    dtype = inputs[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    combine = torch.add if op == Op.SUM else torch.maximum
    return functools.reduce(combine, [tensor.to(wide) for tensor in inputs]).to(dtype)


def is_same(found: Tensor, expected: Tensor) -> bool:
    """Compare bit by bit."""
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def all_reduce(op: object) -> tuple[Call, Expected]:
    def call(group: Group, tensor: Tensor) -> list[Tensor]:
        dist.all_reduce(tensor, op, group)
        return [tensor]

    return call, lambda inputs, _: [combined(op, inputs)]


def reduce(op: object) -> tuple[Call, Expected]:
    def call(group: Group, tensor: Tensor) -> list[Tensor]:
        root = group.size() - 1
        dist.reduce(tensor, root, op, group)
        return [tensor] if group.rank() == root else []

    return call, lambda inputs, me: [combined(op, inputs)] if me == len(inputs) - 1 else []


def reduce_scatter(op: object) -> tuple[Call, Expected]:
    def call(group: Group, tensor: Tensor) -> list[Tensor]:
        out = spread_out(group, tensor.new_zeros(tensor.shape))
        dist.reduce_scatter(out, [spread_out(group, tensor) for _ in range(group.size())], op, group)
        return [out]

    return call, lambda inputs, _: [combined(op, inputs)]


def reduce_scatter_tensor(op: object) -> tuple[Call, Expected]:
    def call(group: Group, tensor: Tensor) -> list[Tensor]:
        out = tensor.new_zeros(tensor.shape)
        dist.reduce_scatter_tensor(out, tensor.repeat(group.size()), op, group)
        return [out]

    return call, lambda inputs, _: [combined(op, inputs)]


def reduce_scatter_in_place(group: Group, tensor: Tensor) -> list[Tensor]:
    whole = tensor.repeat(group.size(), 1)
    dist.reduce_scatter_tensor(whole[group.rank()], whole.view(-1), group=group)
    return [whole[group.rank()]]


def reduce_scatter_several(group: Group, tensor: Tensor) -> list[Tensor]:
    """Two tensors at once, of which one has a strided output, as tensor parallelism may have it."""
    outs = [tensor.new_zeros(tensor.shape), spread_out(group, tensor.new_zeros(tensor.numel() // 2))]
    whole = [tensor.repeat(group.size()), tensor[: tensor.numel() // 2].repeat(group.size())]
    with dist._coalescing_manager(group, async_ops=True) as works:  # noqa: SLF001 - what FSDP2 and DTensor use
        for out, one in zip(outs, whole, strict=True):
            dist.reduce_scatter_tensor(out, one, group=group)
    works.wait()
    return outs


def of_halves(inputs: list[Tensor], _: int) -> list[Tensor]:
    total = combined(Op.SUM, inputs)
    return [total, total[: total.numel() // 2]]


def all_reduce_coalesced(group: Group, tensor: Tensor) -> list[Tensor]:
    tensors = [tensor, tensor[: tensor.numel() // 2].clone()]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def broadcast(group: Group, tensor: Tensor) -> list[Tensor]:
    dist.broadcast(tensor, group.size() - 1, group)
    return [tensor]


def all_gather(group: Group, tensor: Tensor) -> list[Tensor]:
    parts = [spread_out(group, tensor.new_zeros(tensor.shape)) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group)
    return parts


def all_gather_into_tensor(group: Group, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(group.size() * tensor.numel())
    dist.all_gather_into_tensor(out, tensor, group)
    return [out]


def all_gather_in_place(group: Group, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(group.size(), tensor.numel())
    out[group.rank()] = tensor
    dist.all_gather_into_tensor(out.view(-1), out[group.rank()], group)
    return [out]


def all_gather_several(group: Group, tensor: Tensor) -> list[Tensor]:
    parts = [tensor, tensor[: tensor.numel() // 2]]
    outs = [part.new_zeros(group.size() * part.numel()) for part in parts]
    with dist._coalescing_manager(group, async_ops=True) as works:  # noqa: SLF001 - what FSDP2 and DTensor use
        for out, part in zip(outs, parts, strict=True):
            dist.all_gather_into_tensor(out, part, group=group)
    works.wait()
    return outs


def all_gather_uneven(group: Group, tensor: Tensor) -> list[Tensor]:
    """Gather k shares of a third from rank k, none from rank 0; gloo takes equal shapes only."""
    third = tensor.numel() // 3
    parts = [tensor.new_zeros(third * min(rank, 3)) for rank in range(group.size())]
    dist.all_gather(parts, tensor[: parts[group.rank()].numel()], group)
    return parts


def of_all_gather_uneven(inputs: list[Tensor], _: int) -> list[Tensor]:
    return [tensor[: tensor.numel() // 3 * min(rank, 3)] for rank, tensor in enumerate(inputs)]


def all_to_all_single(group: Group, tensor: Tensor) -> list[Tensor]:
    out = tensor.new_zeros(tensor.numel() * group.size())
    dist.all_to_all_single(out, tensor.repeat(group.size()), group=group)
    return [out]


def shares(size: int) -> list[int]:
    """Say how many rows go to each rank: k + 1 to rank k, none to rank 0."""
    return [0 if k == 0 else k + 1 for k in range(size)]


def all_to_all_uneven(group: Group, tensor: Tensor) -> list[Tensor]:
    sent = shares(group.size())
    received = [sent[group.rank()]] * group.size()
    rows = tensor[:3].repeat(sum(sent), 1)
    out = tensor.new_zeros(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows, received, sent, group)
    return [out]


def of_all_to_all_uneven(inputs: list[Tensor], me: int) -> list[Tensor]:
    return [torch.cat([tensor[:3].repeat(shares(len(inputs))[me], 1) for tensor in inputs])]


def gather(group: Group, tensor: Tensor) -> list[Tensor]:
    root = group.size() - 1
    parts = [torch.zeros_like(tensor) for _ in range(group.size())] if group.rank() == root else None
    dist.gather(tensor, parts, root, group)
    return parts or []


def scatter(group: Group, tensor: Tensor) -> list[Tensor]:
    out = spread_out(group, tensor.new_zeros(tensor.shape))
    parts = [tensor.roll(k) for k in range(group.size())]
    dist.scatter(out, parts if group.rank() == 0 else None, 0, group)
    return [out]


def send_recv(group: Group, tensor: Tensor) -> list[Tensor]:
    """Pass on to the right, with two tags that cross."""
    me, size = group.rank(), group.size()
    right, left = (me + 1) % size, (me - 1) % size
    first, second = tensor.new_zeros(tensor.shape), tensor.new_zeros(tensor.shape)
    works = [
        dist.isend(tensor, right, group, 1),
        dist.isend(tensor.roll(1), right, group, 2),
        dist.irecv(second, left, group, 2),
        dist.irecv(first, left, group, 1),
    ]
    for work in works:
        work.wait()
    return [first, second]


MOVING: tuple[tuple[Call, Expected], ...] = (
    (broadcast, lambda inputs, _: [inputs[-1]]),
    (all_gather, lambda inputs, _: inputs),
    (all_gather_into_tensor, lambda inputs, _: [torch.cat(inputs)]),
    (all_gather_in_place, lambda inputs, _: [torch.stack(inputs)]),
    (
        all_gather_several,
        lambda inputs, _: [
            torch.cat(inputs),
            torch.cat([tensor[: tensor.numel() // 2] for tensor in inputs]),
        ],
    ),
    (all_gather_uneven, of_all_gather_uneven),
    (all_to_all_single, lambda inputs, _: [torch.cat(inputs)]),
    (all_to_all_uneven, of_all_to_all_uneven),
    (gather, lambda inputs, me: inputs if me == len(inputs) - 1 else []),
    (scatter, lambda inputs, me: [inputs[0].roll(me)]),
    (send_recv, lambda inputs, me: [inputs[me - 1], inputs[me - 1].roll(1)]),
)


def cases() -> Iterator[tuple[str, Call, Expected, torch.dtype]]:
    """List what is compared."""
    for make, op in itertools.product(
        (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor), (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX)
    ):
        for dtype in REDUCED:
            yield f"{make.__name__} {op}", *make(op), dtype
    for make, dtype in itertools.product((all_reduce, reduce, reduce_scatter_tensor), FLOATS):
        yield f"{make.__name__} AVG", *make(Op.AVG), dtype
    for make, op, dtype in itertools.product((all_reduce, reduce), BITWISE, (*INTS, torch.bool)):
        yield f"{make.__name__} {op}", *make(op), dtype
    for dtype in MOVED:
        yield "all_reduce_coalesced", all_reduce_coalesced, of_halves, dtype
    for dtype in REDUCED:
        yield (
            "reduce_scatter_in_place",
            reduce_scatter_in_place,
            lambda inputs, _: [combined(Op.SUM, inputs)],
            dtype,
        )
        yield "reduce_scatter_several", reduce_scatter_several, of_halves, dtype
    for (call, expected), dtype in itertools.product(MOVING, MOVED):
        yield call.__name__, call, expected, dtype


def tolerance(dtype: torch.dtype, *, is_moved: bool) -> dict[str, float]:
    """Allow for another order of additions; ints and what is only moved are equal bit for bit."""
    if is_moved or not (dtype.is_floating_point or dtype.is_complex):
        return {"rtol": 0, "atol": 0}
    return {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}


def difference(found: list[Tensor], expected: list[Tensor], allowed: dict[str, float]) -> str | None:
    try:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, check_stride=False, **allowed)
    except (AssertionError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def of_gloo(call: Call, gloo: Group, given: Tensor) -> list[Tensor] | None:
    """Ask gloo; None for what it refuses (bool and 16-bit reductions, reduce_scatter, empty tensors)."""
    try:
        return call(gloo, given)
    except (RuntimeError, ValueError, TypeError):
        return None


def run(sizes: tuple[int, ...]) -> dict[str, object]:
    """Compare everything: how often, with what, and what differs."""
    gloo, world = dist.new_group(backend="gloo"), dist.group.WORLD
    me, count = dist.get_rank(), dist.get_world_size()
    seen = {"torch": 0, "gloo": 0, "faults": []}
    for (name, call, expected, dtype), size in itertools.product(cases(), sizes):
        inputs = [values(dtype, size, 100 * rank + size) for rank in range(count)]
        allowed = tolerance(dtype, is_moved=call.__name__ != "call" and "reduce" not in name)
        mine = strided(inputs[me]) if size % 2 else inputs[me].clone()
        try:
            found = call(world, mine)
        except (RuntimeError, ValueError, TypeError) as error:
            seen["faults"].append(f"{name} {dtype} {size}: {str(error).splitlines()[0]}")
            continue
        rivals = {"torch": expected(inputs, me), "gloo": of_gloo(call, gloo, inputs[me].clone())}
        for rival, said in rivals.items():
            if said is None:
                continue
            seen[rival] += 1
            fault = difference(found, said, allowed)
            if fault:
                seen["faults"].append(f"{name} {dtype} {size} is not {rival}'s: {fault}")
    return seen
