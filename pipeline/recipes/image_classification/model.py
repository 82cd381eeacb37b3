"""The model: created by timm, its body frozen, its input, and written in the form that timm reads."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torchvision.transforms import Compose, Resize, ToTensor  # type: ignore[import-untyped]

from manycpu.pipeline.recipes import base_folder
from manycpu.pipeline.recipes.image_classification.images import opened
from manycpu.pipeline.recipes.image_classification.options import ImageOptions
from manycpu.pipeline.spec.errors import BadInputError

_DEFAULT = "resnet50d"
_WEIGHTS = (".safetensors", ".bin", ".pth")
_ALTERNATIVES = (
    "Name a folder with a model of timm in run.model, see that the Hub or HF_HOME has the model, or give "
    "--no_pretrained --unfreeze to begin with random weights"
)


def create(options: ImageOptions, classes: int, env: Mapping[str, str]) -> Any:
    """Create the model, with a head for ``classes`` classes; without ``--unfreeze``, freeze all but the head.

    Set the seed before this call, because a new head has random weights.

    Raises:
        BadInputError: The model cannot be loaded, takes no images of this size, or has nothing to train.
    """
    name, weights = _source(options.model, env.get("MANYCPU_MODEL"))
    staged_weights = {"file": str(weights)} if weights and options.pretrained else None
    try:
        model: Any = timm.create_model(
            name, pretrained=options.pretrained, pretrained_cfg_overlay=staged_weights, num_classes=classes
        )
    except Exception as error:  # libraries that download raise errors of many kinds
        raise BadInputError(
            f"the model {name!r} cannot be loaded: {error}",
            field="run.model" if env.get("MANYCPU_MODEL") else "run.args",
            fix=_ALTERNATIVES if options.pretrained else "Check --model",
        ) from error
    model.float()  # bf16 is for the computation (autocast) alone
    size = options.image_size
    # Try it: some models take images of one size only.
    try:
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError) as error:
        raise BadInputError(
            f"the model takes no images of {size} x {size}: {error}",
            field="run.args",
            fix=f"Give --image_size {model.pretrained_cfg['input_size'][-1]}",
        ) from error
    if not options.unfreeze:
        model.requires_grad_(requires_grad=False)
        model.get_classifier().requires_grad_(requires_grad=True)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise BadInputError("the model has no head to train", field="run.args", fix="Add --unfreeze")
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def normalization(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the standard deviation of each channel by which the model's input is normalised."""
    mean, std = (torch.tensor(model.pretrained_cfg[name])[None, :, None, None] for name in ("mean", "std"))
    return mean, std


def evaluation_transform(size: int) -> Any:
    """Return the transform that makes a tensor of an image for evaluation, without randomness."""
    return Compose([Resize((size, size)), ToTensor()])


def pixels(file: str | Path, transform: Any) -> torch.Tensor:
    """Read an image file, and transform it to a tensor; raises OSError if it cannot be read or decoded."""
    with opened(file) as image:
        transformed: torch.Tensor = transform(image.convert("RGB"))
        return transformed


def write(model: Any, folder: Path, classes: tuple[str, ...], size: int) -> None:
    """Write ``model.safetensors`` and ``config.json``, which timm reads as ``local-dir:FOLDER``.

    ``size`` is the height and width of the images that it was trained on.
    """
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "input_size": (3, size, size),
        "test_input_size": None,  # else timm may evaluate at the size of the base model
        # How evaluation brings an image to its size.
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "interpolation": "bilinear",
    }
    model.to(memory_format=torch.contiguous_format)  # safetensors writes no other
    save_for_hf(model, str(folder), model_config={"label_names": list(classes)}, safe_serialization=True)


def _source(name: str | None, staged: str | None) -> tuple[str, Path | None]:
    """Return the model's name as timm reads it, and the file with its weights; None: timm finds them itself.

    If both ``name`` and ``staged`` are given, and ``name`` is no folder, it is the architecture, and
    ``staged`` has the weights.

    Args:
        name: The option ``--model``.
        staged: Where run.model was staged.

    Raises:
        BadInputError: timm has no such model, or the folder to read lacks config.json or weights.
    """
    folder = staged
    if name is not None:  # the option wins: a folder, or a name that timm knows
        folder = name if Path(name).is_dir() else None
    if folder:
        base_folder.check_timm(Path(folder))
        return f"local-dir:{Path(folder)}", None
    if name is None:
        return _DEFAULT, None
    # After a dot, the name has the tag of its weights, as in resnet50.a1_in1k.
    if not name.startswith("hf-hub:") and not timm.is_model(name.partition(".")[0]):
        similar = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise BadInputError(
            f"timm {timm.__version__} has no model {name!r}",
            field="run.args",
            fix=f"Did you mean {', '.join(similar)}?" if similar else "`timm.list_models()` lists them",
        )
    return name, _weights(Path(staged)) if staged else None


def _weights(staged: Path) -> Path:
    """Return the one file with weights: ``staged`` itself, or a file in that folder.

    Raises:
        BadInputError: There is no such file, or more than one.
    """
    if staged.is_file():
        candidates = [staged]
    else:
        candidates = [path for path in staged.iterdir() if path.suffix in _WEIGHTS]
    if len(candidates) != 1:
        raise BadInputError(
            f"{staged} has {len(candidates)} files with weights ({', '.join(_WEIGHTS)}); one is needed",
            field="run.model",
            fix="Name a folder with the weights of the model that --model names, or leave run.model out",
        )
    return candidates[0]
