"""What a run's log tells."""

from manycpu.pipeline.report import observe
from manycpu.pipeline.spec import events


def said(rank: int, host: str, event: str, **fields: object) -> str:
    return events.join(rank, host, events.encode(event, rank=rank, host=host, **fields))


def met(rank: int, host: str, world: int, number: int = 0) -> str:
    return said(rank, host, "proof", world_size=world, cpus=2.0, round=number)


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
