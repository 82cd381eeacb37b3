"""Curves of few points keep their shape; reports made of them fit where they are kept."""

import json
from typing import Any

import pytest

from manycpu.pipeline.ledger import End, Entry, VerbRecord
from manycpu.pipeline.observed import Observer, observe
from manycpu.pipeline.run_report import COMPACT, Report, compact, draft
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.observed import SERIES_LIMIT, Observed, Series
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.kubernetes.following import attempt_recorder

DAY = 86_400.0
LONG_ERROR = VerbRecord(seconds=1.0, result="failed", error="█" * 40_000)
NESTED = {str(row): {str(column): 0.5 for column in range(20)} for row in range(20)}


def _heard(*points: tuple[float | None, float, Any]) -> Series:
    series = Series()
    for step, time, value in points:
        series.add(step, time, value)
    return series


def test_ends_and_extremes_stay_however_many_values_there_are() -> None:
    peaks = {10: 50.0, 40_000: -3.0, 99_990: 20.0}
    series = _heard(*((step, 1.0 + step, peaks.get(step, 1.0)) for step in range(100_000)))
    assert len(series.values) <= SERIES_LIMIT
    assert (series.steps[0], series.steps[-1]) == (0, 99_999)
    assert peaks.items() <= dict(zip(series.steps, series.values, strict=True)).items()


def test_what_is_no_finite_number_is_left_out() -> None:
    odd = [float("nan"), float("inf"), 10**400, -(10**400), True, "1", None]
    assert _heard(*((step, 1.0 + step, value) for step, value in enumerate([*odd, 0.5]))).values == [0.5]


def test_a_break_of_days_takes_no_points_from_what_came_before() -> None:
    before = [(step, 1.0 + step, step % 7) for step in range(2_000)]
    after = [(2_000 + step, 5 * DAY + step, step % 7) for step in range(2_000)]
    series = _heard(*before, *after).thinned(100)
    early = sum(time < DAY for time in series.times)
    assert len(series.values) / 3 < early < len(series.values) * 2 / 3


def test_a_log_that_is_read_again_adds_nothing() -> None:
    points = [(step, 1.0 + step, step) for step in range(20)]
    assert _heard(*points, *points) == _heard(*points)


def test_a_thinned_curve_is_not_doubled_by_a_log_that_is_read_again_from_any_place() -> None:
    points = [(step, 1.0 + step, 1 / (1 + step)) for step in range(5_000)]
    for begin in (0, 1, 3_001, 4_990):
        assert _heard(*points, *points[begin:]) == _heard(*points)


def test_a_clock_that_is_set_back_takes_no_points_from_a_thinned_curve() -> None:
    points = [(step, 1e6 + step, 1 / (1 + step)) for step in range(1_000)]
    late = [(step, 1e6 + step - 600, 5.0 + step) for step in range(1_000, 1_500)]
    series = _heard(*points, *late)
    assert (series.steps[-1], series.index[-1]) == (1_499, 1_499)


def test_a_point_right_after_thinning_is_kept_although_its_time_is_that_of_the_last() -> None:
    points = [(step, 1.0 + step, float(step)) for step in range(SERIES_LIMIT + 1)]
    assert _heard(*points, (SERIES_LIMIT + 1, 1.0 + SERIES_LIMIT, -5.0)).values[-1] == -5.0


def test_steps_that_begin_again_are_not_doubled_when_they_are_read_again() -> None:
    points = [(step % 900, 1.0 + step, 1 / (1 + step)) for step in range(1_300)]
    assert _heard(*points, *points) == _heard(*points)


def test_a_pace_before_the_first_progress_is_known_when_it_is_read_again() -> None:
    observer = Observer()
    for _ in range(2):
        _say(observer, 0, "pace", step=5, step_seconds=2.0, time=1.0)
        _say(observer, 0, "pace", step=9, step_seconds=3.0, time=2.0)
        _say(observer, 0, "progress", step=10, loss=0.5, time=3.0)
    assert observer.observed.series["step_seconds"].steps == [5, 9]


def test_a_last_step_that_is_reported_once_more_adds_nothing() -> None:
    series = Series()
    for time in (10.0, 10.5):
        series.add(4, time, 0.25)
    assert series.steps == [4]


