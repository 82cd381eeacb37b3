"""Options: names that users of run_qa.py know, old names, and defaults from the environment of a run."""

import json
from pathlib import Path

import pytest

from manycpu.pipeline.recipes import arguments
from manycpu.pipeline.recipes.question_answering.options import Options, parse
from manycpu.pipeline.spec.errors import BadInputError

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def parsed(*words: str, **env: str) -> Options:
    return parse(
        [*words, "--output_dir", "out"], {f"MANYCPU_{name.upper()}": value for name, value in env.items()}
    )


# As the documents write it that this project grew from.
SQUAD = (
    *("--model_name_or_path", "bert-large-uncased", "--dataset_name", "squad", "--do_train", "--do_eval"),
    *("--per_device_train_batch_size", "12", "--learning_rate", "3e-5", "--num_train_epochs", "2"),
    *("--max_seq_length", "384", "--doc_stride", "128", "--output_dir", "debug_squad/"),
)


def test_the_options_of_run_qa_are_known() -> None:
    options = parse([*SQUAD, "--no_cuda", "--ddp_backend", "ccl", "--use_ipex", "--bf16"], {})
    assert (options.model.model_name_or_path, options.data.dataset_name) == ("bert-large-uncased", "squad")
    assert (options.data.max_seq_length, options.data.doc_stride) == (384, 128)
    training = options.training
    assert (training.per_device_train_batch_size, training.learning_rate, training.num_train_epochs) == (
        12,
        3e-5,
        2,
    )
    assert (training.do_train, training.do_eval, training.do_predict, training.bf16) == (
        True,
        True,
        False,
        True,
    )
    assert (training.use_cpu, training.ddp_backend, training.optim) == (True, None, "adamw_torch_fused")
    assert options.chosen
    assert [note.split()[0] for note in options.notes] == ["--no_cuda", "--ddp_backend", "--use_ipex"]
    assert "ended at torch 2.8; torch itself has bf16 autocast" in options.notes[-1]
    assert not training.use_ipex


def test_defaults_come_from_the_run() -> None:
    options = parse(
        [],
        {"MANYCPU_MODEL": "/m", "MANYCPU_OUTPUT": "/o", "MANYCPU_CHECKPOINTS": "/c", "MANYCPU_DTYPE": "bf16"},
    )
    assert (options.model.model_name_or_path, options.output, options.training.output_dir) == (
        "/m",
        "/o",
        "/c",
    )
    assert options.training.bf16
    assert not options.chosen
    assert options.notes == ()


def test_what_the_user_says_wins_over_the_run() -> None:
    options = parsed("--model_name_or_path", "mine", "--bf16", "false", model="/m", dtype="bf16")
    assert (options.model.model_name_or_path, options.training.bf16) == ("mine", False)
    assert parsed("--bf16", dtype="fp32").training.bf16
    assert not parsed("--fp16", dtype="bf16").training.bf16
    assert parsed("--fp16", "false", dtype="bf16").training.bf16


@pytest.mark.parametrize(
    ("flags", "words", "bf16"),
    [
        ({"avx2", "avx512_bf16"}, (), True),
        ({"amx_bf16"}, (), True),
        ({"avx2", "avx512f"}, (), False),
        (set(), (), False),  # flags that cannot be read
        ({"amx_bf16"}, ("--bf16", "false"), False),
        ({"amx_bf16"}, ("--fp16",), False),
    ],
)
def test_a_run_that_names_no_format_trains_in_bf16_where_it_is_fast(
    flags: set[str], words: tuple[str, ...], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "processor_flags", lambda: frozenset(flags))
    options = parsed(*words, dtype="auto")
    assert (options.training.bf16, len(options.notes)) == (bf16, bf16)
    assert not parsed(*words, dtype="fp32").training.bf16


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["--per_device_train_batch_size", "3"], 3),
        (["--per_gpu_train_batch_size", "3"], 3),
        (["--per_device_train_batch_size", "3", "--per_device_eval_batch_size", "5"], 5),
        ([], 8),
    ],
)
def test_an_evaluation_has_the_batch_of_a_step_unless_told_otherwise(words: list[str], size: int) -> None:
    assert parsed(*words).training.per_device_eval_batch_size == size


