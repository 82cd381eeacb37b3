"""Names of every shape: no two runs share one, and Kubernetes accepts each."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import drawn, texts

from manycpu.pipeline.cli.run_commands import _find as find_run
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.naming import key_of, labels, run_key, run_name
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.open_run import open_context

with_separators = st.text(st.sampled_from("a\x1e\x1f01"), max_size=3)
identities = st.lists(texts | st.integers(-1, 3) | with_separators, min_size=1, max_size=4)
labels_like = st.text(st.sampled_from("a-0"), min_size=1, max_size=3).map(lambda text: f"a{text}-0123456789")
RUN = {"program": "x.py", "output": "out"}
DNS_LABEL = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"


@drawn(500)
@given(identities, identities)
def test_two_runs_have_one_key_only_if_they_are_one(one: list[object], other: list[object]) -> None:
    same = [str(part) for part in one] == [str(part) for part in other]
    assert (run_key(*one) == run_key(*other)) is same


@drawn(500)
@given(st.lists(with_separators, min_size=2, max_size=3))
def test_a_part_that_has_a_separator_is_no_two_parts(parts: list[str]) -> None:
    for separator in ("\x1f", "\x1e1"):
        assert run_key(*parts) != run_key(separator.join(parts))


@drawn(500)
@given(texts, identities)
def test_every_name_is_a_label_of_kubernetes_with_its_key(label: str, identity: list[object]) -> None:
    name = run_name(label, run_key(*identity))
    assert re.fullmatch(DNS_LABEL, name)
    assert key_of(name) == run_key(*identity)
    assert labels(name)["manycpu/run"] == name


@drawn(300)
@given(texts)
def test_every_program_gives_a_name(program: str) -> None:
    run = TrainingRun.model_construct(program=program, job_name=None)
    assert re.fullmatch(DNS_LABEL, run_name(run.label, "0123456789"))


@drawn(40)
@given(st.lists(labels_like, min_size=1, max_size=3, unique=True), labels_like | texts)
def test_no_run_is_taken_for_one_of_a_similar_name(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], asked: str
) -> None:
    home = tmp_path_factory.mktemp("home")
    for name in names:
        ctx = open_context(RUN, {"directory": str(home)}, name, base=home)
        ctx = replace(ctx, name=name, key=key_of(name))
        ctx.ledger.open(ctx.new_entry(0))
    location = {"directory": str(home), "namespace": None, "connection": None}
    if asked in names:
        assert find_run(asked, location, whole=True).name == asked
    else:
        with pytest.raises(BadInputError, match="there is no run"):
            find_run(asked, location, whole=True)


def test_a_run_id_that_is_not_utf8_names_a_run() -> None:
    """A command line of other bytes ended `manycpu run` with a traceback."""
    assert run_key("cli", "\udcff") != run_key("cli", "\udcfe")


def test_the_keys_of_earlier_versions_stay() -> None:
    assert run_key("cli", "nightly") == "4bc3ca8103"
