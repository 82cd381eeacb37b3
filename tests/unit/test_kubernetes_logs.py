"""Logs of containers: read on after any break, each line once, none lost."""

import json
import random

import pytest

from manycpu.pipeline.spec.events import RankLine, encode, split
from manycpu.pipeline.targets.kubernetes.following.logs import (
    LogCursor,
    RateLimiter,
    parse,
    with_container_name,
)

S = 1_000_000_000


def read(position: LogCursor, log: list[int], *, until: int | None = None) -> list[int]:
    """Read a log as the API gives it: lines from a whole second on, in the file's order."""
    since = (position.since or 0) * S
    position.reopen()
    given = [time for time in log if time >= since]
    return [time for time in given[:until] if position.take(time)]


def again(position: LogCursor) -> LogCursor:
    """Hand a position over to another process."""
    return LogCursor(json.loads(json.dumps(position.state)))


def test_the_time_of_a_line_is_read_to_the_nanosecond() -> None:
    line = parse(b"2026-01-02T03:04:05.000000007Z loss 0.5")
    assert line is not None
    assert (line.time % S, line.text) == (7, "loss 0.5")
    east = parse(b"2026-01-02T05:04:05.000000007+02:00 loss 0.5")
    assert east == line
    assert parse(b"2026-01-02T03:04:05.000000007Z ") == line._replace(text="")


def test_what_no_rank_said_names_its_container_and_an_event_stays_one() -> None:
    assert (
        with_container_name(split("exec format error"), "pod/train").text == "[pod/train] exec format error"
    )
    for line in (split("[rank 1 a] loss 0.5"), split(encode("start", message="waits for torch"))):
        assert with_container_name(line, "pod/train") == line


@pytest.mark.parametrize("text", [b"", b"unable to retrieve container logs for containerd://1", b"12 x"])
def test_words_of_the_kubelet_are_no_lines(text: bytes) -> None:
    assert parse(text) is None


def test_lines_with_equal_times_are_told_once_each() -> None:
    log = [5 * S, 5 * S, 5 * S, 5 * S + 1]
    position = LogCursor()
    assert read(position, log, until=2) == log[:2]
    assert read(again(position), log) == log[2:]


def test_lines_whose_times_are_out_of_order_are_not_lost() -> None:
    log = [5 * S + 9, 5 * S + 3, 6 * S, 5 * S + 8, 6 * S + 1]
    for broken in range(len(log) + 1):
        position = LogCursor()
        first = read(position, log, until=broken)
        assert first + read(again(position), log) == log


def test_any_log_is_told_once_whatever_breaks() -> None:
    chance = random.Random(7)  # noqa: S311 - the same cases each time
    for _ in range(300):
        now = 100 * S
        log: list[int] = []
        for _ in range(chance.randrange(60)):
            now += chance.choice([0, 1, 1000, S // 3, 2 * S])
            log.append(now - chance.choice([0, 0, 0, 500]))
        position = LogCursor()
        told: list[int] = []
        while len(told) < len(log):
            told += read(position, log, until=chance.randrange(1, 80))
            position = again(position) if chance.random() < 0.5 else position
        assert told == log
        assert read(position, log) == []


def test_after_a_new_file_was_begun_times_decide() -> None:
    position = LogCursor()
    assert len(read(position, [5 * S, 5 * S + 1, 5 * S + 2])) == 3
    rotated = [5 * S + 2, 5 * S + 2, 5 * S + 3, 6 * S]
    position.reopen()
    assert position.may_be_another_log(rotated[0])
    assert read(position, rotated, until=3) == [5 * S + 2, 5 * S + 3]
    assert read(again(position), rotated) == [6 * S]


def test_a_log_that_was_taken_for_the_one_before_is_not_told_again() -> None:
    log = [5 * S, 5 * S + 1, 6 * S]
    mistaken = LogCursor()
    read(mistaken, log, until=2)
    assert read(LogCursor(before=mistaken.state), log) == [6 * S]
    assert read(LogCursor(before=mistaken.state), [7 * S, 8 * S]) == [7 * S, 8 * S]


def test_a_position_stays_small() -> None:
    position = LogCursor()
    read(position, [second * S + part for second in range(100, 400) for part in range(50)])
    assert len(json.dumps(position.state)) < 200


def test_what_is_dropped_is_said_and_what_matters_is_told() -> None:
    limit = RateLimiter(2)
    proof = RankLine(0, "a", encode("proof", rank=0, world_size=1, host="a"))
    lines = [RankLine(0, "a", str(number)) for number in range(5)]
    assert limit.admit([*lines, proof], 10.0) == [*lines[:2], proof]
    notice, *more = limit.admit(lines[:1], 11.5)
    assert "3 lines were dropped" in notice.text
    assert more == lines[:1]


def test_progress_is_not_dropped_for_the_sake_of_ordinary_lines() -> None:
    limit = RateLimiter(2)
    lines = [RankLine(0, "a", str(number)) for number in range(5)]
    steps = [RankLine(0, "a", encode("progress", step=step)) for step in range(3)]
    assert limit.admit([*lines, *steps], 10.0) == [*lines[:2], *steps[:2]]
    assert "4 lines were dropped" in limit.admit([], 11.0)[0].text


def test_what_was_dropped_last_is_said_at_the_end() -> None:
    limit = RateLimiter(2)
    limit.admit([RankLine(0, "a", f"line {n}") for n in range(5)], 10.0)
    (notice,) = limit.take_dropped()
    assert "3 lines were dropped" in notice.text
    assert limit.take_dropped() == []
    assert limit.admit([], 11.0) == []
