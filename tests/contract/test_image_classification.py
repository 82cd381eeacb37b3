"""The recipe on two ranks, started as a run starts it: it learns to read handwritten digits."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import ccl_requirements
from support.recipe_ranks import WarmNode

from manycpu.pipeline.recipes.image_classification import generate, images
from manycpu.pipeline.recipes.image_classification.__main__ import main
from manycpu.pipeline.recipes.image_classification.options import parse
from manycpu.pipeline.spec.event_types import decode
from manycpu.pipeline.spec.events import split

# torch's own: its export of a scheduler's state.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")

RECIPE = ("-m", "manycpu.pipeline.recipes.image_classification")
SMALL = ("--model", "test_resnet", "--no_pretrained", "--unfreeze", "--image_size", "32")
OPTIONS = (*SMALL, "--lr", "1e-2", "--batch_size", "32", "--num_epochs", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture(scope="module")
def env(folder: Path) -> dict[str, str]:
    """Give the environment of a run on 1,797 digits; of the 360 to evaluate, the last step has 64 and 40."""
    generate.main(str(folder / "digits"))
    return {
        "MANYCPU_RUN": "test",
        "MANYCPU_BACKEND": "gloo" if ccl_requirements.missing() else "ccl",
        "MANYCPU_DATA": str(folder / "digits"),
        "MANYCPU_OUTPUT": str(folder / "output"),
        "MANYCPU_CHECKPOINTS": str(folder / "checkpoints"),
        "MANYCPU_DTYPE": "fp32",
    }


@pytest.fixture(scope="module")
def trained(warm: WarmNode, env: dict[str, str]) -> str:
    """Train on two ranks, once for all that read what they leave; what they printed."""
    done = warm.run(2, env, *RECIPE, *OPTIONS)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def alone() -> Iterator[None]:
    """Let a training begin in this process as in one of its own: Accelerate remembers the last one."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - as its own tests do
    GradientState._reset_state()  # noqa: SLF001


def told(output: str, kind: str) -> list[dict[str, Any]]:
    decoded = [decode(split(line).text) for line in output.splitlines()]
    return [event.model_dump(exclude_unset=True) for event in decoded if event and event.event == kind]


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "all_results.json").read_text())
    return found


def test_two_ranks_learn_to_read_digits_and_tell_each_epochs_accuracy_once(
    trained: str, folder: Path
) -> None:
    printed = re.findall(r"epoch (\d): (\d+\.\d\d)$", trained, re.MULTILINE)
    assert [epoch for epoch, _ in printed] == ["0", "1", "2"]
    found = [event["values"] for event in told(trained, "metrics") if "epoch" in event["values"]]
    assert [f"{values['accuracy']:.2f}" for values in found] == [accuracy for _, accuracy in printed]
    metrics = json.loads((folder / "output" / "metrics.json").read_text())
    assert metrics["train_samples_per_second"] > 0
    assert metrics["accuracy"] == results(folder / "output")["accuracy"] == float(printed[-1][1])
    # A tenth of them would be right by chance.
    assert metrics["accuracy"] >= 90


def test_they_tell_how_far_they_are(trained: str) -> None:
    # 1,437 images in batches of 32 on 2 ranks.
    progress = told(trained, "progress")
    assert [event["step"] for event in progress] == [*range(10, 70, 10), 69]
    assert {event["total_steps"] for event in progress} == {69}
    assert all(event.keys() >= {"loss", "learning_rate", "samples_per_second"} for event in progress)
    assert (progress[-1]["epoch"], progress[-1]["seconds_left"]) == (3.0, 0)


@pytest.mark.usefixtures("trained")
def test_the_model_that_timm_reads_has_exactly_the_accuracy_that_the_ranks_told(
    env: dict[str, str], folder: Path
) -> None:
    from manycpu.pipeline.recipes.image_classification.classify import Classifier

    options = parse(OPTIONS, env).images
    evaluated = images.split(images.read(env["MANYCPU_DATA"], options.label_pattern), options.seed).evaluation
    guesses = Classifier(folder / "output").classify(evaluated.files)
    right = sum(guess.name == file.name[0] for guess, file in zip(guesses, evaluated.files, strict=True))
    assert results(folder / "output")["accuracy"] == round(100 * right / len(guesses), 2)


