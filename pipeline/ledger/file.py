"""The ledger of a run on machines: a file in the run's folder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.lock import locked
from manycpu.pipeline.ledger.base import Ledger
from manycpu.pipeline.ledger.entry import Entry
from manycpu.pipeline.spec.credentials import secrets_in

__all__ = ["FileLedger", "ledgers"]


class FileLedger(Ledger):
    """A folder of the run's own, and in it a file that is changed under a lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = directory / "ledger.json"

    def open(self, entry: Entry) -> Entry:
        """Begin the ledger, or go on with the one that is there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self._lock):
            if not self._file.exists():
                self.save(entry)
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
    def update(self) -> Iterator[Entry]:
        """Change the ledger under its lock."""
        with self.hold() as (entry, _):
            yield entry

    @contextmanager
    def hold(self) -> Iterator[tuple[Entry, int]]:
        """Change the ledger under its lock; yields the lock's file descriptor too, for a child to inherit."""
        with locked(self._lock) as lock:
            entry = self.read()
            yield entry, lock
            self.save(entry)

    def save(self, entry: Entry) -> None:
        """Write the entry; for callers inside :meth:`hold` that must have it on disk before they go on."""
        fields = entry.model_dump(mode="json")
        # An output's credentials are needed to clean up; they are for the run's owner alone.
        secret = bool(secrets_in([fields["run"], fields["target"]]))
        process.write_json(self._file, fields, 0o600 if secret else 0o666)

    def remove(self) -> None:
        """Delete the run's folder with everything in it, the ledger last."""
        with locked(self._lock):
            for child in self.directory.iterdir() if self.directory.exists() else ():
                if child != self._file:
                    _delete(child)
            _delete(self._file)
            _delete(self.directory)
            self._lock.unlink()

    @property
    def _lock(self) -> Path:
        # Beside the folder, not in it: held while the folder is deleted.
        return self.directory.with_name(f".{self.directory.name}.lock")


def ledgers(runs: Path) -> list[FileLedger]:
    """List the ledgers of a runs folder, oldest first."""
    found = [FileLedger(folder) for folder in runs.iterdir() if folder.is_dir()] if runs.exists() else []
    return sorted((ledger for ledger in found if ledger.exists()), key=lambda ledger: ledger.read().created)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
