"""Parse the options: names of Accelerate's examples, defaults from its tutorial and from the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from manycpu.pipeline.recipes import arguments
from manycpu.pipeline.recipes.arguments import option
from manycpu.pipeline.recipes.image_classification.images import BATCH_SIZE, LABEL_PATTERN
from manycpu.pipeline.spec import recipe_options
from manycpu.pipeline.spec.errors import BadInputError

_COUNTS = ("batch_size", "checkpoints_total_limit", "image_size", "logging_steps", "num_epochs")


@dataclass
class ImageOptions:
    """What to train on which images, and how."""

    data_dir: str | None = option(None, "Folder of images; default: run.data.")
    label_pattern: str = option(
        LABEL_PATTERN,
        "Regular expression whose first group is the class in a file's name; not for one folder per class.",
    )
    output_dir: str | None = option(None, "Folder for the model; default: run.output.")
    model: str | None = option(
        None,
        "A model of timm by its name, a folder with one, or hf-hub:NAME; default: run.model, else resnet50d.",
    )
    pretrained: bool = option(True, "Begin with trained weights: those of run.model, else from the Hub.")
    unfreeze: bool = option(False, "Train the whole model, not only its head.")
    image_size: int = option(224, "Height and width that images are brought to.")
    batch_size: int = option(BATCH_SIZE, "Images of a step of each rank; twice as many in evaluation.")
    lr: float = option(3e-2, "Greatest learning rate of the one cycle, which begins at a 25th of it.")
    num_epochs: int = option(5, "Times that each image is trained on.")
    seed: int = option(42, "Seed of the split, the head's weights, the order and the crops.")
    num_workers: int | None = option(
        None, "Processes of each rank that load images; default: one for each four threads of it, 4 at most."
    )
    cpu: bool = option(True, "Train on CPUs: always so.")
    mixed_precision: Literal["no", "bf16"] = option("no", "bf16: autocast; default: run.dtype.")
    channels_last: bool = option(True, "Keep the channels of a pixel together in memory.")
    torch_compile: bool = option(False, "Compile the model, which takes a minute.")
    gradient_compression: Literal["no", "bf16", "fp16", "power_sgd"] = option(
        "no", "What gradients are sent as: bf16 halves the traffic, power_sgd sends a low-rank part of them."
    )
    logging_steps: int = option(10, "Steps between two reports of progress.")
    checkpointing_steps: str = option(
        "epoch", "Save a checkpoint after so many steps, each `epoch`, or `no`."
    )
    checkpoints_total_limit: int = option(2, "Checkpoints to keep, the newest ones.")
    resume_from_checkpoint: str | None = option(
        None, "Checkpoint to resume from; default: the newest of this run, else run.resume_from."
    )


class Options(NamedTuple):
    """All options of a training; the model goes to ``output``."""

    images: ImageOptions
    output: str
    checkpoints: str
    save_every: int | str | None
    """Steps between two checkpoints, or ``epoch``; None: none is saved."""
    notes: tuple[str, ...] = ()
    """Notes on options that were read in another way than they are written, or have no effect."""


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Parse the options, or one JSON file that has them; the environment of a run has defaults.

    Raises:
        BadInputError: There is no such option, or its value cannot be used.
    """
    kinds: list[Any] = [ImageOptions]
    parser = arguments.Parser(kinds, data_dir=env.get("MANYCPU_DATA"), output_dir=env.get("MANYCPU_OUTPUT"))
    words = recipe_options.words(argv)
    bf16, bf16_notes = arguments.bf16_by_default(recipe_options.read(words), env)
    parser.set_defaults(mixed_precision="bf16" if bf16 else "no")
    (images,) = parser.read(words)
    arguments.check_least(images, 1, *_COUNTS)
    arguments.check_least(images, 0, "num_workers", "seed")
    if images.lr <= 0:
        parser.error(f"--lr {images.lr:g} is no learning rate: it must be greater than 0")
    output, checkpoints, notes = arguments.folders(images.output_dir, env)
    text = images.checkpointing_steps
    save_every: int | str | None
    if text.isdecimal() and int(text) > 0:
        save_every = int(text)
    elif text in ("epoch", "no"):
        save_every = "epoch" if text == "epoch" else None
    else:
        raise BadInputError(
            f"--checkpointing_steps {text!r} is neither a number of steps nor `epoch` or `no`",
            field="run.args",
            fix="Give one of them",
        )
    if not images.pretrained and not images.unfreeze:
        notes.append("the body has random weights and is frozen: only --unfreeze has it learn")
    return Options(images, output, checkpoints, save_every, (*bf16_notes, *notes))
