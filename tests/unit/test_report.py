"""What a run's log tells."""

import pytest

from manycpu.pipeline.observed import Observer, observe
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.observed import Observed


def said(rank: int, host: str, event: str, **fields: object) -> str:
    return events.join(rank, host, events.encode(event, rank=rank, host=host, **fields))


def met(rank: int, host: str, world: int, number: int = 0, **more: object) -> str:
    return said(rank, host, "proof", world_size=world, cpus=2.0, round=number, **more)


def test_ranks_and_hosts_are_those_that_introduced_themselves() -> None:
    seen = observe([met(1, "b", 2), "launcher speaks", met(0, "a", 2)])
    assert [(rank.rank, rank.host) for rank in seen.ranks] == [(0, "a"), (1, "b")]
    assert (seen.world_size, seen.hosts) == (2, ["a", "b"])


def test_every_round_of_an_elastic_run_is_kept_and_the_last_one_counts() -> None:
    seen = observe([met(0, "a", 2), met(1, "b", 2), met(0, "b", 1, number=1)])
    assert [(r["round"], r["world_size"], r["hosts"]) for r in seen.rounds] == [
        (0, 2, ["a", "b"]),
        (1, 1, ["b"]),
    ]
    assert (seen.world_size, seen.hosts) == (1, ["b"])


def test_the_backend_is_that_of_the_last_meeting() -> None:
    round_0 = [met(0, "a", 2), met(1, "a", 2), said(1, "a", "backend", asked="gloo", observed="gloo")]
    assert observe(round_0).backend == "gloo"
    round_1 = [met(0, "a", 2, number=1), met(1, "a", 2, number=1)]
    assert observe(round_0 + round_1).backend is None
    assert observe([*round_0, *round_1, round_0[-1]]).backend == "gloo"


def test_rounds_of_several_pods_are_told_apart_in_whatever_order_their_lines_come() -> None:
    late = [met(0, "a", 2), met(0, "a", 2, number=1), met(1, "b", 2), met(1, "b", 2, number=1)]
    seen = observe(late)
    assert [(found["round"], found["ranks"]) for found in seen.rounds] == [(0, [0, 1]), (1, [0, 1])]
    assert [rank.rank for rank in seen.ranks] == [0, 1]


def test_ranks_that_meet_again_after_their_pods_were_restarted_make_a_new_round() -> None:
    seen = observe([met(0, "a", 2), met(1, "b", 2), met(0, "a", 2), met(1, "c", 2)])
    assert [found["hosts"] for found in seen.rounds] == [["a", "b"], ["a", "c"]]
    assert (len(seen.ranks), seen.hosts) == (2, ["a", "c"])


def hears(*told: tuple[str, float]) -> Observed:
    """Hear lines, each with its time."""
    observer = Observer()
    for line, time in told:
        observer.add_line(events.split(line), time)
    return observer.observed


def test_a_meeting_whose_first_proof_was_never_read_does_not_take_one_of_the_next() -> None:
    # Membership changed within the same round, to a world of the same size.
    log = [(met(rank, "a", 4, meeting="first"), 1.0) for rank in (1, 2, 3)]
    log += [(met(rank, "b", 4, meeting="second"), 5.0) for rank in (0, 1, 2, 3)]
    seen = hears(*log)
    assert [found["ranks"] for found in seen.rounds] == [[1, 2, 3], [0, 1, 2, 3]]
    assert [rank.rank for rank in seen.ranks] == [0, 1, 2, 3]
    assert seen.hosts == ["b"]


def test_an_earlier_meeting_whose_lines_come_late_does_not_count_as_the_last() -> None:
    late = [(met(0, "a", 2, meeting="second"), 5.0), (met(1, "b", 3, meeting="first"), 1.0)]
    seen = hears(*late, (met(1, "c", 2, meeting="second"), 5.5))
    assert [found["meeting"] for found in seen.rounds] == ["first", "second"]
    assert (seen.world_size, seen.hosts) == (2, ["a", "c"])


def test_a_log_that_is_read_again_tells_nothing_new() -> None:
    observer = Observer()
    for _ in range(2):
        for rank, time in ((0, 1.5), (1, 1.25)):
            observer.add_line(events.split(met(rank, "a", 2)), time)
    assert len(observer.observed.rounds) == 1


def test_each_rank_of_the_last_meeting_has_its_own_end() -> None:
    # Two pods on one host, whose ranks change places: their lines come in no order.
    def ends(rank: int, pod: str, code: int) -> str:
        return said(rank, "a", "exit", code=code, hostname=pod)

    one = [
        (met(0, "a", 3, hostname="one", meeting="first"), 1.0),
        (ends(0, "one", -15), 3.0),
        (met(1, "a", 2, hostname="one", meeting="second"), 5.0),
        (ends(1, "one", 3), 9.0),
    ]
    other = [
        (met(1, "a", 3, hostname="other", meeting="first"), 1.1),
        (ends(1, "other", -15), 3.1),
        (met(0, "a", 2, hostname="other", meeting="second"), 5.1),
    ]
    for log in (one + other, other + one, one + other + one):
        ended = [(rank.rank, rank.hostname, rank.exit_code) for rank in hears(*log).ranks]
        assert ended == [(0, "other", None), (1, "one", 3)]


