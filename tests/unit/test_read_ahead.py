"""Parts of files that are read ahead of their use."""

from functools import partial
from threading import Event

import pytest

from manycpu.pipeline.adapters.read_ahead import in_order


def refuse() -> bytes:
    raise OSError("refused")


def test_results_come_in_order_whichever_is_read_first() -> None:
    second_is_read = Event()

    def first() -> bytes:
        assert second_is_read.wait(60)
        return b"1"

    def second() -> bytes:
        second_is_read.set()
        return b"2"

    assert list(in_order([first, second])) == [b"1", b"2"]


def test_an_error_does_not_wait_for_a_server_that_is_silent() -> None:
    silent = Event()

    def wait() -> bytes:
        silent.wait()
        return b""

    with pytest.raises(OSError, match="refused"):
        list(in_order([refuse, wait]))
    silent.set()


def test_after_an_error_no_further_part_is_begun() -> None:
    begun = list[int]()

    def note(number: int) -> bytes:
        begun.append(number)
        return refuse()

    with pytest.raises(OSError, match="refused"):
        list(in_order(partial(note, number) for number in range(100)))
    assert len(begun) < 100