def test_what_a_clock_that_went_back_tells_is_new() -> None:
    ahead = [(0, 9_000.0, 1.0)]
    assert len(_heard(*ahead, *((step, 100.0 + step, step / 2) for step in range(1, 50))).values) == 50
    many = [(step, 1.0 + step, float(step)) for step in range(1_001)]
    assert _heard(*many, (1_001, 1_000.5, -1.0)).values[-1] == -1.0
    assert _heard((None, 5.0, 1.0), (None, 5.0, 2.0), (None, 5.0, 3.0)).values == [1.0, 2.0, 3.0]


def test_steps_that_go_back_after_a_restart_are_kept() -> None:
    assert _heard((10, 1.0, 3.0), (20, 2.0, 2.0), (15, 3.0, 2.5)).steps == [10, 20, 15]


@pytest.mark.parametrize("value", [True, None, "0.5", float("nan"), float("inf"), [1.0], 2**1100])
def test_what_is_no_finite_number_is_no_point(value: object) -> None:
    assert _heard((1, 1.0, value)) == Series()


def test_columns_have_the_same_length() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Series(index=[0], steps=[], times=[1.0], values=[1.0])


def _run(names: int, points: int, ranks: int = 2) -> Observed:
    observer = Observer()
    for rank in range(ranks):
        fields = {"rank": rank, "world_size": ranks, "host": f"node-{rank}", "cpus": 4, "threads": 4}
        _say(observer, rank, "proof", meeting="m", **fields)
    for step in range(points):
        for name in range(names):
            _say(observer, 0, "metrics", values={f"metric {name}": step / 3}, step=step, time=1.0 + step)
    return observer.observed


def _say(observer: Observer, by: int, event: str, /, **fields: Any) -> None:
    observer.add_line(events.split(events.join(by, f"node-{by}", events.encode(event, **fields))))


def _report(observed: Observed, **fields: Any) -> Report:
    entry = Entry(key="k", name="n", created=1.0, run={"program": "x"}, target={"kind": "local"}, attempt=1)
    return draft(entry.model_copy(update=fields), observed, RunState.RUNNING)


def test_every_rank_has_its_pace_and_the_slowest_can_be_told() -> None:
    observer = Observer(_run(0, 0))
    for rank, wait in ((0, 0.1), (1, 0.3)):
        _say(observer, rank, "pace", step=9, step_seconds=0.5, wait_seconds=wait, time=7.0)
    paces = [rank.pace for rank in observer.observed.ranks]
    assert [pace and (pace.time, pace.step_seconds, pace.wait_seconds) for pace in paces] == [
        (7.0, 0.5, 0.1),
        (7.0, 0.5, 0.3),
    ]
    assert observer.observed.series["step_seconds"].values == [0.5], "of rank 0"


def test_progress_is_what_was_told_last() -> None:
    lines = [events.encode("progress", step=step, total_steps=8, loss=1 / step, time=1.0) for step in (1, 2)]
    seen = observe([events.join(0, "a", line) for line in lines])
    assert seen.progress is not None
    assert (seen.progress.step, seen.progress.total_steps) == (2, 8)
    assert seen.series["loss"].steps == [1, 2]


def test_a_compact_report_has_as_many_points_as_fit() -> None:
    few, many = _report(_run(2, 400)), _report(_run(40, 400, ranks=64))
    assert compact(few)["series"]["metric 0"] == few.series["metric 0"].model_dump(mode="json")
    small = compact(many)
    assert len(json.dumps(small)) <= COMPACT
    assert len(small["ranks"]) == 64
    assert len(small["series"]["metric 0"]["values"]) > 20
    assert Report.model_validate(small).metrics == many.metrics


@pytest.mark.parametrize(
    "fields",
    [
        {"returned": "x" * 32_000, "warnings": ["w" * 1500] * 200},
        {"metrics": {f"m{number}": "v" * 3000 for number in range(900)} | {"loss": 0.5}},
        {"metrics": {"loss": 0.5} | {f"m{number}": NESTED for number in range(40)}},
        {"run": {"program": "x", "args": ["a" * 500] * 400}},
        {"error": "e" * 200_000},
        {"error": "█" * 40_000, "verbs": {"wait": LONG_ERROR}},
        {"history": [{"attempt": at, "state": "failed", "reason": "r" * 3000} for at in range(100)]},
        {"digests": {f"d{at}": "0" * 64 for at in range(2000)}},
        {"export": {"path": "p", "names": ["n" * 90] * 2000}},
        {"kept": ["k" * 900] * 64, "hosts": ["h" * 900] * 64, "left_behind": ["l" * 900] * 64},
        {"target": {f"t{at}": "v" * 900 for at in range(100)}},
        {"returned": {f"r{at}": {f"s{at}": ["x" * 90] * 9 for at in range(9)} for at in range(9)}},
        {"rounds": [{"round": at, "world_size": 512, "ranks": [*range(512)]} for at in range(40)]},
    ],
)
def test_whatever_is_too_long_a_compact_report_fits_and_tells_its_state(fields: dict[str, Any]) -> None:
    observer = Observer(_run(2, 50))
    _say(observer, 0, "progress", step=9, loss=0.5)
    small = compact(_report(observer.observed).model_copy(update=fields))
    assert len(json.dumps(small)) <= COMPACT
    assert (small["state"], small["name"]) == ("running", "n")
    assert Report.model_validate(small).run["program"] == "x"
    assert "loss" in small["series"]
    assert "loss" in small["metrics"]


