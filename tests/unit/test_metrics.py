"""What a program tells of itself: events on stdout, and metrics.json."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.node.metrics import metrics, progress
from manycpu.pipeline.spec.event_types import MetricsEvent, WarningEvent, decode


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYCPU_RUN", "qa-0123456789")
    monkeypatch.setenv("MANYCPU_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setenv("RANK", "0")
    return tmp_path / "output"


def test_progress_says_only_what_is_known(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress(step=3, loss=0.5)
    event = decode(capsys.readouterr().out.strip())
    assert event is not None
    fields = event.model_dump(exclude_unset=True, exclude={"time"})
    assert fields == {"event": "progress", "step": 3, "loss": 0.5}
    assert abs((event.time or 0) - time.time()) < 3600
    assert not output.exists()


def test_metrics_merge_into_the_output(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics({"loss": 0.5, "f1": np.float32(80.0)})
    metrics({"f1": 90.0})
    assert json.loads((output / "metrics.json").read_text()) == {"loss": 0.5, "f1": 90.0}
    assert [path.name for path in output.iterdir()] == ["metrics.json"]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    "own",
    ['{"f1": 0.8}\n{"f1": 0.9}\n', '{"f1": 0.8}\n', '[{"f1": 0.8}]', "\udcff"],
    ids=["lines", "first line", "list", "bytes"],
)
def test_a_metrics_json_of_lines_or_no_object_stays_the_program_s(
    own: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.mkdir()
    (output / "metrics.json").write_text(own, errors="surrogateescape")
    metrics({"f1": 90.0})
    assert (output / "metrics.json").read_text(errors="surrogateescape") == own
    reported, warning = map(decode, capsys.readouterr().out.splitlines())
    assert isinstance(reported, MetricsEvent)
    assert reported.values == {"f1": 90.0}
    assert isinstance(warning, WarningEvent)
    assert "metrics.json of the output is not manycpu's" in warning.message


def test_a_program_s_own_metrics_json_is_warned_of_once(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.mkdir()
    with (output / "metrics.json").open("w", buffering=1) as log:
        for f1 in (80.0, 90.0):
            log.write(json.dumps({"f1": f1}) + "\n")
            metrics({"f1": f1})
    assert (output / "metrics.json").read_text() == '{"f1": 80.0}\n{"f1": 90.0}\n'
    kinds = [type(decode(line)) for line in capsys.readouterr().out.splitlines()]
    assert kinds == [MetricsEvent, WarningEvent, MetricsEvent]


@pytest.mark.usefixtures("output")
def test_a_step_of_numpy_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    progress(step=np.int64(30))  # type: ignore[arg-type]
    metrics({"f1": 90.0})
    metrics({"f1": 91.0}, step=np.int64(31))  # type: ignore[arg-type]
    decoded = map(decode, capsys.readouterr().out.splitlines())
    assert [event.step for event in decoded if isinstance(event, MetricsEvent)] == [30, 31]


def test_not_a_number_is_null_and_said_aloud(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics({"loss": float("nan")})
    assert json.loads((output / "metrics.json").read_text()) == {"loss": None}
    assert "loss is nan" in capsys.readouterr().out


def test_many_metrics_take_several_lines(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {f"class/{number:04}/precision": number / 7 for number in range(300)}
    metrics(values, step=7)
    decoded = [decode(line) for line in capsys.readouterr().out.splitlines()]
    shown = [event.values for event in decoded if isinstance(event, MetricsEvent) and event.step == 7]
    assert {name: value for part in shown for name, value in part.items()} == values
    assert json.loads((output / "metrics.json").read_text()) == values


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("MANYCPU_RUN", None)])
def test_other_ranks_and_scripts_alone_say_nothing(
    name: str,
    value: str | None,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(name)
    if value:
        monkeypatch.setenv(name, value)
    metrics({"loss": 0.5})
    progress(step=1)
    assert capsys.readouterr().out == ""
    assert not output.exists()


def test_a_long_value_is_in_the_file_only(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics({"f1": 1.0, "text": "x" * 10_000})
    assert json.loads((output / "metrics.json").read_text())["text"] == "x" * 10_000
    decoded = [decode(line) for line in capsys.readouterr().out.splitlines()]
    assert {"f1": 1.0} in [event.values for event in decoded if isinstance(event, MetricsEvent)]
    assert "text is too long" in str(decoded)


def test_a_long_message_is_cut_to_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    warn("🏖️" * 5000)
    (line,) = capsys.readouterr().out.splitlines()
    event = decode(line)
    assert isinstance(event, WarningEvent)
    assert event.message.endswith("…")
