"""Run cases of ccl_cases and its siblings in worlds of ranks: ``ccl_worlds.py FOLDER CASE+CASE:SIZE ...``.

torch is imported once, and each rank is a fork of that process: a world takes a second instead of ten. Cases
that leave the group usable share one.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import ccl_cases
import ccl_gloo_cases
import ccl_memory_cases
import ccl_training_cases
import torch

from manycpu.pipeline.node.ccl import register

CASES = vars(ccl_cases) | vars(ccl_gloo_cases) | vars(ccl_memory_cases) | vars(ccl_training_cases)
AT_THE_END = ("again", "alone", "hasty", "raise_at_the_end", "several_at_once")
"""Cases of how a script ends, beside all with dead, exit and shutdown in their names."""
WITH_DYNAMO = (
    "hybrid",
    "profiled",
    "sharded",
    "sparse",
    "tensor_and_data_parallel",
    "tensor_parallel",
    "trains",
)
"""Cases that import torch._dynamo, as every optimizer of torch does: that takes longer than the case."""
LIMIT = 240.0  # seconds that a world may take; what still runs then, hangs


def environment(rank: int, size: int, port: int, folder: Path) -> dict[str, str]:
    names = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    fixed = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "MANYCPU_HOST": "here"}
    return fixed | {name: str(value) for name, value in names.items()} | {"MEET_AGAIN": str(folder / "store")}


def rank_of(cases: list[str], rank: int, size: int, port: int, folder: Path) -> None:
    """Become a rank: writes what each case returns, and ends as a script would."""
    os.environ.update(environment(rank, size, port, folder))
    torch.set_num_threads(1)
    code: object = 0
    try:
        for case in cases:
            result = CASES[case]()
            (folder / f"{case}-{rank}.json").write_text(json.dumps(result))
        if len(cases) > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - shown, and seen in the exit code
        traceback.print_exc()
        code = 1
    if any(
        case in AT_THE_END or any(word in case for word in ("dead", "exits", "shutdown")) for case in cases
    ):
        sys.exit(code)  # type: ignore[arg-type]
    # What Python does beyond this takes a third of a second, with torch in the process.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def world(cases: list[str], size: int, folder: Path) -> dict[str, dict[str, object]]:
    """Have a world's ranks go through some cases; returns what is known of each."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {}
    for rank in range(size):
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            rank_of(cases, rank, size, port, folder)
        ranks[process] = rank
    codes = ended(dict(ranks))
    left = [path.name for process in ranks for path in Path("/dev/shm").glob(f"{process}:*")]  # noqa: S108
    known = {"codes": [codes[rank] for rank in range(size)], "left": left}
    written = {case: {rank: folder / f"{case}-{rank}.json" for rank in range(size)} for case in cases}
    return {
        case: known
        | {"results": {rank: json.loads(path.read_text()) for rank, path in of.items() if path.exists()}}
        for case, of in written.items()
    }


def ended(ranks: dict[int, int]) -> dict[int, object]:
    """Wait for the ranks, and end those that hang, with what they have started."""
    codes: dict[int, object] = {}
    deadline = time.monotonic() + LIMIT
    waiting = dict(ranks)
    while waiting:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in waiting:
            codes[waiting.pop(process)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for late, rank in waiting.items():
                codes[rank] = "hung"
                os.kill(late, signal.SIGKILL)
            break
        else:
            time.sleep(0.01)
    for process in ranks:
        try:
            os.killpg(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return codes


def main(folder: Path, wanted: list[str]) -> None:
    register()
    gc.collect()
    gc.freeze()  # the ranks then leave alone what they share
    for name in wanted:
        joined, _, size = name.partition(":")
        cases = joined.split("+")
        if any(case in WITH_DYNAMO for case in cases):
            importlib.import_module("torch._dynamo")
        begun = time.monotonic()
        found = world(cases, int(size), folder / f"{cases[0]}-{size}")
        for case, seen in found.items():
            (folder / f"{case}-{size}.result").write_text(json.dumps(seen))
        sys.stdout.write(f"{name} {time.monotonic() - begun:.1f} s {found[cases[0]]['codes']}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
