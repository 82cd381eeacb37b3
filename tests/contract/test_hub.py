"""Data and models of a Hub: its real client stages them from a small server (tests/support/hub_server.py)."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import hub_server
from support.folder_contents import contents
from support.helper_process import pod
from support.hub_server import TOKEN, Hub
from support.rank_launches import free_port

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod import client

pytest.importorskip("huggingface_hub")

Train = Callable[..., str]
pytestmark = pytest.mark.usefixtures("home", "light_torch")
DATA = {
    "deep/a b/ü %41#?.bin": os.urandom(3 << 20),
    "empty": b"",
    **{f"{n}.txt": b"%d" % n for n in range(12)},
}
MODEL = {"config.json": b"{}", "model.safetensors": os.urandom(12 << 20)}
COPIES = """
import os, shutil
for name in ("DATA", "MODEL"):
    shutil.copytree(os.environ[f"MANYCPU_{name}"], os.environ["MANYCPU_OUTPUT"] + "/" + name)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server.running() as running:
        yield running


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return a Hub with a data set and a model; commands have no token for it."""
    server.files = {"datasets/me/set": DATA, "me/model": MODEL}
    for kept in (server.private, server.reads, server.pushes, server.damaged, server.refusals):
        kept.clear()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return server


@pytest.fixture
def train(script: Callable[[str], str], tmp_path: Path) -> Train:
    """Return a function that types `manycpu run` with the data set and the model; it returns what is said."""

    def type_(code: int = 0, **changed: str) -> str:
        fields = {"program": script(COPIES), "data": "hf://datasets/me/set@v1", "model": "hf://me/model"}
        fields |= {"output": str(tmp_path / "out"), "nproc-per-node": "1", "run-id": "one", **changed}
        words = [f"--{name}={value}" for name, value in fields.items()]
        command = [sys.executable, "-m", "manycpu.pipeline.cli", "run", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return type_


def one_file(hub: Hub) -> Location:
    from huggingface_hub import HfFileSystem

    client = HfFileSystem(endpoint=hub.url, skip_instance_cache=True)
    return Location("hf://me/model/config.json", client, "me/model/config.json")


def test_data_and_model_of_a_run_are_on_a_hub_and_survive_an_answer_that_breaks_off(
    train: Train, hub: Hub, tmp_path: Path
) -> None:
    hub.cut.add("model.safetensors")
    train()
    assert contents(tmp_path / "out" / "DATA") == DATA
    assert contents(tmp_path / "out" / "MODEL") == MODEL
    assert not hub.cut


def test_a_private_model_needs_the_token_which_is_shown_nowhere(
    train: Train, hub: Hub, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private.add("me/model")
    said = train(code=2)
    assert "run.model: there is nothing at hf://me/model: me/model (repository not found)" in said
    assert "give the token of a private one, HF_TOKEN" in said

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said += train()
    places = (home, tmp_path / "out")
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert TOKEN not in said
    assert files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_what_is_staged_is_read_again_only_if_it_changed(train: Train, hub: Hub) -> None:
    train()
    hub.reads.clear()
    train()
    assert hub.reads == []
    hub.files["me/model"] = MODEL | {"config.json": b"{ }"}
    train()
    assert set(hub.reads) == set(MODEL)


def test_a_push_during_a_staging_leaves_the_commit_that_was_listed(
    train: Train, hub: Hub, tmp_path: Path
) -> None:
    hub.pushes["config.json"] = {"me/model": {path: bytes(len(content)) for path, content in MODEL.items()}}
    train()
    assert contents(tmp_path / "out" / "MODEL") == MODEL
    assert not hub.pushes


def test_a_pod_reads_the_commit_that_was_listed(hub: Hub, tmp_path: Path) -> None:
    hub.pushes["config.json"] = {"me/model": {path: bytes(len(content)) for path, content in MODEL.items()}}
    with pod("fetch") as (channel, _):
        done = client.ask(channel, url="hf://me/model", folder=str(tmp_path), field="run.model")
    assert contents(Path(done["path"])) == MODEL
    assert not hub.pushes


def test_a_large_file_that_arrives_with_other_bytes_is_not_staged(train: Train, hub: Hub) -> None:
    hub.damaged.add("model.safetensors")
    assert "run.model: hf://me/model was not staged: model.safetensors had sha256" in train(code=1)


def test_a_name_of_a_branch_may_have_a_slash(train: Train, hub: Hub) -> None:
    hub.reads.clear()
    train(model="hf://me/model@feature%2Fx")
    assert set(MODEL) <= set(hub.reads)


def test_an_output_on_the_hub_is_refused_before_anything_is_staged(train: Train, hub: Hub) -> None:
    said = train(code=2, output="hf://me/trained")
    assert "run.output: with an export to hf, each file would be a commit" in said
    assert hub.reads == []


def test_a_hub_that_cannot_be_reached_is_found_before_anything_is_staged(
    train: Train, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert re.search(r"run\.(data|model): it cannot be read: .*refused", train(code=2))
    assert hub.reads == []


def test_a_single_file_is_seen_to_change(hub: Hub) -> None:
    source = one_file(hub)
    (before,) = source.items()
    hub.files["me/model"] = MODEL | {"config.json": b"[]"}
    (after,) = source.items()
    assert (before.path, before.size) == (after.path, after.size)
    assert before.version != after.version


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_does_not_make_a_folder_of_a_file(hub: Hub, status: int) -> None:
    source = one_file(hub)
    hub.refusals.append(status)
    assert [item.path for item in source.items()] == ["config.json"]


@pytest.mark.parametrize("refusals", [[503], [None], [None, None]])
def test_a_hub_that_is_busy_or_breaks_off_is_asked_again_for_the_commit(
    hub: Hub, refusals: list[int | None]
) -> None:
    source = one_file(hub)
    hub.refusals.extend(refusals)
    assert source.at_commit().root == f"me/model@{hub.commit('me/model')}/config.json"
