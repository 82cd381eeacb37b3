"""Accelerate on several ranks: one world of them all, or a refusal; itself, and a stand-in for it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ccl_requirements
from support.rank_launches import LIGHT, Ended, alone, execute
from support.recipe_ranks import WarmNode

pytestmark = pytest.mark.usefixtures("nothing_runs_afterwards")

STATE = """
import os
import torch.distributed

class PartialState:
    _shared_state = {}

    def __init__(self, cpu=False):
        torch.distributed.init_process_group()
        cpu = cpu or os.environ.get("TOLD") and os.environ["ACCELERATE_USE_CPU"] == "true"
        self._shared_state["num_processes"] = torch.distributed.get_world_size() if cpu else 1
"""
ALONE = """
import os
from pathlib import Path
from accelerate import Accelerator, PartialState
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import write_basic_config

here = Path(__file__).parent
PartialState()
if os.environ["RANK"] == "0":
    write_basic_config(mixed_precision="bf16", save_location=str(here / "basic.json"))
    of_two = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, "mixed_precision": "bf16"}
    two = ClusterConfig(compute_environment="LOCAL_MACHINE", debug=False, **of_two)
    two.to_yaml_file(str(here / "two.yaml"))
print(Accelerator().num_processes)
"""
PROGRAM = Path(__file__).parents[1] / "scripts" / "accelerate_program.py"
MISSING = ccl_requirements.missing()
SHOW = "import os\nprint(os.environ.get('ACCELERATE_USE_CPU'))\nimport torch.distributed as dist\n"


def two_ranks(script: Path, **env: str) -> Ended:
    argv = [sys.executable, "-m", "manycpu.pipeline.node", "--nproc-per-node=2", str(script)]
    return execute(argv, env, script.parent)


@pytest.fixture
def stand_in(tmp_path: Path) -> None:
    """Lay a module beside the script that the script takes for Accelerate."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "state.py").write_text(STATE)


@pytest.mark.usefixtures("stand_in")
def test_ranks_that_are_each_a_world_of_accelerate_are_no_success(write: Callable[[str], Path]) -> None:
    """It initialises torch.distributed for all ranks, and then has each train by itself."""
    ended = two_ranks(write("from accelerate.state import PartialState\nPartialState()"), **LIGHT)
    assert ended.code == 86, ended.out
    assert {event["observed"] for event in ended.events("backend")} == {"gloo"}
    message = ended.events("error")[0]["message"]
    assert "a world of 1, although 2 ranks met" in message
    assert "Accelerator(cpu=True)" in message


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("made", ["PartialState(cpu=True)", "PartialState", "dist.init_process_group()"])
def test_one_world_of_all_ranks_and_none_at_all_are_fine(made: str, write: Callable[[str], Path]) -> None:
    told = {"TOLD": "1"} if made == "PartialState" else {}
    call = made if made.endswith(")") else f"{made}()"
    script = f"from accelerate.state import PartialState\n{SHOW}{call}"
    ended = two_ranks(write(script), **LIGHT, **told)
    assert ended.code == 0, ended.out


def test_what_the_worker_has_set_does_not_split_the_world(write: Callable[[str], Path]) -> None:
    ended = two_ranks(write(SHOW + "dist.init_process_group()"), ACCELERATE_USE_CPU="false", **LIGHT)
    assert (ended.code, ended.texts()) == (0, ["true", "true"]), ended.out
    assert not ended.events("warning")


def test_what_the_run_sets_wins_with_a_warning(write: Callable[[str], Path]) -> None:
    named = {"MANYCPU_USER_ENV": "A,ACCELERATE_USE_CPU", "ACCELERATE_USE_CPU": "false"}
    ended = two_ranks(write(SHOW + "dist.init_process_group()"), **named, **LIGHT)
    assert (ended.code, ended.texts()) == (0, ["false", "false"]), ended.out
    (warning,) = ended.events("warning")
    assert "run.env sets ACCELERATE_USE_CPU to 'false'" in warning["message"]


def test_a_rank_alone_is_told_nothing(write: Callable[[str], Path]) -> None:
    """Accelerate would wrap its model for a world of several."""
    ended = alone(write(SHOW), **LIGHT)
    assert (ended.code, ended.texts()) == (0, ["None"]), ended.out


