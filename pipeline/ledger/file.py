"""The ledger of a run on machines: a file in the run's folder."""

import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.lock import locked
from manycpu.pipeline.ledger.base import LEASE_S, Entry, Lease, Ledger
from manycpu.pipeline.spec.credentials import secrets_in
from manycpu.pipeline.spec.errors import ForeignRunError, LedgerError, RunGoneError

_REMOVED_SUFFIX, _LOCK_SUFFIX = ".removed", ".lock"
_RUN_SUBFOLDERS = ("attempts", "checkpoints", "deliveries", "uses")  # of a run's folder on a host
OWNER = "owner"
"""Name of the file that says which ledger a run's folder belongs to: on a host, another may have its name."""

Elsewhere = Callable[[Entry], list[str]]
"""Deletes what an entry's run has in other places than its folder; returns what is left there."""


class FileLedger(Ledger):
    """A ledger in a file of the run's own folder, changed under a lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file, self._lease = directory / "ledger.json", directory / "lease.json"
        self._identity = ""

    def open(self, entry: Entry) -> Entry:
        """Create the ledger, or continue with the one that exists.

        Raises:
            ForeignRunError: Another living process works on it, or another machine's run has the folder.
            LedgerError: An earlier run of this name is not removed yet.
        """
        with locked(self._lock):
            if not self._file.exists():
                self._begin(entry)
            self.refuse_second_holder()  # a former holder is dead, or is this process
            self._write_lease(until=self.now() + LEASE_S, ended=False, kept=False, holder=None)
        return self.read()

    def _begin(self, entry: Entry) -> None:
        """Make the folder, its file ``owner`` and the ledger.

        The caller must hold the lock: without it, another process may remove the folder again.
        """
        if (self._trash / self._file.name).exists():
            raise LedgerError(
                f"an earlier run {self.directory.name} is not wholly removed",
                fix="See what `manycpu clean` says of it; or give another run id",
            )
        mark = self.directory / OWNER
        # Without a ledger here, these folders were made for a run whose ledger is on another machine.
        if mark.exists() and any((self.directory / name).exists() for name in _RUN_SUBFOLDERS):
            raise ForeignRunError(
                f"{self.directory} belongs to a run of another machine: {mark.read_text()}",
                fix="Give another run id; or delete that folder, if that run is not needed any more",
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        entry.owner = f"{uuid.uuid4().hex} of {socket.gethostname()}"
        process.write_text(mark, entry.owner)
        self.save(entry)

    def exists(self) -> bool:
        """Whether the run has begun, and has not been cleaned up."""
        return self._file.exists()

    def read(self) -> Entry:
        """Read the entry."""
        try:
            return Entry.model_validate_json(self._file.read_text())
        except FileNotFoundError as error:
            raise self._gone_error() from error
        except ValueError as error:
            raise LedgerError(
                f"{self._file} cannot be read, another version of manycpu wrote it perhaps: "
                f"{str(error).splitlines()[0]}",
                fix=f"Use that version; or remove the run, its model too: delete {self.directory}",
            ) from error

    def identity(self) -> str:
        """Return the ledger's ``owner``, which only this ledger has; once read, also when it is gone."""
        with suppress(RunGoneError):
            self._identity = self.read().owner
        return self._identity

    def lease(self) -> Lease:
        """Read the lease of the run."""
        return process.read_record(Lease, self._lease) or Lease()  # an earlier version wrote none

    def change_lease(self, only_if: Callable[[Lease], bool] | None = None, **fields: Any) -> bool:
        """Change fields of the lease, if ``only_if`` allows; returns whether they were changed."""
        if not self.directory.exists():  # checked first: the lock would make a file beside the missing folder
            raise self._gone_error()
        with locked(self._lock):
            if fields.get("holder"):
                self.refuse_second_holder()
            if only_if is not None and not only_if(self.lease()):
                return False
            self._write_lease(**fields)
            return True

    def _write_lease(self, **fields: Any) -> None:
        """Change fields of the lease's file; the caller holds the lock."""
        changed = Lease.model_validate(self.lease().model_dump() | fields)
        try:
            process.write_json(self._lease, changed.model_dump(mode="json"))
        except FileNotFoundError as error:
            self._lock.unlink(missing_ok=True)  # the folder is gone: leave no lock beside it
            raise self._gone_error() from error

    def _gone_error(self) -> RunGoneError:
        """Make the error that the ledger does not exist."""
        return RunGoneError(
            f"there is no ledger {self._file}: the run has not begun, or was taken away",
            fix="See who cleans that folder, and run again",
        )

    @contextmanager
    def update(self) -> Iterator[Entry]:
        """Change the entry in a ``with`` block under the lock.

        It is written only if the block changes it, so that a block that only reads works on a full disk. If
        the block raises an error, nothing is written.
        """
        with self.hold() as (entry, _):
            yield entry

    @contextmanager
    def hold(self) -> Iterator[tuple[Entry, int]]:
        """Change the entry in a ``with`` block under the lock; yield it and the lock's file descriptor.

        The entry is written as by :meth:`update`. A child process that inherits the descriptor holds the lock
        too.
        """
        with locked(self._lock) as lock:
            entry = self.read()
            before = entry.model_dump()
            yield entry, lock
            if entry.model_dump() != before:
                self.save(entry)

    def save(self, entry: Entry) -> None:
        """Write the entry at once; callers inside :meth:`hold` use this before they start something."""
        fields = entry.model_dump(mode="json")
        # Clean-up needs the output's credentials. Only the run's owner may read them, and the commands and
        # logs beside the ledger, which hold them too.
        has_secrets = bool(secrets_in([fields["run"], fields["target"], fields["attempts"]]))
        if has_secrets:
            self.directory.chmod(0o700)
        process.write_json(self._file, fields, 0o600 if has_secrets else 0o666)

    def remove(self, elsewhere: Elsewhere = lambda _: [], *, only_over: bool = False) -> list[str]:
        """Delete the run's folder with everything in it, and what the run has in other places.

        The folder is renamed first. So after a kill of this process, no half of a run looks like a whole one.

        Args:
            elsewhere: Deletes what the run has in other places. If it leaves something there, the renamed
                folder stays too, for :meth:`finish_removal`.
            only_over: Delete the run only if its lease is over, not if another process has renewed it.

        Returns:
            What is left in other places.
        """
        if not self.directory.parent.exists():  # no run was here, and the lock would make that folder
            return []
        with locked(self._lock):
            if only_over and not self.lease().over(self.now()):
                return []
            try:
                left = self._empty_trash(elsewhere)  # of a removal that was killed
            except OSError:  # such as files of another user: leave them, and remove this run all the same
                if (self._trash / self._file.name).exists():  # only the ledger names the other places
                    raise
                # This run's folder gets the name of that trash, which needs another.
                self._trash.rename(self._trash.with_name(f".{uuid.uuid4().hex}{_REMOVED_SUFFIX}"))
                left = []
            if not left and self.directory.exists():
                self.directory.rename(self._trash)
                left = self._empty_trash(elsewhere)
            if not left:
                self._lock.unlink()
            return left

    def finish_removal(self, elsewhere: Elsewhere = lambda _: []) -> list[str]:
        """Finish a removal; do nothing if the run has begun again, or another process holds its lock.

        Args:
            elsewhere: Deletes what the run has in other places. If it leaves something, the folder stays too.

        Returns:
            What is left in other places.
        """
        with suppress(BlockingIOError), locked(self._lock, wait=False):
            if self.is_half_removed:
                if left := self._empty_trash(elsewhere):
                    return left
                # A folder without the file `owner` is no new run's: a rank that still ran has made it again.
                if not (self.directory / OWNER).exists():
                    _delete(self.directory)
                self._lock.unlink()
        return []

    def _empty_trash(self, elsewhere: Elsewhere) -> list[str]:
        """Call ``elsewhere``; if it leaves nothing, delete the renamed folder; return what is left.

        A ledger that cannot be read is left too, and its error is returned.
        """
        trash = FileLedger(self._trash)
        try:
            if left := elsewhere(trash.read()):
                return left
        except RunGoneError:  # no ledger: there is no trash, or its other places are empty
            pass
        except LedgerError as error:  # such as a newer version's
            return [str(error)]
        if not self._trash.is_symlink():  # behind a link, the file is that of another folder
            trash._file.unlink(missing_ok=True)  # first: the rest may belong to another user, and stay
        _delete(self._trash)
        return []

    @property
    def is_half_removed(self) -> bool:
        """Whether a removal was begun and not finished: a part of the folder is left, or only the lock."""
        may_be = self._trash.exists() or not self.directory.exists()
        return may_be and not self._file.exists()  # last: may raise PermissionError, in another user's folder

    @property
    def _trash(self) -> Path:
        """The name that the folder has while it is deleted."""
        return self.directory.with_name(f".{self.directory.name}{_REMOVED_SUFFIX}")

    @property
    def _lock(self) -> Path:
        # Beside the folder, not in it: the lock is held while the folder is deleted.
        return self.directory.with_name(f".{self.directory.name}{_LOCK_SUFFIX}")


