"""The warning about a script that forks while its threads run."""

import ctypes
import multiprocessing
import threading
from multiprocessing.context import ForkProcess

import pytest

from manycpu.pipeline.node import script

PR_SET_NAME = 15


@pytest.mark.parametrize("name", [None, b"Thread-1"])
def test_a_thread_of_python_counts_whatever_its_name_in_the_system(
    name: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        if name is not None:  # as Python 3.14 does
            ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        runs.set()
        stop.wait()

    monkeypatch.setattr(ForkProcess, "_Popen", staticmethod(lambda _: None))  # nothing is forked
    script.warn_of_forks()
    runs, stop = threading.Event(), threading.Event()
    process = multiprocessing.get_context("fork").Process(name="late")
    ForkProcess._Popen(process)  # noqa: SLF001
    assert capsys.readouterr().out == ""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        runs.wait()
        ForkProcess._Popen(process)  # noqa: SLF001
    finally:
        stop.set()
        thread.join()
    assert "the script forks late while 1 thread(s) that it started run" in capsys.readouterr().out