def test_of_ranks_whose_logs_come_in_no_order_the_first_to_fail_counts() -> None:
    observer = Observer()
    observer.add_line(events.split(said(0, "a", "exit", code=1)), 20.0)
    observer.add_line(events.split(said(1, "b", "exit", code=3)), 10.0)
    observer.add_line(events.split(said(2, "b", "exit", code=4)), 15.0)
    assert observer.observed.failure is not None
    assert observer.observed.failure.rank == 1


def test_the_first_rank_that_failed_is_the_one_to_look_at() -> None:
    log = [
        events.join(1, "b", "ValueError: no data"),
        events.join(0, "a", "connection lost"),
        said(1, "b", "exit", code=1),
        said(0, "a", "exit", code=-15),
    ]
    failure = observe(log).failure
    assert failure is not None
    assert (failure.rank, failure.host, failure.exit_code) == (1, "b", 1)
    assert failure.last_lines == ("ValueError: no data",)


def test_a_failure_before_a_restart_is_not_the_cause_of_a_later_one() -> None:
    first = [(met(0, "a", 1, meeting="first"), 1.0), (said(0, "a", "exit", code=-9), 3.0)]
    second = [
        (met(0, "a", 1, meeting="second"), 5.0),
        (events.join(0, "a", "ValueError: no data"), 6.0),
        (said(0, "a", "exit", code=1), 7.0),
    ]
    for log in (first + second, second + first, first + second + first):
        failure = hears(*log).failure
        assert failure is not None
        assert (failure.exit_code, failure.last_lines) == (1, ("ValueError: no data",))
    assert hears(*first, *second[:1], *first).failure is None


def test_without_times_too_a_restart_forgets_the_failure_before_it() -> None:
    log = [met(0, "a", 1), said(0, "a", "exit", code=-9), met(0, "a", 1), said(0, "a", "exit", code=1)]
    failure = observe(log).failure
    assert failure is not None
    assert failure.exit_code == 1


def test_a_failure_counts_although_the_clock_of_its_node_is_behind() -> None:
    log = [(met(0, "a", 2, meeting="only"), 5.0), (said(1, "b", "exit", code=1), 4.0)]
    failure = hears(*log).failure
    assert failure is not None
    assert failure.rank == 1


def test_a_failure_after_a_restart_counts_although_the_clock_of_its_node_is_behind() -> None:
    log = [
        (met(0, "a", 2, meeting="first"), 1.0),
        (met(1, "b", 2, meeting="first"), 1.0),
        (said(1, "b", "exit", code=-9), 10.0),
        (met(0, "a", 2, number=1, meeting="second"), 30.0),
        (met(1, "b", 2, number=1, meeting="second"), 27.0),
        (said(1, "b", "exit", code=1), 28.0),
    ]
    for lines in (log, [*log[4:], log[3], *log[:3]]):
        seen = hears(*lines)
        assert seen.failure is not None
        assert (seen.failure.exit_code, seen.ranks[1].exit_code) == (1, 1)


@pytest.mark.parametrize("times", [(0.0, 0.0, 0.0), (10.0, 50.0, 5000.0)], ids=["no times", "times"])
def test_a_failure_before_the_first_meeting_is_not_that_after_a_restart(times: tuple[float, ...]) -> None:
    early, meeting, late = (
        said(0, "a", "exit", code=87),
        met(0, "a", 1, number=1, meeting="second"),
        said(0, "a", "exit", code=-9),
    )
    failure = hears(*zip((early, meeting, late), times, strict=True)).failure
    assert failure is not None
    assert failure.exit_code == -9


def test_what_a_rank_gives_as_its_reason_is_among_its_last_lines_once() -> None:
    why = "proof of scale failed: one rank came"
    log = [
        said(0, "a", "error", kind="NodeExit", message=why),
        said(0, "a", "exit", code=87),
        events.join(1, "a", "ValueError: no data"),
        said(1, "a", "error", kind="ValueError", message="no data"),
        said(1, "a", "exit", code=1),
    ]
    failures = [observe(part).failure for part in (log, log[2:])]
    assert [failure and failure.last_lines for failure in failures] == [(why,), ("ValueError: no data",)]


def test_only_the_last_lines_of_a_rank_are_shown() -> None:
    log = [events.join(0, "a", f"line {n}") for n in range(100)] + [said(0, "a", "exit", code=3)]
    failure = observe(log).failure
    assert failure is not None
    assert failure.last_lines == tuple(f"line {n}" for n in range(80, 100))


def test_metrics_add_up_and_warnings_are_told_once() -> None:
    log = [
        said(0, "a", "metrics", values={"loss": 2.0}),
        said(0, "a", "metrics", values={"loss": 1.0, "f1": 90.0}),
        said(0, "a", "warning", message="slow"),
        said(1, "a", "warning", message="slow"),
        said(0, "a", "backend", asked="gloo", observed="gloo"),
    ]
    seen = observe(log)
    assert seen.metrics == {"loss": 1.0, "f1": 90.0}
    assert seen.warnings == ["slow"]
    assert seen.backend == "gloo"


def test_an_event_in_a_shape_of_its_own_disturbs_nothing() -> None:
    seen = observe(
        [said(0, "a", "metrics"), said(0, "a", "proof"), said(0, "a", "unheard-of"), met(0, "a", 1)]
    )
    assert (seen.world_size, seen.metrics, len(seen.ranks)) == (1, {}, 1)
