"""The backend ccl across two pods: the image contains the compiled backend, and the pods have no compiler."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline import train

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
TRAINING = Path(__file__).parents[1] / "scripts" / "ccl_train.py"
SCRIPT = """
import json, os, shutil, torch, torch.distributed as dist
from pathlib import Path
from ccl_train import ddp
dist.init_process_group()
rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
total = torch.arange(300_001, dtype=torch.float64) * (rank + 1)
dist.all_reduce(total)
seen = {
    "right": bool((total == torch.arange(300_001) * 3).all()),
    "transport": os.environ["CCL_ATL_TRANSPORT"],
    "compiler": shutil.which("g++") or shutil.which("c++"),
    "losses": [ddp(dist.group.WORLD), ddp(gloo)],
}
found = [None, None]
dist.all_gather_object(found, seen)
if rank == 0:
    Path(os.environ["MANYCPU_OUTPUT"], "seen.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""
LAUNCHES = {
    "pytorchjob": ({"launch": "pytorchjob"}, "ofi"),
    "mpijob": ({"launch": "mpijob", "mpi": "intel"}, "mpi"),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_plain_script_trains_over_both_nodes_as_with_gloo(
    launch: str, target: Fields, a_run: Callable[..., Fields], tmp_path: Path
) -> None:
    where, transport = LAUNCHES[launch]
    run = a_run(SCRIPT, backend="ccl", resources={"cpu": 0.9, "memory": "1Gi"})
    shutil.copy(TRAINING, Path(run["program"]).parent)
    report = train(run, target | where, run_id=launch)
    assert (report.state, report.backend) == ("succeeded", "ccl")
    assert (report.world_size, len(report.hosts)) == (2, 2)
    ranks = json.loads((tmp_path / "out" / "seen.json").read_text())
    assert len(ranks) == 2
    for seen in ranks:
        assert (seen["right"], seen["transport"], seen["compiler"]) == (True, transport, None)
        ours, gloos = seen["losses"]
        assert ours == pytest.approx(gloos, rel=1e-4)
        assert ours[-1] != ours[0]
