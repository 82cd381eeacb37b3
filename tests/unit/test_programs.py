"""A test that fails ends what it has started."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.killable_programs import Program, end_programs

TESTS = Path(__file__).parents[1]
SPAWNS = "import subprocess, time; subprocess.Popen(['sleep', '600']); print(flush=True); time.sleep(600)"
HEARS = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_a_program_ends_with_its_block_however_that_ends() -> None:
    with Program([sys.executable, "-c", SPAWNS], stdout=subprocess.PIPE) as program:
        program.stdout.readline()  # type: ignore[union-attr]
        children = psutil.Process(program.pid).children()
    assert program.returncode == -signal.SIGKILL
    assert children
    psutil.wait_procs(children, 10)
    assert not any(child.is_running() for child in children)


def test_a_program_ends_with_its_test() -> None:
    with end_programs():
        program: Program[bytes] = Program(["sleep", "600"])
    assert program.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("first", "hears"), [("take_signals()", "True"), ("pass", "False")])
def test_programs_hear_ctrl_c_also_where_the_tests_are_a_background_job(first: str, hears: str) -> None:
    outer = "import subprocess, sys; from support import killable_programs as programs; "
    outer += first.replace("take", "programs.take")
    outer += "; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    deaf = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    done = subprocess.run(
        [*deaf, sys.executable, "-c", outer, HEARS], check=True, capture_output=True, text=True, cwd=TESTS
    )
    assert done.stdout.split() == [hears]


def test_no_test_waits_in_the_block_of_a_process() -> None:
    files = [path for path in TESTS.rglob("*.py") if "cluster" not in path.parts]
    assert [
        path.name for path in files if re.search(r"with[^:\n]*subprocess\.Popen\(", path.read_text())
    ] == []