@pytest.mark.usefixtures("trained")
def test_a_model_may_be_asked_from_a_shell(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from manycpu.pipeline.recipes.image_classification import classify

    digit = str(folder / "digits" / "0_0.jpg")
    assert classify.main([str(folder / "output"), digit]) == 0
    assert re.fullmatch(rf"{digit}: \d [01]\.\d\d\n", capsys.readouterr().out)
    assert classify.main([str(folder), digit]) == 2
    assert "config.json" in capsys.readouterr().err
    deep = tmp_path / "deep.png"
    Image.new("I;16", (20, 30), 300).save(deep)
    assert classify.main([str(folder / "output"), str(deep)]) == 2
    assert "more than 8 bits" in capsys.readouterr().err


def test_pixels_are_read_of_whole_images_of_8_bits_alone(tmp_path: Path) -> None:
    from manycpu.pipeline.recipes.image_classification import model

    deep, cut = tmp_path / "deep.png", tmp_path / "cut.jpg"
    Image.new("I;16", (20, 30), 300).save(deep)
    Image.new("RGB", (20, 30)).save(cut)
    assert model.pixels(cut, model.evaluation_transform(8)).shape == (3, 8, 8)
    cut.write_bytes(cut.read_bytes()[:-40])
    for file, said in ((deep, "it has more than 8 bits per channel"), (cut, "(?i:truncated)")):
        with pytest.raises(OSError, match=f"{file}: .*{said}"):
            model.pixels(file, model.evaluation_transform(8))


@pytest.mark.usefixtures("trained", "alone")
def test_one_rank_goes_on_from_a_checkpoint_of_two(env: dict[str, str], folder: Path) -> None:
    from manycpu.pipeline.recipes.image_classification import training

    # Of the last two epochs.
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["checkpoint-46", "checkpoint-69"]
    own = {"MANYCPU_DATA": env["MANYCPU_DATA"], "MANYCPU_OUTPUT": str(folder / "alone")}
    own["MANYCPU_RESUME_FROM"] = str(folder / "checkpoints" / "checkpoint-69")
    found = training.run(parse(OPTIONS, own), own)
    # In half of the batches, its three epochs have twice as many steps.
    assert (found["resumed_from_step"], found["train_steps"]) == (135, 135)
    assert "train_samples_per_second" not in found  # no step was left to train
    assert found["accuracy"] == results(folder / "output")["accuracy"]


@pytest.mark.usefixtures("alone")
def test_a_resumed_training_has_the_learning_rates_of_its_own_epochs(
    tmp_path: Path,
    env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from manycpu.pipeline.recipes.image_classification import training

    monkeypatch.setenv("MANYCPU_RUN", "test")  # without it there are no events
    (tmp_path / "digits").mkdir()
    for digit in sorted(Path(env["MANYCPU_DATA"]).glob("[01]_*.jpg"))[::12]:
        (tmp_path / "digits" / digit.name).symlink_to(digit)

    def rates(output: str, lr: str, epochs: str, **more: str) -> dict[int, float]:
        own = {"MANYCPU_DATA": str(tmp_path / "digits"), "MANYCPU_OUTPUT": str(tmp_path / output), **more}
        words = ("--lr", lr, "--num_epochs", epochs, "--batch_size", "4", "--logging_steps", "1")
        training.run(parse([*SMALL, *words], own), own)
        progress = told(capfd.readouterr().out, "progress")
        return {event["step"]: event["learning_rate"] for event in progress}

    rates("first", "1e-2", "1")
    resume = {"MANYCPU_RESUME_FROM": str(tmp_path / "first-checkpoints" / "checkpoint-6")}
    unbroken, resumed = rates("unbroken", "3e-2", "3"), rates("resumed", "3e-2", "3", **resume)
    assert list(resumed) == [*range(7, 19)]
    assert resumed == pytest.approx({step: rate for step, rate in unbroken.items() if step > 6})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "resnet50dd", "--image_size", "32"), r"no model 'resnet50dd'\. Did you mean resnet50d"),
        ((*SMALL, "--batch_size", "2000"), "1437 images to train on are too few.*--batch_size 1437 or less"),
        (
            ("--model", "test_vit3", "--no_pretrained", "--image_size", "32"),
            "no images of 32 x 32.*--image_size 160",
        ),
        (("--model", "{folder}"), r"run\.model: .* has no config\.json that names its model of timm"),
        (("--model", "test_resnet"), r"'test_resnet' cannot be loaded: .*--no_pretrained --unfreeze"),
    ],
)
def test_what_cannot_be_trained_ends_it_with_a_message(
    words: tuple[str, ...],
    said: str,
    env: dict[str, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.setenv("MANYCPU_DATA", env["MANYCPU_DATA"])
    monkeypatch.chdir(folder)
    assert main([word.format(folder=folder) for word in words]) == 2
    assert re.search(rf"error: .*{said}", capsys.readouterr().err)


@pytest.mark.usefixtures("alone")
def test_a_broken_image_is_named_before_anything_is_trained(
    tmp_path: Path, env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for digit in Path(env["MANYCPU_DATA"]).glob("[01]_*.jpg"):
        (tmp_path / digit.name).symlink_to(digit)
    (tmp_path / "1_9999.jpg").write_bytes(digit.read_bytes()[:100])
    assert main([*SMALL, "--data_dir", str(tmp_path)]) == 2
    assert re.search(r"run\.data: an image cannot be read: .*1_9999\.jpg: ", capsys.readouterr().err)
