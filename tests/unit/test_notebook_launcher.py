"""What notebook_launcher passes on to the runs that it starts."""

from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.node.function import meet
from manycpu.pipeline.notebook import launch as launching
from manycpu.pipeline.spec.errors import BadInputError


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"targett": "local"}, "targett: there is no such argument. Did you mean 'target'?"),
        ({"nproc": 2}, "nproc: there is no such argument. Did you mean 'nproc_per_node'?"),
        ({"output": Path("s3://models/qa")}, "run.output: a URL begins with s3://"),
    ],
)
def test_what_was_meant_by_an_argument_of_launch_is_suggested(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        launching.launch(print, **fields)
    assert str(refused.value).startswith(said)


def test_the_meeting_of_debug_mode_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end, or clean up, the run whose id, checkpoints or output the training continues."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def launch(function: Any, *_: Any, **fields: Any) -> dict[str, Any]:
        calls.append((function, fields))
        return {"world": 2, "hosts": ["a"], "backend": "gloo"}

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    places = {"output": "o", "checkpoints": "c", "resume_from": "r", "data": "d", "model": "m"}
    training: dict[str, Any] = {"run_id": "x", **places}
    launching.notebook_launcher(print, num_processes=2, backend="gloo", **training)
    scale = {"target": None, "nproc_per_node": 2, "backend": "gloo"}
    assert calls == [(meet, scale), (print, {**scale, **training})]
