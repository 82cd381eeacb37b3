"""Names, errors, events and states."""

import pickle

import pytest

from manycpu.pipeline.launchers.states import process_state
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import (
    BadInputError,
    ClusterError,
    ConflictError,
    Finding,
    ForbiddenError,
    HttpError,
    InvalidError,
    ManycpuError,
    NotFoundError,
    RegistryError,
    RegistryUnauthorizedError,
    TrainingFailedError,
    TransientError,
    UnauthorizedError,
    raise_findings,
)
from manycpu.pipeline.spec.event_types import decode
from manycpu.pipeline.spec.naming import run_key, run_name
from manycpu.pipeline.spec.state import RunState, describe_exit


def test_a_key_depends_on_every_part() -> None:
    keys = {run_key("a", "b", 1), run_key("a", "b", 2), run_key("ab", 1), run_key("a", "b1")}
    assert len(keys) == 4
    assert run_key("a", "b") == run_key("a", "b")


@pytest.mark.parametrize("label", ["qa", "Weekly QA!", "-x-", "9lives", "", "é", "a" * 100])
def test_names_are_what_kubernetes_allows(label: str) -> None:
    name = run_name(label, "0123456789")
    assert len(name) <= 40
    assert name.endswith("-0123456789")
    assert name[0].isalpha()
    assert name.isascii()
    assert "--" not in name


def test_an_error_says_where_what_and_what_to_do() -> None:
    error = BadInputError("8 asked for, 2 there", field="run.nnodes", fix="Ask for 2")
    assert str(error) == "run.nnodes: 8 asked for, 2 there. Ask for 2."


def test_what_to_do_after_several_lines_stands_on_a_line_of_its_own() -> None:
    error = BadInputError("not YAML:\n  run: [\n       ^", fix="Mend it at the line above")
    assert str(error) == "not YAML:\n  run: [\n       ^\nMend it at the line above."


def test_errors_cross_processes_with_all_that_they_know() -> None:
    for error in (
        TrainingFailedError("it broke", field="run.program", fix="Mend it"),
        ClusterError.of_status(403, "refused"),
        RegistryError.of_status(404, "no such image", field="target.image"),
    ):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the lines above
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("base", "status", "kind"),
    [
        (ClusterError, 0, ClusterError),
        (ClusterError, 400, InvalidError),
        (ClusterError, 401, UnauthorizedError),
        (ClusterError, 403, ForbiddenError),
        (ClusterError, 404, NotFoundError),
        (ClusterError, 409, ConflictError),
        (ClusterError, 422, InvalidError),
        (ClusterError, 500, ClusterError),
        (RegistryError, 401, RegistryUnauthorizedError),
        (RegistryError, 404, RegistryError),
        (RegistryError, 503, TransientError),
    ],
)
def test_an_http_status_chooses_the_class(base: type[HttpError], status: int, kind: type[HttpError]) -> None:
    error = base.of_status(status, "refused", fix="Ask again")
    assert (type(error), error.status, str(error)) == (kind, status, "refused. Ask again.")


def test_findings_that_are_no_obstacle_raise_nothing() -> None:
    raise_findings([Finding("run.dtype", "slow", "Take fp32", fatal=False)])


def test_a_line_that_would_not_go_through_a_pipe_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 5"):
        events.encode("metrics", text="x" * 5000)


def test_output_that_only_looks_like_an_event_is_output() -> None:
    assert decode("::manycpu:: not json") is None
    assert decode("::manycpu:: [1]") is None


def test_a_line_keeps_its_rank_and_host() -> None:
    assert events.split(events.join(3, "node-b", "[rank 9 x] loss")) == (3, "node-b", "[rank 9 x] loss")
    assert events.split("W1121 torchrun speaks") == (None, None, "W1121 torchrun speaks")


def test_exit_codes_are_told_in_words() -> None:
    assert "proof of scale" in describe_exit(87)
    assert "memory" in describe_exit(-9)
    assert describe_exit(-15) == "killed by signal 15"
    assert describe_exit(3) == "exit code 3"


_RECORD = {"code": 0, "reason": "", "started": 0.0, "ended": 1.0}


@pytest.mark.parametrize(
    ("alive", "met", "record", "cancelled", "expected"),
    [
        (True, False, None, False, RunState.PENDING),
        (True, True, None, False, RunState.RUNNING),
        (False, True, _RECORD, False, RunState.SUCCEEDED),
        (False, True, {**_RECORD, "code": 1}, False, RunState.FAILED),
        (False, True, {**_RECORD, "code": -15, "reason": "cancelled"}, False, RunState.CANCELLED),
        (False, True, {**_RECORD, "code": -15, "reason": "SIGTERM"}, False, RunState.FAILED),
        (False, True, {**_RECORD, "code": -15, "reason": "SIGTERM"}, True, RunState.CANCELLED),
        (False, True, {**_RECORD, "code": -15, "reason": "run.run_timeout: over"}, False, RunState.FAILED),
        (False, True, {**_RECORD, "code": 1}, True, RunState.CANCELLED),
        (False, True, None, False, RunState.FAILED),
        (None, True, None, False, RunState.UNKNOWN),
        (None, True, _RECORD, False, RunState.SUCCEEDED),
    ],
)
def test_a_state_is_read_from_what_was_observed(
    *, alive: bool | None, met: bool, record: dict[str, object] | None, cancelled: bool, expected: RunState
) -> None:
    observed = {"alive": alive, "unseen": "elsewhere", "met": met, "exit": record, "cancelled": cancelled}
    assert process_state(observed).state is expected


def test_errors_have_one_root() -> None:
    assert issubclass(BadInputError, ManycpuError)
    assert (ManycpuError.exit_code, BadInputError.exit_code) == (1, 2)
