"""Whole lines out of blocks of bytes."""

import json

import pytest

from manycpu.pipeline.node.lines import HiddenSecrets, Lines, pieces
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.event_types import decode


def all_of(*blocks: bytes) -> list[bytes]:
    lines = Lines(b"::manycpu-a1:: ")
    return [line for block in blocks for line in lines.feed(block)] + lines.rest()


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([b"one\ntw", b"o\n"], [b"one", b"two"]),
        ([b"one\r\ntwo\r", b"\n"], [b"one", b"two"]),  # a line's end in two blocks
        ([b" 10%\r 50%\r", b"100%\ndone\n"], [b"100%", b"done"]),
        ([b" 10%\r 50%\r"], [b" 50%"]),  # the process died in the middle
        ([b"\n\n"], [b"", b""]),
        ([b"no end"], [b"no end"]),
        ([b" 10%::manycpu-a1:: {}\n"], [b" 10%", b"::manycpu:: {}"]),
        ([b'10%::manycpu:: {"event": "own"}\n'], [b"10%", b'::manycpu:: {"event": "own"}']),
        ([b'::manycpu:: {"event": "exit"}\n'], [b'::manycpu: : {"event": "exit"}']),  # printed by a program
        ([b"::manycpu:::manycpu:: {}"], [b"::manycpu:::manycpu: : {}"]),
        ([b"\xff\xfe\n"], [b"\xff\xfe"]),
    ],
)
def test_lines(blocks: list[bytes], expected: list[bytes]) -> None:
    assert all_of(*blocks) == expected
    # The same byte by byte: where a block ends is chance.
    assert all_of(*(bytes([byte]) for block in blocks for byte in block)) == expected


def test_a_bar_is_shown_without_its_end_and_not_twice() -> None:
    lines = Lines(b"::manycpu-a1:: ")
    assert lines.bar() == b""
    assert lines.feed(b" 10%\r 20%") == []
    assert lines.bar() == b" 20%"
    assert lines.feed(b"\r 30%\n") == [b" 30%"]


def test_memory_is_bounded() -> None:
    lines = Lines(b"::manycpu-a1:: ")
    got = [line for _ in range(20) for line in lines.feed(b"x" * 100_000)] + lines.rest()
    assert sum(map(len, got)) == 2_000_000
    assert max(map(len, got)) < 1_200_000


def test_long_lines_are_cut_between_characters() -> None:
    text = "€" * 3000
    cut = list(pieces(b"[rank 0 a] ", text.encode()))
    assert all(len(piece) <= events.LINE_LIMIT for piece in cut)
    assert "".join(events.split(piece.decode()).text for piece in cut) == text


def test_an_event_is_never_cut() -> None:
    line = events.encode("own", values="x" * 4000)
    (piece,) = pieces(b"[rank 0 a] ", line.encode())
    event = decode(events.split(piece.decode()).text)
    assert event is not None
    assert event.model_dump(exclude_unset=True) == {"event": "own", "values": "x" * 4000}


def test_an_empty_line_stays_one() -> None:
    assert list(pieces(b"[rank 0 a] ", b"")) == [b"[rank 0 a] \n"]


SECRET = HiddenSecrets({"MANYCPU_USER_ENV": "KEY", "KEY": "begin of it\nhunter2\nx"}, [])


def test_each_line_of_a_secret_is_hidden() -> None:
    shown = [SECRET.hide(line) for line in (b"begin of it", b"the key is hunter2", b"x = 1")]
    assert shown == [b"***", b"the key is ***", b"x = 1"]


@pytest.mark.parametrize("message", ["\u00e4" * 1000, "no \udcff"])
def test_a_secret_is_hidden_in_a_message_that_cannot_be_written_again(message: str) -> None:
    printed = json.dumps({"event": "warning", "message": f"{message} hunter2"}, ensure_ascii=False)
    line = f"{events.PREFIX}{printed}".encode(errors="surrogateescape")
    assert SECRET.hide(line) == line.replace(b"hunter2", b"***")


def test_what_an_event_returns_is_not_changed() -> None:
    line = events.encode("returned", part=1, parts=1, text="hunter2").encode()
    assert SECRET.hide(line) == line
