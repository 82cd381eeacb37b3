"""Options: the tutorial's settings as defaults, names of Accelerate's examples, folders from a run."""

import json
from pathlib import Path

import pytest

from manycpu.pipeline.recipes import arguments
from manycpu.pipeline.recipes.image_classification.options import Options, parse
from manycpu.pipeline.spec.errors import BadInputError


def parsed(*words: str, **env: str) -> Options:
    return parse(words, {f"MANYCPU_{name.upper()}": value for name, value in env.items()})


def test_the_tutorials_settings_are_the_defaults() -> None:
    images = parsed(data="/d", output="/o").images
    assert (images.label_pattern, images.image_size, images.batch_size) == (r"^(.*)_\d+\.jpg$", 224, 64)
    assert (images.lr, images.num_epochs, images.seed) == (3e-2, 5, 42)
    assert (images.pretrained, images.unfreeze, images.mixed_precision) == (True, False, "no")


def test_the_options_of_accelerates_example_are_known() -> None:
    options = parsed(
        *("--data_dir", "pets/images", "--cpu", "--mixed_precision", "bf16", "--checkpointing_steps", "100"),
        *("--output_dir", "out", "--resume_from_checkpoint", "out/checkpoint-100"),
    )
    assert (options.images.data_dir, options.images.mixed_precision) == ("pets/images", "bf16")
    assert (options.output, options.checkpoints, options.save_every) == ("out", "out-checkpoints", 100)
    assert options.images.resume_from_checkpoint == "out/checkpoint-100"


def test_folders_and_precision_come_from_the_run() -> None:
    options = parsed(data="/d", output="/o", checkpoints="/c", dtype="bf16")
    assert (options.images.data_dir, options.output, options.checkpoints) == ("/d", "/o", "/c")
    assert (options.images.mixed_precision, options.save_every, options.notes) == ("bf16", "epoch", ())
    assert parsed("--mixed_precision", "no", dtype="bf16").images.mixed_precision == "no"
    assert parsed("--data_dir", "mine", data="/d").images.data_dir == "mine"


@pytest.mark.parametrize(
    ("flags", "words", "precision"),
    [
        ({"amx_bf16"}, (), "bf16"),
        ({"avx512f"}, (), "no"),
        ({"amx_bf16"}, ("--mixed_precision", "no"), "no"),
    ],
)
def test_a_run_that_names_no_format_trains_in_bf16_where_it_is_fast(
    flags: set[str], words: tuple[str, ...], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "processor_flags", lambda: frozenset(flags))
    options = parsed(*words, dtype="auto")
    assert (options.images.mixed_precision, len(options.notes)) == (precision, precision == "bf16")


def test_the_output_of_a_run_is_where_the_model_goes_and_that_is_said() -> None:
    options = parsed("--output_dir", "out", output="/o")
    assert options.output == "/o"
    assert options.notes == ("--output_dir out: the model goes to /o, from where the run exports it",)


def test_a_frozen_body_of_random_weights_is_said() -> None:
    (note,) = parsed("--no_pretrained").notes
    assert "only --unfreeze has it learn" in note
    assert parsed("--no_pretrained", "--unfreeze").notes == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image_siz", "32"], "unknown options: --image_siz 32"),
        (["--batch_size", "0"], "--batch_size 0 is too small"),
        (["--num_workers", "-1"], "--num_workers -1 is too small"),
        (["--lr", "0"], "--lr 0 is no learning rate"),
        (["--mixed_precision", "fp16"], "invalid choice: 'fp16'"),
        (["--checkpointing_steps", "often"], "'often' is neither a number of steps nor `epoch` or `no`"),
        (["--checkpointing_steps", "0"], "'0' is neither"),
    ],
)
def test_options_that_cannot_be_used_are_bad_input(words: list[str], said: str) -> None:
    with pytest.raises(BadInputError, match=rf"run\.args: .*{said}"):
        parsed(*words)


def test_a_json_file_may_hold_the_options(tmp_path: Path) -> None:
    path = tmp_path / "pets.json"
    path.write_text(json.dumps({"unfreeze": True, "model": None, "lr": 1e-3, "checkpointing_steps": "no"}))
    options = parse([str(path)], {})
    assert (options.images.unfreeze, options.images.model, options.images.lr) == (True, None, 1e-3)
    assert options.save_every is None
