"""Logs of ranks on the volume: bounded, merged in the order of time."""

import time
from pathlib import Path

from manycpu.pipeline.spec.rank_logs import RankLog, merged


def test_lines_of_several_ranks_are_merged_in_the_order_of_time(tmp_path: Path) -> None:
    logs = [RankLog(tmp_path / "logs", rank, ranks=2) for rank in range(2)]
    for number in range(4):
        logs[number % 2].add(b"[rank %d host] line %d" % (number % 2, number))
        time.sleep(0.002)  # the times have milliseconds
    for log in logs:
        log.close()
    assert merged(tmp_path / "logs") == [f"[rank {n % 2} host] line {n}" for n in range(4)]


def test_the_last_lines_stay_and_the_files_are_bounded(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, ranks=10_000)
    for number in range(3000):
        log.add(b"%d %s" % (number, b"x" * 100))
        if number % 100 == 0:
            time.sleep(0.01)  # the thread writes in several blocks
    log.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 64 << 10
    numbers = [int(line.split()[0]) for line in merged(tmp_path)]
    assert numbers[-1] == 2999
    assert numbers == [*range(numbers[0], 3000)]
    assert len(numbers) > 200


def test_a_rank_that_starts_again_continues_its_log(tmp_path: Path) -> None:
    for life in ("first", "second"):
        log = RankLog(tmp_path, 0, ranks=1)
        log.add(life.encode())
        log.close()
    assert merged(tmp_path) == ["first", "second"]


def test_a_folder_that_cannot_be_written_costs_only_the_lines(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    log = RankLog(tmp_path / "logs", 0, ranks=1)
    log.add(b"lost")
    log.close()
    assert (tmp_path / "logs").read_text() == "a file"
    assert merged(tmp_path / "logs") == merged(tmp_path / "no folder") == []


def test_a_line_that_was_cut_and_an_odd_file_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_bytes(b"12.5 whole\n13.0\n\xff\n14.0 [rank 0 host] \xff")
    assert merged(tmp_path) == ["whole", "[rank 0 host] \ufffd"]
