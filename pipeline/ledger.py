"""What a run owns and how far it got: a file in the run's folder, written before anything it names exists."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.lock import locked
from manycpu.pipeline.spec.handle import Handle

__all__ = ["Entry", "Ledger", "Result", "VerbRecord", "ledgers"]

Result = Literal["done", "reused", "skipped", "failed"]


class VerbRecord(BaseModel):
    """How one verb went."""

    seconds: float
    result: Result
    error: str | None = None


class Entry(BaseModel):
    """What the ledger holds."""

    key: str
    name: str
    created: float
    """Seconds since the epoch."""
    run: dict[str, Any]
    target: dict[str, Any]
    attempt: int = 0
    handle: Handle | None = None
    cancelled: dict[int, str] = Field(default_factory=dict)
    """Attempt -> who ended it."""
    data: str | None = None
    """Where the staged data is, and below, the staged base model and the snapshot of the code."""
    model: str | None = None
    code: str | None = None
    digests: dict[str, str] = Field(default_factory=dict)
    """What was staged and built -> sha256 of its manifest."""
    export: dict[str, Any] | None = None
    verbs: dict[str, VerbRecord] = Field(default_factory=dict)

    @property
    def cancelled_by(self) -> str | None:
        """Who ended the present attempt; None when nobody did."""
        return self.cancelled.get(self.attempt)


class Ledger:
    """The ledger of one run: a folder of its own, and in it a file that several processes may update."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = directory / "ledger.json"

    def open(self, entry: Entry) -> Entry:
        """Begin the ledger, or go on with the one that is there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self._lock):
            if not self._file.exists():
                process.write_json(self._file, entry.model_dump(mode="json"))
        return self.read()

    def exists(self) -> bool:
        """Whether the run has begun, and has not been cleaned up."""
        return self._file.exists()

    def read(self) -> Entry:
        """Read what is recorded.

        Raises:
            FileNotFoundError: The run has not begun, or is cleaned up.
        """
        return Entry.model_validate_json(self._file.read_text())

    @contextmanager
    def update(self) -> Iterator[tuple[Entry, int]]:
        """Change the ledger under its lock; yields the entry and the lock's file descriptor."""
        with locked(self._lock) as lock:
            entry = self.read()
            yield entry, lock
            self.save(entry)

    def save(self, entry: Entry) -> None:
        """Write the entry; for callers inside :meth:`update` that must have it on disk before they go on."""
        process.write_json(self._file, entry.model_dump(mode="json"))

    @contextmanager
    def timed(self, verb: str) -> Iterator[VerbRecord]:
        """Record how a verb went; seconds add up over the tries of a run."""
        record, started = VerbRecord(seconds=0, result="done"), time.monotonic()
        try:
            yield record
        except BaseException as error:
            record.result, record.error = "failed", str(error) or type(error).__name__
            record.seconds = time.monotonic() - started
            with suppress(OSError):  # a full disk, perhaps: the error itself says more
                self._add(verb, record)
            raise
        record.seconds = time.monotonic() - started
        self._add(verb, record)

    def remove(self) -> None:
        """Delete the run's folder with everything in it, the ledger last."""
        with locked(self._lock):
            for child in self.directory.iterdir() if self.directory.exists() else ():
                if child != self._file:
                    _delete(child)
            _delete(self._file)
            _delete(self.directory)
            self._lock.unlink()

    def _add(self, verb: str, record: VerbRecord) -> None:
        if not self.exists():
            return
        with self.update() as (entry, _):
            before = entry.verbs.get(verb)
            if before is not None:
                record.seconds += before.seconds
            entry.verbs[verb] = record

    @property
    def _lock(self) -> Path:
        # Beside the folder, not in it: held while the folder is deleted.
        return self.directory.with_name(f".{self.directory.name}.lock")


def ledgers(runs: Path) -> list[Ledger]:
    """List the ledgers of a runs folder, oldest first."""
    found = [Ledger(folder) for folder in runs.iterdir() if folder.is_dir()] if runs.exists() else []
    return sorted((ledger for ledger in found if ledger.exists()), key=lambda ledger: ledger.read().created)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
