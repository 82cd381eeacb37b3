"""Find the checkpoint to resume from: the newest that was written whole."""

import json
import re
import zipfile
from pathlib import Path

__all__ = ["fault", "latest_first", "newest", "of_others", "step"]

_NAME = re.compile(r"checkpoint-(\d+)")
_TORCH_FILES = ("optimizer", "scheduler")
_TORCH_SUFFIXES = (".pt", ".bin")  # of the Trainer, and of Accelerate


def newest(folder: str | Path, *, since: float | None = None) -> tuple[Path | None, list[str]]:
    """Find the checkpoint of the greatest step that is whole.

    Args:
        folder: Where the checkpoints are.
        since: Leave out what was written before this time, in seconds since 1970.

    Returns:
        Its folder, or None; and what is wrong with each later one.
    """
    skipped: list[str] = []
    for checkpoint in latest_first(Path(folder)):
        if since is not None and _written(checkpoint) < since:
            continue
        reason = fault(checkpoint)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint} is skipped: {reason}")
    return None, skipped


def latest_first(folder: Path) -> list[Path]:
    """List the checkpoints of a folder by their steps, whole or not."""
    numbered = [
        (int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


def of_others(folder: Path, run: str) -> int:
    """Count the checkpoints beside a run's own folder: of other runs, or of earlier versions of manycpu."""
    if folder.name != run:
        return 0
    shared = folder.parent
    paths = [*shared.glob("checkpoint-*"), *shared.glob("*/checkpoint-*")]
    return sum(path.parent != folder and _NAME.fullmatch(path.name) is not None for path in paths)


def fault(checkpoint: Path) -> str | None:
    """Explain why a checkpoint of a recipe cannot be resumed from; None when it is whole."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    # The state is written last.
    if step(checkpoint) is None:
        return "it has no readable trainer_state.json: it was not written to its end"
    weights = sorted(checkpoint.glob("model*.safetensors"))
    if not weights:
        return "it has no model*.safetensors"
    if broken := [file.name for file in weights if not _whole_safetensors(file)]:
        return f"{broken[0]} is cut short or damaged"
    return next((problem for name in _TORCH_FILES if (problem := _torch_fault(checkpoint, name))), None)


def step(checkpoint: Path) -> int | None:
    """Read the step of a checkpoint; None when it cannot be read."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _written(checkpoint: Path) -> float:
    # The folder may be older: a step that is done again goes into the same one.
    state = checkpoint / "trainer_state.json"
    return state.stat().st_mtime if state.exists() else checkpoint.stat().st_mtime


def _whole_safetensors(file: Path) -> bool:
    """Compare the size with what the header promises: 8 bytes of length, a JSON header, the tensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)


def _torch_fault(checkpoint: Path, name: str) -> str | None:
    files = [checkpoint / f"{name}{suffix}" for suffix in _TORCH_SUFFIXES]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return f"it has no {files[0].name}"
    # torch.save writes a zip, whose table of contents comes last.
    return None if zipfile.is_zipfile(file) else f"{file.name} is cut short or damaged"
