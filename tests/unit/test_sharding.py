"""Checkpoints of sharded training, of a model that is whole: one process needs no process group."""

import copy
import os
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule

from manycpu.pipeline.node import sharding

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _model_and_optimizer() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    model = torch.nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": model.parameters(), "lr": 0.5}, {"params": []}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def test_an_optimizer_with_groups_of_no_parameters_is_read_back(tmp_path: Path) -> None:
    model, optimizer = _model_and_optimizer()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sharding.save(tmp_path, model, optimizer, step=1)
    other, read = _model_and_optimizer()
    assert sharding.load(tmp_path, other, read) == {"step": 1}
    assert torch.equal(other.weight, model.weight)
    assert [group["lr"] for group in read.param_groups] == [0.1, 0.5, 0.1]
    assert torch.equal(read.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_checkpoint_stays_until_the_one_that_replaces_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    model, optimizer = _model_and_optimizer()
    sharding.save(folder, model, optimizer, step=1)
    with pytest.raises(TypeError):
        sharding.save(folder, model, optimizer, step=torch.ones(1))
    (tmp_path / ".last.new").mkdir()  # of a save that was killed
    assert sharding.fault(folder) is None
    assert sharding.load(folder, model, optimizer) == {"step": 1}
    sharding.save(folder, model, optimizer, step=2)
    assert sharding.load(folder, model, optimizer) == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_new_checkpoint_is_read_that_has_not_taken_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    model, optimizer = _model_and_optimizer()
    sharding.save(folder, model, optimizer, step=1)
    folder.rename(tmp_path / ".last.new")
    assert sharding.fault(folder) is None
    assert sharding.load(folder, model, optimizer) == {"step": 1}


def _killed_while_saving(folder: Path, step: int, change: int) -> bool:
    """Save in a process of its own, which is killed before one of its changes of the file system."""
    pid = os.fork()
    if pid == 0:
        left = change

        def see(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if writes or event in {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        model, optimizer = _model_and_optimizer()
        sys.addaudithook(see)
        try:
            sharding.save(folder, model, optimizer, step=step)
        except BaseException:  # noqa: BLE001 - this process must not become another pytest
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in {0, -signal.SIGKILL}
    return bool(status)


def test_whichever_change_it_is_killed_at_the_last_checkpoint_is_there(tmp_path: Path) -> None:
    folder, step = tmp_path / "last", 1
    model, optimizer = _model_and_optimizer()
    sharding.save(folder, model, optimizer, step=step)
    # Each save begins with what two killed ones before it left.
    for change in count(1):
        for killed_at in (change, 3):
            was_killed = _killed_while_saving(folder, step + 1, killed_at)
            assert sharding.fault(folder) is None, f"killed at change {change}, then at {killed_at}"
            found = sharding.load(folder, model, optimizer)["step"]
            assert found in {step, step + 1}
            step = found
            if not was_killed:
                assert change > 5
                assert [path.name for path in tmp_path.iterdir()] == ["last"]
                return


class _Head(nn.Module):
    """Embeddings, blocks, a head, and a layer that no batch uses."""

    def __init__(self, *, blocks: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.head = nn.Linear(4, 8, bias=False)
        self.unused = nn.Linear(4, 4)
        if tied:
            self.head.weight = self.embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embeddings(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden).square().sum()  # type: ignore[no-any-return]


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None]).backward()
    optimizer.step()
    return optimizer


def test_a_parameter_that_no_batch_used_is_read_back_with_the_state_of_a_new_one(tmp_path: Path) -> None:
    model = _Head()
    sharding.save(tmp_path / "c", model, _stepped(model), step=1)
    again = _Head()
    optimizer = torch.optim.AdamW(again.parameters())
    assert sharding.load(tmp_path / "c", again, optimizer) == {"step": 1}
    assert torch.equal(again.unused.weight, model.unused.weight)
    assert [float(optimizer.state[each.weight]["step"]) for each in (again.head, again.unused)] == [1.0, 0.0]
    assert not optimizer.state[again.unused.weight]["exp_avg"].any()


@pytest.mark.parametrize("other", [{"blocks": 2}, {"tied": False}])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    written, model = _Head(**{"tied": True} | other), _Head(tied=True)
    sharding.save(tmp_path / "c", written, _stepped(written))
    with pytest.raises(RuntimeError, match=r"it is of another model or optimizer: it has (model|optimizer)"):
        sharding.load(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))


class _Counting(nn.Linear):
    """Counts its batches, in a state that is no tensor."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_the_extra_state_of_a_module_is_read_back(tmp_path: Path) -> None:
    model, again = _Counting(3, 2), _Counting(3, 2)
    model.seen = 7
    sharding.save(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    sharding.load(tmp_path / "c", again, torch.optim.AdamW(again.parameters()))
    assert again.seen == 7


class _Noting(nn.Linear):
    """Has notes, in a state whose form changes in the training."""

    notes: Any = None

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


@pytest.mark.parametrize(
    ("fresh", "notes"),
    [({}, {"a": {"b": [2]}}), ({"a": 0}, {"a": 1, "b": 2}), (None, {"t": torch.ones(2)}), ({"a": 0}, 3)],
    ids=["from nothing", "more keys", "tensor", "no dictionary"],
)
def test_extra_state_that_changed_its_form_in_the_training_is_read_back(
    fresh: Any, notes: Any, tmp_path: Path
) -> None:
    model, again, weights = (_Noting(3, 2) for _ in range(3))
    model.notes, again.notes, weights.notes = notes, fresh, copy.copy(fresh)
    sharding.save(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    sharding.load(tmp_path / "c", again, torch.optim.AdamW(again.parameters()))
    sharding.load_weights(tmp_path / "c", weights)
    assert str(again.notes) == str(weights.notes) == str(notes)


def test_an_export_has_all_tensors_of_a_model_and_names_what_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _Counting(3, 2)
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16):
        model.register_buffer(str(dtype).removeprefix("torch."), torch.arange(4).to(dtype))
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    sharding.export(model, tmp_path)
    exported, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    del state["_extra_state"], state["wide"]
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)
    assert "wide (and 1 more): no tensor" in capsys.readouterr().out


def test_parameters_that_no_export_could_hold_are_refused_before_the_training() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"parameter 0\.weight is torch\.complex128"):
        sharding.shard(model, blocks=[nn.Linear])


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_blocks_may_have_blocks_inside_and_share_weights_with_one_another() -> None:
    whole = nn.Sequential(_Head(blocks=2, tied=True))
    shares = sharding.shard(copy.deepcopy(whole), blocks=[_Head, nn.Linear, nn.Embedding])
    tokens = torch.arange(8)[None]
    loss = shares(tokens)
    loss.backward()
    assert torch.equal(loss, whole(tokens))
    model: Any = next(shares.children())
    assert all(isinstance(block, FSDPModule) for block in (model, *model.blocks))
    assert not any(isinstance(tied, FSDPModule) for tied in (model.embeddings, model.head))