def ledgers(runs: Path) -> list[FileLedger]:
    """List the ledgers in a folder of runs, including those that only another user may read."""
    listed = []
    for folder in runs.iterdir() if runs.exists() else ():
        if folder.is_dir() and not folder.name.endswith(_REMOVED_SUFFIX):
            ledger = FileLedger(folder)
            with suppress(PermissionError):  # another user's: listed without this check
                if not ledger.exists():
                    continue
            listed.append(ledger)
    return listed


def half_removed(runs: Path) -> list[FileLedger]:
    """List the runs whose removal was killed: a part of the folder is left, or only the lock."""
    run_names: set[str] = set()
    for suffix in (_REMOVED_SUFFIX, _LOCK_SUFFIX):  # the whole name: a dot, the run's name, the suffix
        run_names |= {path.name[1:].removesuffix(suffix) for path in runs.glob(f".*{suffix}")}
    found = []
    for name in sorted(run_names):
        with suppress(PermissionError):  # another user's run
            if (ledger := FileLedger(runs / name)).is_half_removed:
                found.append(ledger)
    return found


def is_run(folder: Path) -> bool:
    """Whether a folder, wherever it lies, is that of a run: it has a ledger, or a host's part of a run."""
    if not os.access(folder, os.X_OK):
        return False
    ledger = folder / "ledger.json"
    if (folder / OWNER).is_file():
        return ledger.exists() or any((folder / name).exists() for name in _RUN_SUBFOLDERS)
    try:  # an older version wrote no file `owner`
        return bool(Entry.model_validate_json(ledger.read_text()))
    except (OSError, ValueError):
        return False


def _delete(folder: Path) -> None:
    """Delete a folder with everything in it, if it exists."""
    with suppress(FileNotFoundError):  # another process deletes it too
        shutil.rmtree(folder)
