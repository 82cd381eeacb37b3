"""A rank tells how fast its steps go: any program's, by its optimizer."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manycpu.pipeline.node import step_pace
from manycpu.pipeline.node.step_pace import StepPace
from manycpu.pipeline.spec.events import PREFIX

Told = Callable[[], list[dict[str, Any]]]


class Clock:
    """Time that passes where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    def read() -> list[dict[str, Any]]:
        return [json.loads(line.removeprefix(PREFIX)) for line in capsys.readouterr().out.splitlines()]

    return read


@pytest.fixture(autouse=True)
def nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the models and the batch of other tests in this process: they are none of these steps'."""
    monkeypatch.setattr(step_pace, "_MODELS", [])
    monkeypatch.setattr(step_pace, "_SAMPLES_PER_STEP", [0])


@pytest.fixture
def batch(nothing_of_others: None) -> None:  # noqa: ARG001
    step_pace.set_samples_per_step(16)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def _train(
    pace: StepPace, clock: Clock, steps: int, seconds: float, optimizer: torch.optim.Optimizer
) -> None:
    for _ in range(steps):
        clock.now += seconds
        pace.stepped(optimizer)


def test_at_most_once_in_ten_seconds(told: Told) -> None:
    clock, optimizer = Clock(), _optimizer()
    pace = StepPace(clock)
    _train(pace, clock, 101, 0.5, optimizer)
    events = told()
    assert [event["step"] for event in events] == [21, 41, 61, 81, 101]
    assert {event["step_seconds"] for event in events} == {0.5}
    assert all("samples_per_second" not in event and "wait_seconds" not in event for event in events)


def test_the_first_step_is_not_timed_and_the_end_tells_the_rest(told: Told, batch: None) -> None:  # noqa: ARG001
    clock, optimizer = Clock(), _optimizer()
    pace = StepPace(clock)
    _train(pace, clock, 1, 60.0, optimizer)
    _train(pace, clock, 4, 0.25, optimizer)
    pace.report()
    pace.report()
    (event,) = told()
    assert (event["step"], event["step_seconds"], event["samples_per_second"]) == (5, 0.25, 64.0)


def test_a_second_optimizer_makes_no_steps_of_its_own(told: Told) -> None:
    clock, first, second = Clock(), _optimizer(), _optimizer()
    pace = StepPace(clock)
    for _ in range(5):
        _train(pace, clock, 1, 1.0, first)
        _train(pace, clock, 1, 1.0, second)
    pace.report()
    assert told()[0]["step"] == 5
    assert told() == []


def test_another_optimizer_goes_on_where_the_first_is_gone(told: Told) -> None:
    clock = Clock()
    pace = StepPace(clock)
    _train(pace, clock, 2, 1.0, _optimizer())
    _train(pace, clock, 2, 1.0, _optimizer())
    pace.report()
    assert told()[0]["step"] == 4


def test_what_is_done_between_and_after_steps_is_none_of_theirs(told: Told) -> None:
    clock, optimizer = Clock(), _optimizer()
    pace = StepPace(clock)
    _train(pace, clock, 10, 0.25, optimizer)
    _train(pace, clock, 1, 600.0, optimizer)
    _train(pace, clock, 10, 0.25, optimizer)
    clock.now += 60.0
    pace.report()
    assert [event["step_seconds"] for event in told()] == [0.25, 0.25]


def test_another_optimizer_goes_on_where_the_first_makes_no_more_steps(told: Told) -> None:
    clock, head, body = Clock(), _optimizer(), _optimizer()
    pace = StepPace(clock)
    _train(pace, clock, 3, 0.1, head)
    _train(pace, clock, 60, 0.1, body)
    pace.report()
    assert told()[0]["step"] > 50


def test_waits_are_told_as_their_median_and_still_after_the_model_is_gone(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average would have the pauses between epochs in it, and could be longer than a step."""
    clock, optimizer = Clock(), _optimizer()
    pace, waits = StepPace(clock), [0.0625, 0.0625, 60.0]
    monkeypatch.setattr(step_pace, "_waits", lambda: iter([waits.pop()] if waits else []))
    for _ in range(2):
        _train(pace, clock, 3, 0.25, optimizer)
        pace.report()
    assert [event["wait_seconds"] for event in told()] == [0.0625, 0.0625]


def test_a_child_of_the_rank_tells_nothing(told: Told) -> None:
    clock, optimizer = Clock(), _optimizer()
    pace = StepPace(clock)
    _train(pace, clock, 3, 1.0, optimizer)
    child = os.fork()
    if not child:
        pace.report()
        os._exit(0)
    os.waitpid(child, 0)
    assert told() == []


@pytest.mark.parametrize(
    ("calls", "described"),
    [
        ([0, 1, 2, 3, 4], ""),
        ([0, 0, 0, 0, 0], "in 4 of 4 steps"),
        ([0, 0, 0, 0, 1], "in 3 of 4 steps"),
        ([0, 0, 0, 1, 2], ""),
        ([None, None, None], ""),
        ([7], ""),
    ],
)
def test_most_steps_without_a_collective_are_a_training_alone(
    calls: list[int | None], described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    pace, optimizer, counted = StepPace(clock), _optimizer(), iter(calls)
    monkeypatch.setattr(step_pace, "_collectives", lambda: next(counted))
    _train(pace, clock, len(calls), 0.1, optimizer)
    assert pace.trained_alone().startswith(described)
    assert bool(pace.trained_alone()) == bool(described)