def test_the_output_of_a_run_is_where_the_model_goes_and_that_is_said() -> None:
    options = parsed(output="/o")
    assert options.output == "/o"
    assert options.notes == ("--output_dir out: the model goes to /o, from where the run exports it",)


def test_checkpoints_are_not_kept_in_the_output() -> None:
    options = parsed()
    assert (options.output, options.training.output_dir) == ("out", "out-checkpoints")


@pytest.mark.parametrize(
    ("old", "field", "value"),
    [
        (["--evaluation_strategy", "epoch"], "eval_strategy", "epoch"),
        (["--evaluation-strategy=steps", "--eval_steps", "5"], "eval_strategy", "steps"),
        (["--per_gpu_train_batch_size", "3"], "per_device_train_batch_size", 3),
        (["--per_gpu_eval_batch_size=5"], "per_device_eval_batch_size", 5),
        (["--warmup_ratio", "0.1"], "warmup_steps", 0.1),
        (["--group_by_length"], "train_sampling_strategy", "group_by_length"),
        (["--group_by_length", "False"], "train_sampling_strategy", "random"),
        (["--adafactor"], "optim", "adafactor"),
        (["--no_cuda", "True"], "use_cpu", True),
    ],
)
def test_old_names_are_read_aloud(old: list[str], field: str, value: object) -> None:
    options = parsed(*old)
    assert getattr(options.training, field) == value
    (note,) = options.notes
    assert note.startswith(old[0].partition("=")[0])


@pytest.mark.parametrize(
    "old",
    [
        ["--overwrite_output_dir"],
        ["--logging_dir", "logs"],
        ["--jit_mode_eval", "true"],
        ["--fp16_opt_level=O1"],
    ],
)
def test_options_without_a_use_are_left_out_aloud(old: list[str]) -> None:
    options = parsed(*old, "--seed", "7")
    assert options.training.seed == 7
    (note,) = options.notes
    assert note.startswith(f"{old[0].partition('=')[0]} is left out: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning_rat", "1"], "unknown options: --learning_rat 1"),
        (["--learning_rate", "fast"], "argument --learning_rate.*invalid float value: 'fast'"),
        (["--lr_scheduler_type", "steep"], "steep"),
        (["--optim", "best"], "best"),
        (["--ddp_backend", "smoke"], "invalid choice: 'smoke'"),
        (["--bf16", "--fp16"], "At most one of fp16 and bf16"),
        (["--load_best_model_at_end", "--eval_strategy", "epoch"], "save and eval strategy"),
    ],
)
def test_options_that_cannot_be_used_are_bad_input(words: list[str], said: str) -> None:
    with pytest.raises(BadInputError, match=rf"run\.args: .*{said}"):
        parsed(*words)


@pytest.mark.parametrize("words", [(), ("True",), ("false",)])
def test_the_old_switch_for_the_login_of_the_hub_is_no_token(words: tuple[str, ...]) -> None:
    options = parsed("--use_auth_token", *words)
    assert options.model.token is None
    assert options.notes[0].startswith("--use_auth_token is left out: ")
    assert parsed("--use_auth_token", "hf_a").model.token == "hf_a"  # noqa: S105 - an example


@pytest.mark.parametrize("words", [["=-1e-3"], ["", "-1e-3"]])
def test_a_value_may_begin_as_an_option_does(words: list[str]) -> None:
    name = "--null_score_diff_threshold"
    assert parsed(name + words[0], *words[1:]).data.null_score_diff_threshold == -0.001
    assert parsed("--optim_args=--x").training.optim_args == "--x"


def test_a_json_file_may_hold_the_options(tmp_path: Path) -> None:
    path = tmp_path / "qa.json"
    content = {
        "learning_rate": 1e-4,
        "do_train": True,
        "token": None,
        "lr_scheduler_kwargs": {"num_cycles": 2},
    }
    path.write_text(json.dumps({"output_dir": str(tmp_path), "label_names": ["a", "b"], **content}))
    training = parse([str(path)], {}).training
    assert (training.learning_rate, training.do_train, training.label_names) == (1e-4, True, ["a", "b"])
    assert training.lr_scheduler_kwargs == {"num_cycles": 2}
    with pytest.raises(BadInputError, match=r"nowhere\.json cannot be read"):
        parse([str(tmp_path / "nowhere.json")], {})
