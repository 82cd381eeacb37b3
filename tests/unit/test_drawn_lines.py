"""Lines of any bytes: readers of logs never fail, and no line of a program passes for an event of manycpu."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import drawn, json_values, texts
from support.nasty_lines import FORGED, NASTY

from manycpu.pipeline import run_report
from manycpu.pipeline.adapters.process import LogFollower
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.listeners import ReadableLog, tell
from manycpu.pipeline.node.lines import HiddenSecrets, Lines, pieces
from manycpu.pipeline.observed import Observer
from manycpu.pipeline.page import as_html
from manycpu.pipeline.spec import rank_logs
from manycpu.pipeline.spec.event_types import EVENTS, decode
from manycpu.pipeline.spec.events import PREFIX, RESERVED, RankLine, encode, split
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState

SIGNATURE = b"::manycpu-a1b2c3:: "
MARK = PREFIX.encode()
HONEST = encode("exit", code=0, rank=0, host="a")
SIGNED = SIGNATURE + HONEST.removeprefix(PREFIX).encode() + b"\n"
fragments = st.one_of(
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"[rank 0 a] ", MARK, MARK[:5], MARK[5:], b"x" * 5000]
    ),
    st.sampled_from([SIGNATURE[:9], b"::manycpu-000000:: ", b"\xe2\x82\xac", "\u2028\x85\v".encode()]),
    st.sampled_from([*FORGED, *NASTY]).map(lambda line: line.encode(errors="surrogatepass")),
    st.binary(max_size=6),
)
outputs = st.lists(fragments | st.just(SIGNED), max_size=12)
events = st.builds(
    lambda kind, fields: PREFIX + json.dumps(fields | {"event": kind}),
    st.sampled_from([*EVENTS, "own"]) | texts,
    st.dictionaries(
        st.sampled_from([name for model in EVENTS.values() for name in model.model_fields]) | texts,
        json_values,
        max_size=5,
    ),
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


def forwarded(blocks: list[bytes]) -> bytes:
    """Pass what a rank printed to its log, as its parent process does."""
    lines, secrets = Lines(SIGNATURE), HiddenSecrets({"MANYCPU_USER_ENV": "KEY", "KEY": "hunter2"}, [])
    parts = [line for block in blocks for line in lines.feed(block)] + lines.rest()
    return b"".join(piece for part in map(secrets.hide, parts) for piece in pieces(b"[rank 0 a] ", part))


@drawn(300)
@given(outputs)
def test_no_line_of_a_program_passes_for_an_event_of_manycpu(log: Path, output: list[bytes]) -> None:
    log.write_bytes(forwarded(output))
    read = [split(line) for line in LogFollower(log).read(1 << 20)]
    assert all((line.rank, line.host) == (0, "a") for line in read)
    decided = [line.text for line in read if (event := decode(line.text)) and event.event in RESERVED]
    assert decided == [HONEST] * output.count(SIGNED)


@drawn(200)
@given(outputs, st.lists(st.integers(1, 40), max_size=20))
def test_where_a_block_ends_is_of_no_matter(output: list[bytes], sizes: list[int]) -> None:
    whole = b"".join(output)
    blocks, rest = list[bytes](), whole
    for size in sizes:
        blocks, rest = [*blocks, rest[:size]], rest[size:]
    assert forwarded([*blocks, rest]) == forwarded([whole])


@drawn(150)
@given(st.lists(events | texts | st.sampled_from([*FORGED, *NASTY]), max_size=6))
def test_every_reader_takes_every_line(texts: list[str]) -> None:
    observer, shown = Observer(), list[str]()
    lines = [RankLine(0, "a", text) for text in texts] + [split(text) for text in texts]
    for line in lines:
        observer.add_line(line, 1.0)
    tell(lines, log := ReadableLog(shown.append))
    log.flush()
    kept = Observed.model_validate_json(observer.observed.model_dump_json())
    entry = Entry(
        key="0" * 10, name="a", created=0.0, run={"program": "x", "output": None}, target={"kind": "local"}
    )
    report = run_report.draft(entry, kept, RunState.FAILED)
    text = run_report.as_json(report)
    assert run_report.parse(text) is not None
    assert json.dumps(run_report.compact(report), allow_nan=False)
    page = as_html(report.model_dump(mode="json"))
    assert page.count("<script") == page.count("</script>")


@drawn(150)
@given(
    st.lists(st.binary(max_size=30) | fragments, max_size=6), st.text(st.sampled_from("0179ax."), max_size=3)
)
def test_logs_of_any_bytes_are_merged(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], name: str
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    (folder / f"0{name}.log").write_bytes(b"".join(b"1.5 " + block for block in blocks))
    (folder / "1.log").write_bytes(b"nan x\ninf y\n" + b"".join(blocks))
    assert all(isinstance(line, str) for line in rank_logs.merged(folder))
