"""What is said of programs that start processes themselves, by their source alone."""

import textwrap

import pytest

from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.verbs.source_checks import process_findings

HEAD = "import torch\nimport torch.multiprocessing as mp\n"
GUARD = 'if __name__ == "__main__":\n    '


def found(source: str, subprocesses: int = 4, threads: int | None = 2) -> list[Finding]:
    return list(process_findings(textwrap.dedent(source), "train.py", subprocesses, threads))


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("mp.spawn(work, nprocs=4)", 3),
        ("def main():\n    mp.spawn(work, nprocs=4)\nmain()", 5),
        ("def start():\n    mp.spawn(work)\ndef main():\n    start()\nfor _ in range(3):\n    main()", 8),
        ("mp.set_start_method('spawn')\nmp.Process(target=work).start()", 4),
        ("ctx = mp.get_context('forkserver')\nwith ctx.Pool(4) as pool:\n    pool.map(work, [])", 4),
        ("mp.get_context(method='spawn').Process(target=work).start()", 3),
        ("from torch.multiprocessing import spawn as go\ngo(work)", 4),
        ("torch.multiprocessing.spawn(work)", 3),
        ("mp.start_processes(work, nprocs=2, start_method='spawn')", 3),
        ("class Own(mp.Process): pass\nmp.set_start_method('spawn')\nOwn().start()", 5),
        ("from multiprocessing import Process, set_start_method\nset_start_method('spawn')\nProcess()", 5),
    ],
)
def test_processes_that_would_start_processes_without_end_are_found(body: str, line: int) -> None:
    (finding,) = found(HEAD + body)
    assert finding.message.startswith(f"train.py:{line}: processes are started at module level")
    assert "__main__" in finding.fix
    assert not finding.fatal


@pytest.mark.parametrize(
    "body",
    [
        f"{GUARD}mp.spawn(work, nprocs=4)",
        f"def main():\n    mp.spawn(work, nprocs=4)\n{GUARD}main()",
        "def main():\n    mp.spawn(work, nprocs=4)",
        # fork, which is what Linux does by itself, imports nothing again
        "mp.Process(target=work).start()",
        "mp.set_start_method('fork')\nmp.Process(target=work).start()",
        # chosen at run time, or several: unknown from here
        "mp.set_start_method(args.method)\nmp.Process(target=work).start()",
        "a, b = mp.get_context('fork'), mp.get_context('spawn')\nmp.Process(target=work).start()",
        "import other\nother.Process().start()",
        "def main(): main()\nmain()",
        "x = (",
        "\0",
    ],
)
def test_what_is_right_or_cannot_be_known_is_let_be(body: str) -> None:
    assert found(HEAD + body) == []


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("ctx = mp.get_context('fork')\nloss.backward()\nctx.Process(target=work).start()", (5, 4)),
        (
            (
                "import threading\nmp.set_start_method('fork')\ndef main():\n"
                "    threading.Thread(target=work).start()\n    mp.Process(target=work).start()"
            ),
            (7, 6),
        ),
        (
            (
                "import torch.distributed as dist\nmp.set_start_method('fork')\n"
                f"{GUARD}dist.init_process_group()\n    mp.Process(target=work).start()"
            ),
            (7, 6),
        ),
    ],
)
def test_forks_below_what_starts_threads_are_found(body: str, lines: tuple[int, int]) -> None:
    (finding,) = found(HEAD + body)
    start, threads = lines
    assert finding.message.startswith(f"train.py:{start}: processes are forked after threads were started")
    assert f"(line {threads}:" in finding.message


@pytest.mark.parametrize(
    "body",
    [
        "ctx = mp.get_context('fork')\nctx.Process(target=work).start()\nloss.backward()",
        "ctx = mp.get_context('spawn')\ndef main():\n    loss.backward()\n    ctx.Process()",
        # the method is not given; what a worker does is after the fork
        "loss.backward()\nmp.Process(target=work).start()",
        "ctx = mp.get_context('fork')\ndef work():\n    loss.backward()\nctx.Process(target=work).start()",
    ],
)
def test_forks_that_nothing_precedes_are_let_be(body: str) -> None:
    assert found(HEAD + body) == []


@pytest.mark.parametrize(
    "sets", ["torch.set_num_threads(16)", "import os; os.environ['OMP_NUM_THREADS'] = '16'"]
)
def test_more_threads_than_the_plans_are_found(sets: str) -> None:
    (finding,) = found(f"import torch\n{sets}")
    assert finding.message.startswith("train.py:2: ")
    assert "wins over the CPU plan's 2" in finding.message
    assert found(f"import torch\n{sets}", threads=16) == []
    assert found(f"import torch\n{sets}", threads=None) == []


def test_processes_that_the_plan_does_not_know_of_are_found() -> None:
    source = f"{HEAD}{GUARD}mp.spawn(work, nprocs=4)"
    (finding,) = found(source, subprocesses=1, threads=8)
    assert finding.message == (
        "train.py:4: processes are started, and run.subprocesses is 1: each takes the 8 threads of its rank"
    )
    assert "run.subprocesses" in finding.fix
    # one thread is no more than what each should have; who sets threads has thought of it
    assert found(source, subprocesses=1, threads=1) == []
    assert found(f"{HEAD}torch.set_num_threads(1)\n{GUARD}mp.spawn(work)", subprocesses=1, threads=8) == []
    # processes of a program without torch compute nothing that the plan has threads for
    assert found("import multiprocessing as mp\nmp.Pool(4)", subprocesses=1, threads=8) == []
