"""Credentials in URLs stay where they were written: not in reports, messages and ledgers that others read."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from manycpu.pipeline import run_report, train
from manycpu.pipeline.cli import cli
from manycpu.pipeline.ledger import Entry, VerbRecord
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.spec.credentials import redacted, redacted_description, redacted_options, secrets_in
from manycpu.pipeline.spec.errors import ManycpuError, StageError
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.validation import read_run
from manycpu.pipeline.targets.open_run import open_context, reopen
from manycpu.pipeline.tracking.trackers import tracked
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.report import report_path


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa:ss@host/a?x=1&sig=s%2Fe#top", "https://***@host/a?x=***&sig=***#top"),
        ("sftp://me:pw@host:22/set", "sftp://***@host:22/set"),
        ("s3://KEY:sec/ret@bucket/set", "s3://***@bucket/set"),
        ("https://ghp_token@host/set.zip", "https://***@host/set.zip"),
        ("zip://x.csv::https://u:p@host/a.zip", "zip://x.csv::https://***@host/a.zip"),
        ("cannot read 'ftp://u:p@h/a': no.", "cannot read 'ftp://***@h/a': no."),
        ("https://u:p'w@host/x?sig=a", "https://***@host/x?sig=***"),
        ("'https://u:a::b@host/x' is gone", "'https://***@host/x' is gone"),
        ("https://u:pw secret@host", "https://***@host"),
        ("sftp://u:123456/abc@h/x", "sftp://***@h/x"),
        ("git+https://ghp_token@host/a", "git+https://***@host/a"),
        ("hf://me:pw@owner/name", "hf://***@owner/name"),
        ("no 'hf://me:pw/x@datasets/a/b'", "no 'hf://***@datasets/a/b'"),
        ("zip://x::https://u:12345@h/a#access_token=b", "zip://x::https://***@h/a#access_token=***"),
        ("(see https://h/a?x=b)c)", "(see https://h/a?x=***)"),
        ("URL('https://h/a?X-Amz-Signature=abc')", "URL('https://h/a?X-Amz-Signature=***')"),
        *[
            (url, url)
            for url in (
                "hf://datasets/squad@main",
                "hf://gpt2@feature%2Fx/config.json",
                "hf://gpt2: ask me@there",
                "github://org:repo@v1/data",
                "abfs://box@account.dfs.core.windows.net/a",
                "sftp://me@host/a",
                "http://host:8080/a@b",
                "/data/a?b=c@d",
                "file:///a@b",
                "git+ssh://git@host/a",
                "no http://host:8080, says me@there",
                "no http://host:8080: ask 'me@there'",
                "['http://host:80','me@there']",
                "see https://host: mail me@there",
                "sftp://me@host: denied (root@there)",
                "zip://x.csv::hf://datasets/squad@main",
            )
        ],
    ],
)
def test_what_is_secret_in_a_url(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


def test_the_secrets_themselves_are_found_for_those_who_mask_them() -> None:
    found = secrets_in({"data": "https://user:pass1@h/a?sig=abc123", "args": ["s3://k:longsecret@b/c"]})
    assert found == {"user:pass1", "pass1", "abc123", "k:longsecret", "longsecret"}
    assert secrets_in("https://u:p'w x@h/a?sig=abc123") == {"u:p'w x", "p'w x", "abc123"}
    assert secrets_in("git+https://tok3n@h/a#key=abc123") == {"tok3n", "abc123"}
    key = "-----BEGIN KEY-----\n  b3BlbnNz \r\nab==\n"
    assert secrets_in({"env": {"DEPLOY_KEY": key}}) == {key, "-----BEGIN KEY-----", "b3BlbnNz"}


def test_lines_of_a_secret_that_many_texts_have_are_not_masked_alone() -> None:
    text = "users:\n- token: abcdefgh\n-----\nFalse\nhunter2hunter2:"
    found = secrets_in({"env": {"CLUSTER_CREDENTIALS": text}})
    assert found == {text, "- token: abcdefgh", "hunter2hunter2:"}


URL = "https://user:hunter2@127.0.0.1:1/set?sig=s3cr3t"
SECRETS = ("hunter2", "s3cr3t")


@pytest.mark.parametrize("more", ["", " https://user:pw@host/x"])
def test_long_texts_take_time_in_proportion(more: str) -> None:
    text = bytes(range(256)).hex() * 400 + more  # 200 KB
    began = time.process_time()
    shown = redacted_description({"args": [text]})["args"][0]
    assert secrets_in({"args": [text]}) == ({"user:pw", "pw"} if more else set())
    assert time.process_time() - began < 20  # in quadratic time, it is more than ten minutes
    assert shown == text.replace("user:pw", "***")


def shows_none(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


@pytest.mark.usefixtures("home")
def test_errors_and_reports_show_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    given = {"program": str(tmp_path / "train.py"), "output": str(tmp_path / "out"), "env": {"PROXY": URL}}
    with pytest.raises(StageError, match=r"127\.0\.0\.1:1/set\?sig=\*\*\* was not staged") as caught:
        train({**given, "data": URL, "args": ["--to", URL]}, run_id="x")
    assert shows_none(repr(caught.value))
    text = (tmp_path / "out" / "report.json").read_text()
    assert shows_none(text)
    assert json.loads(text)["run"]["args"] == ["--to", "https://***@127.0.0.1:1/set?sig=***"]


def kubernetes(output: str, **more: Any) -> Any:
    target = {"kind": "kubernetes", "image": "r/x:1"}
    fields = {"program": "-m x", "output": output, "data": URL, "args": ["--to", URL]} | more
    return open_context(fields, target, "test", base=Path())


def test_a_ledger_that_a_namespace_reads_holds_none() -> None:
    ctx = kubernetes(URL)
    assert shows_none(ctx.new_entry(0).model_dump_json())
    assert ctx.run.data == URL
    assert shows_none(report_path(ctx))


def test_a_ledger_on_disk_is_for_its_owner_alone(tmp_path: Path, home: Path) -> None:
    (tmp_path / "train.py").write_text("")
    output = f"dir://user:hunter2@models/qa::file://{tmp_path}/out"
    ctx = open_context({"program": "train.py", "output": output}, None, "test", base=tmp_path)
    prepare(ctx)
    (file,) = home.glob("runs/*/ledger.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700  # what is written beside it, too
    assert ctx.ledger.read().run["output"] == output
    FileLedger(file.parent).remove()


def test_whatever_is_told_of_a_run_is_redacted() -> None:
    entry = Entry(key="k", name="n", created=0, run={"data": URL}, target={"x": [URL]}, export={"path": URL})
    drafted = run_report.draft(entry, Observed(), RunState.FAILED, f"no {URL}")
    assert shows_none(run_report.as_json(drafted))
    error = ManycpuError(f"no {URL}", field="run.data", fix=f"see {URL}")
    assert shows_none(repr(error) + str(error) + error.message)


def test_a_report_hides_arguments_that_are_called_like_secrets() -> None:
    described = {"program": "train.py", "args": ["--lr", "3e-5", "--api-key", "secret", "--hfToken=secret"]}
    entry = Entry(key="k", name="n", created=0, run=described, target={})
    drafted = run_report.draft(entry, Observed(), RunState.SUCCEEDED)
    assert drafted.run["args"] == ["--lr", "3e-5", "--api-key", "***", "--hfToken=***"]


TOLD = {"env": {"HF_TOKEN": "hunter2", "LANG": "C", "TOKEN_FILE": "/t"}, "args": ["--wandb-key", "s3cr3t"]}
"""Fields of a run, with secrets that only their names tell."""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", "--s3cret", "x"], ["--token", "***", "x"]),
        (["--use_token", "--fp16", "--lr=1"], ["--use_token", "--fp16", "--lr=1"]),
        (["--token", "--password", "x"], ["--token", "--password", "***"]),
        (["bash", "-c", "go --token abc --lr 3"], ["bash", "-c", "go --token *** --lr 3"]),
        (["--set=hub.token=abc", "HF_TOKEN=a b"], ["--set=hub.token=***", "HF_TOKEN=***"]),
        (['{"api_key": "a\\"b", "size": "3"}'], ['{"api_key": "***", "size": "3"}']),
        (["--tokenizer", "bert", "--token_file", "/t"], ["--tokenizer", "bert", "--token_file", "/t"]),
        (["--header", "Authorization: Bearer s3"], ["--header", "Authorization: ***"]),
        (["X-Api-Key: s3", "Note: s3"], ["X-Api-Key: ***", "Note: s3"]),
        (["GITHUB_PAT=s3", "DB_PWD=s3", "PWD=/x"], ["GITHUB_PAT=***", "DB_PWD=***", "PWD=/x"]),
        (["a=" * 5000], ["a=" * 5000]),
    ],
)
def test_what_is_secret_among_arguments(words: list[str], shown: list[str]) -> None:
    assert redacted_options(words) == shown
    assert redacted_options(shown) == shown
    assert (secrets_in({"args": words}) == set()) == (words == shown)


def test_a_report_hides_variables_that_are_called_like_secrets_and_what_quotes_them() -> None:
    verbs = {"wait": VerbRecord(seconds=1, result="failed", error="401 for hunter2")}
    target = {"kind": "kubernetes", "build_args": {"NPM_TOKEN": "hunter2"}, "pull_secret": "registry-login"}
    entry = Entry(key="k", name="n", created=0, run=TOLD, target=target, verbs=verbs)
    drafted = run_report.draft(entry, Observed(), RunState.FAILED, "it said: hunter2 is no token")
    assert shows_none(run_report.as_json(drafted))
    assert drafted.run["env"] == {"HF_TOKEN": "***", "LANG": "C", "TOKEN_FILE": "/t"}
    assert drafted.target == target | {"build_args": {"NPM_TOKEN": "***"}}
    assert drafted.error == "it said: *** is no token"


def test_a_ledger_that_a_namespace_reads_holds_no_variable_that_is_called_like_a_secret() -> None:
    ctx = kubernetes("/models/qa", **TOLD)
    entry = ctx.new_entry(0)
    assert shows_none(entry.model_dump_json())
    assert entry.run["args"] == ["--wandb-key", "***"]
    assert (ctx.run.env["HF_TOKEN"], ctx.run.args[-1]) == ("hunter2", "s3cr3t")
    assert shows_none(repr(tracked(entry, 0)))


def test_a_ledger_on_disk_is_for_its_owner_alone_where_names_tell_of_secrets(
    tmp_path: Path, home: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    fields = {"program": "train.py", "output": "out", **TOLD}
    prepare(open_context(fields, None, "test", base=tmp_path))
    (file,) = home.glob("runs/*/ledger.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert reopen(FileLedger(file.parent).read()).run.env == TOLD["env"]
    FileLedger(file.parent).remove()


def test_render_shows_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "run.yaml"
    for target in ({}, {"kind": "kubernetes", "image": "r/x:1"}):
        run = {"program": "train.py", "output": "out", "nproc_per_node": 1, **TOLD}
        file.write_text(json.dumps({"run": run, "target": target}))
        printed = CliRunner().invoke(cli, ["render", str(file)], catch_exceptions=False).output
        assert "LANG" in printed
        assert "--wandb-key" in printed
        assert shows_none(printed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"env": {"HF_TOKEN": ["hunter2"]}},
        {"env": "HF_TOKEN=hunter2"},
        {"env": {"HF_TOKEN=hunter2": ""}},
        {"args": "--token 'hunter2"},
        {"args": {"--token=hunter2": 1}},
    ],
)
def test_errors_quote_no_secret(wrong: dict[str, Any]) -> None:
    with pytest.raises(ManycpuError) as caught:
        read_run({"program": "x", "output": "y"} | wrong)
    assert shows_none(str(caught.value))
