"""What a program prints decides nothing, whatever it looks like: under every launcher that runs here."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.nasty_lines import FORGED
from support.rank_launches import LAUNCHERS, LIGHT, Ended, alone, launch

from manycpu.pipeline.observed import observe

pytestmark = pytest.mark.usefixtures("nothing_runs_afterwards")

PRINTS = """
    import os, subprocess, sys, torch.distributed as dist
    from pathlib import Path
    forged = Path("forged")
    dist.init_process_group()
    print(forged.read_text())
    sys.stderr.write(forged.read_text())
    os.write(1, forged.read_bytes().replace(b"::many", b"::m\\xffany"))
    shell = "cat forged; cat forged >&2; printf 'no end\\r'; tail -n 1 forged"
    subprocess.run(["sh", "-c", shell], check=True)
    sys.stdout.write("no end " + forged.read_text().splitlines()[0])
    sys.stdout.flush()
    os.write(2, b"\\r" + forged.read_bytes().splitlines()[8])
"""
HONEST = {"proof": 2, "backend": 2, "exit": 2}


def kinds(ended: Ended) -> Counter[str]:
    names = ("proof", "backend", "exit", "pace", "returned", "result", "pickled", "error", "own")
    return Counter({name: count for name in names if (count := len(ended.events(name)))})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_printed_event_is_believed_of_no_program(launcher: str, write: Callable[[str], Path]) -> None:
    script = write(PRINTS)
    (script.parent / "forged").write_bytes("\n".join([*FORGED, ""]).encode())
    ended = launch(launcher, script, light=True)
    assert ended.code == 0, ended.out
    assert kinds(ended) == HONEST
    assert not any("forged" in event["message"] for event in ended.events("start"))
    observed = observe(ended.out.split("\n"))
    assert (observed.world_size, observed.backend, len(observed.rounds)) == (2, "gloo", 1)
    assert [(rank.rank, rank.exit_code) for rank in observed.ranks] == [(0, 0), (1, 0)]
    assert (observed.failure, observed.has_returned) == (None, False)
    assert "forged" in ended.out, "people still see what was printed"


def test_a_bar_that_never_ends_its_line_is_no_event(write: Callable[[str], Path]) -> None:
    """The last state of a bar is shown while it moves, also of one that looks like an event."""
    end = json.dumps(FORGED[8])
    script = f"""
        import sys, time
        sys.stderr.write("\\r" + {end} + "\\r" + {end})
        sys.stderr.flush()
        time.sleep(1)
    """
    ended = alone(write(script), MANYCPU_STALL_TIMEOUT="0.5", **LIGHT)
    assert [event["code"] for event in ended.events("exit")] == [0]
    assert any("manycpu: : " in text for text in ended.texts()), "it was shown"


def test_programs_report_progress_metrics_and_events_of_their_own_also_from_programs_they_start(
    write: Callable[[str], Path],
) -> None:
    script = """
        import subprocess, sys
        from manycpu.pipeline.node.metrics import metrics
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "child"], check=True)
            print('half a line ::manycpu:: {"event": "own", "a": 1}')
        metrics({"f1": float(len(sys.argv)), "bad": float("nan")})
    """
    ended = alone(write(script), MANYCPU_RUN="a", **LIGHT)
    assert ended.code == 0, ended.out
    assert [event["values"]["f1"] for event in ended.events("metrics")] == [2.0, 1.0]
    assert [event["a"] for event in ended.events("own")] == [1]
    assert len(ended.events("warning")) == 2
    assert "half a line " in ended.texts()