def test_a_compact_report_of_numbers_that_json_does_not_have_is_json() -> None:
    lines = ['metrics", "values": {"iou": [0.5, NaN]}', 'progress", "step": 1, "loss": Infinity']
    small = compact(_report(observe(f'::manycpu:: {{"event": "{line}}}' for line in lines)))
    assert small["metrics"] == {"loss": None, "iou": [0.5, None]}


def test_a_compact_report_counts_all_ranks_and_keeps_the_fastest_and_the_slowest() -> None:
    observer = Observer(_run(0, 0, ranks=400))
    for rank in range(400):
        seconds = {200: 2.0, 250: 0.5}.get(rank, 1.0)
        _say(observer, rank, "pace", step=9, step_seconds=seconds + 0.1, wait_seconds=0.1, time=7.0)
    small = compact(_report(observer.observed))
    kept = [rank["rank"] for rank in small["ranks"]]
    assert (small["counts"]["ranks"], small["counts"]["hosts"]) == (400, 400)
    assert len(kept) == 64
    assert {200, 250} < {*kept}
    assert kept == sorted(kept)


def test_a_compact_report_keeps_failed_ranks_and_paces_before_ranks_without_a_pace() -> None:
    observer = Observer(_run(0, 0, ranks=1200))
    for rank in range(100, 110):
        _say(observer, rank, "pace", step=9, step_seconds=rank / 100, time=7.0)
    _say(observer, 333, "exit", code=1, host="node-333")
    small = compact(_report(observer.observed))
    kept = [rank["rank"] for rank in small["ranks"]]
    assert len(kept) == 64
    assert {*range(100, 110), 333} < {*kept}


def test_failed_ranks_alone_fill_a_compact_report_that_holds_no_more() -> None:
    observer = Observer(_run(0, 0, ranks=1200))
    for rank in range(0, 1200, 2):
        _say(observer, rank, "exit", code=-15, host=f"node-{rank}")
    small = compact(_report(observer.observed))
    assert [rank["exit_code"] for rank in small["ranks"]] == [-15] * 64


def test_what_was_told_first_takes_no_room_from_the_loss() -> None:
    observer = Observer()
    for number in range(150):
        _say(observer, 0, "metrics", values={f"class {number}": 0.5}, step=0)
    _say(observer, 0, "progress", step=1, loss=0.5)
    assert len(observer.observed.series) == 101
    assert observer.observed.series["loss"].values == [0.5]


@pytest.mark.parametrize("time", ["NaN", "1e999"])
def test_an_event_of_no_time_that_there_is_is_an_ordinary_line(time: str) -> None:
    line = f'[rank 0 a] ::manycpu:: {{"event": "progress", "step": 1, "loss": 0.5, "time": {time}}}'
    assert observe([line]) == Observed()


def test_credentials_in_warnings_are_hidden() -> None:
    observer = Observer()
    _say(observer, 0, "warning", message="cannot fetch https://bob:secret@host/set")
    assert _report(observer.observed).warnings == ["cannot fetch https://***@host/set"]


def test_how_each_attempt_ended_is_reported() -> None:
    end = End(state=RunState.FAILED, reason="rank 1 failed", seconds=2.0)
    told = _report(Observed(), ends={1: end}).history
    assert told == [{"attempt": 1, "state": "failed", "reason": "rank 1 failed", "seconds": 2.0}]


def test_curves_survive_the_ledger_and_get_out_of_its_way() -> None:
    some = {"attempt": 1, "observed": _run(5, 400).model_dump(mode="json")}
    again = Observed.model_validate(attempt_recorder.unpack(attempt_recorder.pack(some))["observed"])
    assert again.series == _run(5, 400).series
    smallest = attempt_recorder.unpack(attempt_recorder.pack_only_the_end(some))["observed"]
    assert "series" not in smallest
