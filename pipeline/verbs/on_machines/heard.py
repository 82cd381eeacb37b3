"""What the ranks of an attempt have said, remembered beside their log as it passes.

A log of any length is read block by block, and once: whoever asks later goes on from there.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field

from manycpu.pipeline.adapters import process
from manycpu.pipeline.report import Observed, Observer
from manycpu.pipeline.spec import events

__all__ = ["HEARD", "Heard"]

HEARD: Final = "heard.json"
_SAVE_EVERY: Final = 4 << 20  # bytes of the log: at most so much is read again after a kill


class _Kept(BaseModel):
    offset: int = 0
    """How much of the log was heard, in bytes."""
    observed: Observed = Field(default_factory=Observed)
    tails: dict[int, list[str]] = Field(default_factory=dict)
    """Rank -> its last lines."""


class Heard:
    """Hears a log.

    Args:
        directory: The attempt's folder.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / HEARD
        kept = _read(self._file)
        self._log, self._saved = process.LogFollower(directory / process.LOG, kept.offset), kept.offset
        self._observer = Observer(kept.observed, kept.tails)

    @property
    def observed(self) -> Observed:
        """What the ranks have said so far."""
        return self._observer.observed

    def hear(self) -> bool:
        """Hear the next block; whether there was any."""
        lines = self._log.read()
        for line in lines:
            self._observer.hear(events.split(line))
        if self._log.offset - self._saved > _SAVE_EVERY:
            self._save()
        return bool(lines)

    def hear_all(self) -> Observed:
        """Hear the log to its present end; what the ranks have said."""
        while self.hear():
            pass
        if self._log.offset > self._saved:
            self._save()
        return self.observed

    def _save(self) -> None:
        self._saved = self._log.offset
        kept = _Kept(offset=self._saved, observed=self.observed, tails=self._observer.tails)
        with suppress(OSError):  # a full disk, perhaps: then it is heard again
            process.write_json(self._file, kept.model_dump(mode="json", exclude_defaults=True))


def _read(file: Path) -> _Kept:
    try:
        return _Kept.model_validate_json(file.read_text())
    except (OSError, ValueError):
        return _Kept()
