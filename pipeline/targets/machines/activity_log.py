"""Collect what the ranks of an attempt have reported, from its log, and save the result beside the log.

The log is read once, block by block. A later reader resumes from the saved offset.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field

from manycpu.pipeline.adapters import process
from manycpu.pipeline.observed import Observer
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.observed import Observed

__all__ = ["ACTIVITY", "ActivityLog"]

ACTIVITY: Final = "heard.json"
_SAVE_EVERY: Final = 4 << 20  # bytes of the log; after a kill, at most so many are read again


class _Saved(BaseModel):
    offset: int = 0
    """Bytes of the log that were read."""
    observed: Observed = Field(default_factory=Observed)
    tails: dict[int, list[str]] = Field(default_factory=dict)
    """Rank -> its last lines."""


class ActivityLog:
    """Reads the log of an attempt, and saves what its ranks have reported.

    Args:
        directory: The attempt's folder.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / ACTIVITY
        saved = _read(self._file)
        self._log, self._saved = process.LogFollower(directory / process.LOG, saved.offset), saved.offset
        self._observer = Observer(saved.observed, saved.tails)

    @property
    def observed(self) -> Observed:
        """What the ranks have reported so far."""
        return self._observer.observed

    def _read_block(self) -> bool:
        """Read the next block of the log; False: there is no new line."""
        lines = self._log.read()
        for line in lines:
            self._observer.hear(events.split(line))
        if self._log.offset - self._saved > _SAVE_EVERY:
            self._save()
        return bool(lines)

    def read_new(self) -> Observed:
        """Read the log to its present end; return what the ranks have reported."""
        while self._read_block():
            pass
        return self.observed

    def read_all(self) -> Observed:
        """Read the log to its present end, and save the result; return what the ranks have reported."""
        self.read_new()
        if self._log.offset > self._saved:
            self._save()
        return self.observed

    def _save(self) -> None:
        self._saved = self._log.offset
        saved = _Saved(offset=self._saved, observed=self.observed, tails=self._observer.tails)
        with suppress(OSError):  # such as a full disk: the log is read again then
            process.write_json(self._file, saved.model_dump(mode="json", exclude_defaults=True))


def _read(file: Path) -> _Saved:
    try:
        return _Saved.model_validate_json(file.read_text())
    except (OSError, ValueError):
        return _Saved()