@pytest.fixture(scope="module")
def alone_each(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """Run ranks that are each a world of Accelerate itself; the first writes Accelerate's configs."""
    script = tmp_path_factory.mktemp("configs") / "train.py"
    script.write_text(ALONE)
    return two_ranks(script, MANYCPU_BACKEND="gloo"), script.parent


def test_accelerate_itself_makes_a_world_of_each_rank(alone_each: tuple[Ended, Path]) -> None:
    ended, _ = alone_each
    assert ended.code == 86, ended.out
    assert {text for text in ended.texts() if text.isdecimal()} == {"1"}


@pytest.mark.parametrize(
    ("config", "words", "backend"),
    [
        # A config in JSON is run in make test too: that of FSDP, below.
        pytest.param("basic.json", ["--nproc-per-node", "2"], "gloo", marks=pytest.mark.long),
        ("two.yaml", [], "gloo" if MISSING else "ccl"),
    ],
)
def test_a_config_that_accelerate_wrote_is_a_run_of_its_script(
    alone_each: tuple[Ended, Path],
    config: str,
    words: list[str],
    backend: str,
    tmp_path: Path,
) -> None:
    given = ["--accelerate-config", str(alone_each[1] / config), *words, "--backend", backend]
    own = [str(PROGRAM), str(tmp_path), "--backend", "its own", "-m"]
    command = [sys.executable, "-m", "manycpu.pipeline.cli", "run", *given, *own]
    ended = execute(command, {"MANYCPU_HOME": str(tmp_path / "home")}, tmp_path)
    assert ended.code == 0, ended.out
    assert ended.out.count("not needed here: main_training_function") == 1
    assert ended.out.count("said by one") == 1, ended.out
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    trained = ranks[0]["trained"]
    for rank, seen in enumerate(ranks):
        assert seen == {
            "distributed_type": "MULTI_CPU",
            "process_index": rank,
            "num_processes": 2,
            "mixed_precision": "bf16",
            "computed_in": "torch.bfloat16",
            "backend": backend,
            "trained": trained,
            "loaded": trained,
            "gathered": [trained, 0.0, trained, 1.0],
            "metrics": [0.0, 1.0, 2.0, 3.0, 4.0],
            "argv": ["--backend", "its own", "-m"],
        }


SHARDED = Path(__file__).parents[1] / "scripts" / "accelerate_sharded.py"
FSDP = {
    "distributed_type": "FSDP",
    "num_machines": 1,
    "num_processes": 2,
    "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}


def test_fsdp_of_accelerate_trains_shares_to_the_weights_of_one_process(tmp_path: Path) -> None:
    """On CPUs Accelerate itself would train replicas, without a word."""
    (tmp_path / "fsdp.json").write_text(json.dumps(FSDP))
    given = ["--accelerate-config", str(tmp_path / "fsdp.json"), str(SHARDED), str(tmp_path)]
    command = [sys.executable, "-m", "manycpu.pipeline.cli", "run", *given]
    ended = execute(command, {"MANYCPU_HOME": str(tmp_path / "home")}, tmp_path)
    assert ended.code == 0, ended.out
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    norms, whole = trained_alone()
    share = ranks[0]
    assert share["type"] == "FSDP"
    assert sum(rank["held"] for rank in ranks) == sum(len(values) for values in whole.values())
    assert share["norms"] == pytest.approx(norms, rel=1e-5)
    assert share["weights"].keys() == whole.keys()
    for parameter, values in whole.items():
        assert share["weights"][parameter] == pytest.approx(values, abs=1e-5)


def trained_alone() -> tuple[list[float], dict[str, list[float]]]:
    """Train as accelerate_sharded.py does, without ranks; norms of the gradients, and weights."""
    import torch

    torch.manual_seed(7)
    first, second, head = (torch.nn.Linear(8, width) for width in (8, 8, 1))
    data = torch.rand(16, 8).chunk(4)  # a batch of each of two ranks
    parameters = {
        f"{name}.{kind}": getattr(layer, kind)
        for name, layer in {"0.inner": first, "1.inner": second, "2": head}.items()
        for kind in ("weight", "bias")
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    norms = []

    def epoch() -> None:
        for rows in data:
            hidden = rows + first(rows).relu()
            hidden = hidden + second(hidden).relu()
            head(hidden).square().mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()

    epoch()
    epoch()
    norms += norms[4:]  # the last epoch repeats the second
    return norms, {name: value.flatten().tolist() for name, value in parameters.items()}


@pytest.mark.parametrize("settings", [{"FSDP_VERSION": "1"}, {}])
def test_fsdp_of_version_1_is_no_training_of_replicas(
    warm: WarmNode, settings: dict[str, str], write: Callable[[str], Path]
) -> None:
    script = write("import accelerate\naccelerate.Accelerator()")
    ended = warm.run(2, {"ACCELERATE_USE_FSDP": "true", **settings}, str(script))
    assert ended.returncode == 1
    assert "FSDP of version 1 does not train on CPUs" in ended.stdout


EVALUATE_FIRST = """
import json, os, sys
from pathlib import Path
import torch
from transformers import Trainer, TrainingArguments

class Squared(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).square().mean()}

os.chdir(sys.argv[3])
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
values = torch.rand(64, 5, generator=generator)
rows = [{"x": row[:4], "labels": row[4:]} for row in values]
options = TrainingArguments("out", max_steps=6, report_to=[], save_strategy="no", bf16=sys.argv[1] == "bf16",
                            per_device_train_batch_size=2, logging_steps=3, disable_tqdm=True, use_cpu=True)
model = Squared(4, 1)
trainer = Trainer(model, options, train_dataset=rows, eval_dataset=rows)
if sys.argv[2] == "evaluate":
    trainer.evaluate()
trainer.train()
weights = torch.cat([value.flatten() for value in model.parameters()]).tolist()
Path(f"{sys.argv[2]}-{os.environ['RANK']}.json").write_text(json.dumps(weights))
"""


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.long)])
def test_an_evaluation_before_the_training_changes_no_weight_of_any_rank(
    warm: WarmNode, dtype: str, write: Callable[[str], Path]
) -> None:
    """Accelerate would take the evaluated model for one that is wrapped, and each rank would train alone."""
    script = write(EVALUATE_FIRST)
    weights = []
    for first in ("train", "evaluate"):
        ended = warm.run(2, {"MANYCPU_BACKEND": "gloo"}, str(script), dtype, first, str(script.parent))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "exchanged nothing" not in ended.stdout
        files = [script.parent / f"{first}-{rank}.json" for rank in range(2)]
        weights += [json.loads(file.read_text()) for file in files]
    assert weights == [weights[0]] * 4
