"""Claims: a lock with a lease, so that only one run at a time writes to an output.

A second run with the same output is refused before it trains. On disk, an export replaces the whole folder:
there, a run is refused also if its output is inside a claimed one, or contains it. On S3 it is refused inside
a claimed one, which could not be exported later, since it would not be empty. Each run has its own claim
file: behind a URL in the folder, on disk beside the folder. The storage needs one property: a list shows
every file that was written before.

The key of a claim tells runs apart that have the same id and different ledgers, such as in two home folders
(``claim_key``). ``key`` means the key of the claim in this file.

A run first asks: it writes its file with ``held: false``, and lists the files of the others. It withdraws
(deletes its file) if another run holds the output, or if one with a lower key asks. It waits until those with
a higher key have withdrawn. Of any two runs, the one that lists last sees the other. So at most one run holds
the output; of runs that ask at the same time, it is the one with the lowest key.
"""

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, Field

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.output import CLAIM, claim_name, claimed_by, run_of
from manycpu.pipeline.transfer.manifest import TransferError
from manycpu.pipeline.transfer.partial import TakenOverError

log = logging.getLogger(__name__)

_EXPORT_LEASE_S: Final = 86_400.0  # one file may take so long to export: the claim is renewed between files
_RENEWAL_INTERVAL_S: Final = 600.0
_ASKING_LEASE_S: Final = 600.0  # short, so that a run killed while it asks does not block the others
_WITHDRAWAL_TIMEOUT_S: Final = 30.0  # to wait until other runs that ask have withdrawn
_POLL_INTERVAL_S: Final = 0.1


class Claim(BaseModel):
    """The content of a run's claim file."""

    key: str
    run: str
    place: str
    """Where the run is, for people: its host or namespace."""
    since: float
    """Seconds since the epoch; so is ``until``."""
    until: float
    """Infinite: the file cannot be read, and nothing tells when it was written."""
    held: bool | None
    """Whether the run holds the output; False: it asks; None: the file cannot be read."""
    holder: ProcessHandle | None = None
    """The process that runs all verbs: its death ends the claim. None: several processes work in turn."""
    path: str = Field("", exclude=True)
    """Path or URL of the claim's file; not in the file, as is ``output``."""
    output: str = Field("it", exclude=True)
    """The claimed output, for people: ``it``, or the path of an output inside it or around it."""

    def __str__(self) -> str:
        return f"{self.run} ({self.place}), since {_date(self.since)}"

    def is_over(self) -> bool:
        """Whether the claim was not renewed in time, or its process is known to be dead."""
        is_dead = self.holder is not None and process.is_alive(self.holder) is False
        return is_dead or self.until <= time.time()


class Claimant(NamedTuple):
    """A run that wants an output, and for how long."""

    key: str
    run: str = ""
    """Its name; empty: that of its earlier claim, or its key."""
    place: str = ""
    """Its host or namespace, for people; empty: this host."""
    seconds: float = _EXPORT_LEASE_S
    """How long the claim lasts, unless it is renewed."""
    holder: ProcessHandle | None = None
    """The process that does all of the run."""


class ClaimedError(TransferError):
    """Another run has claimed the output.

    Args:
        other: The claim of that run.
        key: The key of the claim of the run that is refused.
    """

    def __init__(self, other: Claim, key: str) -> None:
        same = " with this run id" if run_of(other.key) == run_of(key) else ""  # in another place
        super().__init__(f"another run{same} has {other.output}: {other}")
        expiry = f"ends by itself on {_date(other.until)}; " if math.isfinite(other.until) else ""
        self.fix = (
            "Give another output; or wait until that run has ended (its --run-id attaches to it there), or "
            f"end it there: `manycpu cancel {other.run}`, then `manycpu clean {other.run}`. Its claim "
            f"{expiry}where the run is gone for good, delete {other.path}"
        )


def _date(seconds: float) -> str:
    """Format seconds since the epoch as a date and time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


Trains = Callable[[Claim], bool]
"""Called with a claim that is over; returns whether its run still trains. Then the claim still counts."""


class _ClaimFiles(NamedTuple):
    """The claim files of one output, one for each run."""

    folder: Location
    stem: str | None
    """Name of an output on disk, beside which its claims are; None: the output is behind a URL."""
    trains: Trains = lambda _: False

    @classmethod
    def of(cls, output: Location, trains: Trains = lambda _: False) -> "_ClaimFiles":
        """Find where the claims of an output are: behind a URL in its folder, on disk beside its folder."""
        if output.local is None:
            return cls(output, stem=None, trains=trains)
        folder = output.local.resolve()  # the target of a link, as in the export
        return cls(Location.of(str(folder.parent), field="run.output"), stem=folder.name, trains=trains)

    def name(self, key: str) -> str:
        """Return the name of a run's claim file."""
        return claim_name(key) if self.stem is None else f".{self.stem}.{key}.claim"

    def path(self, key: str) -> str:
        """Return the path or URL of a run's claim file."""
        return f"{self.folder.root.rstrip('/')}/{self.name(key)}"

    def read(self, key: str) -> Claim | None:
        """Read a run's claim; None: there is no file. A file that cannot be read gives ``held`` None."""
        text = self.folder.read_text(self.name(key))
        if text is None:
            return None
        try:
            claim = Claim.model_validate_json(text)
        except ValueError:  # it is being written, and the storage shows a part of it; or a crash cut it
            modified = self.folder.modified(self.name(key))
            until = math.inf if modified is None else modified + _ASKING_LEASE_S
            claim = Claim(key=key, run=key, place="unknown", since=modified or 0, until=until, held=None)
        claim.path = self.path(key)
        return claim

    def read_own(self, key: str) -> Claim | None:
        """Read a run's claim as :meth:`read` does, also one that an earlier version made for the run."""
        if claim := self.read(key) or self.read(run_of(key)):
            claim.key = key
        return claim

    def remove_own(self, key: str) -> None:
        """Delete a run's claim, also one that an earlier version made for the run."""
        for name in {key, run_of(key)}:
            self.remove(name)

    def write(self, claim: Claim) -> None:
        """Create or replace a run's claim file."""
        if self.stem is None:
            self.folder.write_text(self.name(claim.key), claim.model_dump_json())
        else:
            Path(self.folder.root).mkdir(parents=True, exist_ok=True)
            process.write_json(Path(self.path(claim.key)), claim.model_dump(mode="json"))

    def remove(self, key: str) -> None:
        """Delete a run's claim file, if it exists, and the partial files that a killed process left."""
        names = [self.name(key)]
        if self.stem is not None:
            names += [path.name for path in process.partials(Path(self.path(key)))]
        for name in names:
            with suppress(FileNotFoundError):
                self.folder.remove(name)

    def others(self, key: str) -> list[Claim]:
        """List the claims of other runs that are not over; delete those of this output that are over.

        On disk and on S3, the list includes the claims of outputs around this one, on disk also of those
        inside it. They are never deleted, and a file of theirs that cannot be read does not count: a program
        may have written it.
        """
        others = []
        for claim in self.read_others(key):
            if self._is_over(claim):
                self.remove(claim.key)
            else:
                others.append(claim)
        for files in self._overlapping():
            with suppress(OSError):  # the folder is another user's
                for claim in files.read_others(key):
                    if claim.held is not None and not self._is_over(claim):
                        claim.output = str(Path(files.folder.root, files.stem or ""))
                        others.append(claim)
        return others

    def _is_over(self, claim: Claim) -> bool:
        return claim.is_over() and not self.trains(claim)

    def read_others(self, key: str) -> Iterator[Claim]:
        """Yield the claims of other runs on this output, also those that are over."""
        for name in self.folder.names(CLAIM if self.stem is None else f".{self.stem}."):
            other_key = self._key_in(name)
            # Without the ledger's part, a claim is one that an earlier version made for this run.
            if other_key is None or other_key in (key, run_of(key)):
                continue
            if claim := self.read(other_key):
                yield claim

    def _overlapping(self) -> Iterator["_ClaimFiles"]:
        """Yield where other outputs around this one, or on disk inside it, may have claims.

        An output on S3 with another one inside is refused because it is not empty.
        """
        if self.stem is None:
            yield from (_ClaimFiles(outer, stem=None) for outer in self.folder.outer())
            return
        folder = Path(self.folder.root, self.stem)
        for outer in folder.parents[:-1]:  # the last one is /, which has no folder for a claim beside it
            yield _ClaimFiles(Location.of(str(outer.parent), field="run.output"), outer.name)
        for inner, _, names in os.walk(folder):
            # A claim is called .STEM.KEY.claim, and a key has no dot.
            claims = [name for name in names if name.startswith(".") and name.endswith(".claim")]
            for stem in {name[1:].removesuffix(".claim").rpartition(".")[0] for name in claims}:
                yield _ClaimFiles(Location.of(inner, field="run.output"), stem)

    def _key_in(self, name: str) -> str | None:
        """Return the run's key in the name of a claim file of this output; None: it is another file.

        Behind a URL, where there is no stem, claim files have names of another form.
        """
        if self.stem is None:
            return claimed_by(name)
        key = name.removeprefix(f".{self.stem}.").removesuffix(".claim")
        # removeprefix returns a name without the prefix unchanged: so build the name from the key again, and
        # compare. A key has no dot: `.model.v2.KEY.claim` is no claim of `model`, but one of `model.v2`.
        return key if key and "." not in key and name == self.name(key) else None


def claim(output: Location, claimant: Claimant, trains: Trains = lambda _: False) -> None:
    """Claim an output for a run, or renew its claim.

    Args:
        output: The output.
        claimant: The run, and for how long the claim lasts.
        trains: Called with a claim that is over; returns whether its run still trains.

    Raises:
        ClaimedError: Another run holds it, or asks at the same time and has the lower key.
        OSError: The output cannot be written; other protocols have their own errors.
    """
    files = _ClaimFiles.of(output, trains)
    now = time.time()
    key = claimant.key
    mine = files.read_own(key)
    # If this run does not hold the output, it first asks, as the top of this file describes.
    if mine is None or not mine.held or mine.is_over():
        mine = Claim(
            key=key,
            run=claimant.run or key,
            place=claimant.place or f"host {socket.gethostname()}",
            since=now,
            until=now + _ASKING_LEASE_S,
            held=False,
            holder=claimant.holder,
        )
        # The file may be in the output of another run: write none while that run holds its output.
        _withdraw_if(files, key, _other_holder(files, key))
        files.write(mine)
        _withdraw_if(files, key, _wait_for_decision(files, key))
    mine.held = True
    mine.until = now + claimant.seconds
    mine.holder = claimant.holder or mine.holder  # an export renews the claim without naming a holder
    files.write(mine)
    if run_of(key) != key:
        files.remove(run_of(key))  # of an earlier version: the new file has replaced it
    # Another run may have claimed the output while this process was suspended until its own claim was over.
    _withdraw_if(files, key, _other_holder(files, key))


def has_claimed(output: Location, key: str) -> bool:
    """Whether the claim file of a run says that it holds the output; its lease may be over."""
    mine = _ClaimFiles.of(output).read_own(key)
    return mine is not None and bool(mine.held)


def _wait_for_decision(files: _ClaimFiles, key: str) -> Claim | None:
    """Wait until it is clear which of the asking runs gets the output, and return the claim of that run.

    None: this run gets the output, and all others have withdrawn. It is unclear while another run with a
    higher key asks, or while a claim cannot be read: it may be half written. If such a claim is still there
    after 30 seconds, it is returned.
    """
    deadline = time.monotonic() + _WITHDRAWAL_TIMEOUT_S
    while others := files.others(key):
        for other in others:
            if other.held:
                return other
        for other in others:
            if other.held is False and other.key < key:  # of runs that ask, the lowest key gets the output
                return other
        if time.monotonic() > deadline:
            return others[0]  # it has neither withdrawn nor become the holder: do not wait for ever
        time.sleep(_POLL_INTERVAL_S)
    return None


def _other_holder(files: _ClaimFiles, key: str) -> Claim | None:
    """Return the claim of another run that holds the output; None: no other does."""
    return next((other for other in files.others(key) if other.held), None)


def _withdraw_if(files: _ClaimFiles, key: str, other: Claim | None) -> None:
    """If another run has the output, delete this run's claim and raise ClaimedError."""
    if other is not None:
        files.remove_own(key)
        raise ClaimedError(other, key)


def refuse_if_held(output: Location, key: str, *, same_id: bool = False) -> None:
    """Check that no other run holds an output, without a claim of this run.

    ``same_id``: only runs with the same id count, which have another ledger.

    Raises:
        ClaimedError: Another run holds it.
    """
    other = _other_holder(_ClaimFiles.of(output), key)
    if other and (not same_id or run_of(other.key) == run_of(key)):
        raise ClaimedError(other, key)


def release(output: Location, key: str) -> None:
    """Delete the claim of one run; an error is only logged, because the claim ends by itself."""
    try:
        _ClaimFiles.of(output).remove_own(key)
    except Exception as error:  # noqa: BLE001 - every protocol of fsspec has errors of its own
        log.warning("the claim of the output cannot be deleted, and ends by itself: %s", error)


class Holding:
    """The claim of an output during its export; the export checks and renews it between files."""

    def __init__(self, output: Location, key: str) -> None:
        self._output, self._key, self._files = output, key, _ClaimFiles.of(output)
        self._renew()

    def check(self) -> None:
        """Check that the claim exists; renew it if the last renewal was more than ten minutes ago.

        Raises:
            ClaimedError: Another run has taken the output over.
            TransferError: The claim is gone.
        """
        if self._files.read(self._key) is None:
            _withdraw_if(self._files, self._key, _other_holder(self._files, self._key))
            raise TransferError("somebody deleted this run's claim of it while it was written")
        if time.monotonic() - self._renewed > _RENEWAL_INTERVAL_S:
            self._renew()

    def check_others(self) -> None:
        """Check that the claim exists, and that no other run holds the output.

        Raises:
            ClaimedError: Another run holds it.
            TransferError: The claim is gone.
        """
        self.check()
        _withdraw_if(self._files, self._key, _other_holder(self._files, self._key))

    def _renew(self) -> None:
        claim(self._output, Claimant(self._key))
        self._renewed = time.monotonic()


@contextmanager
def claimed(output: Location, key: str) -> Iterator[Holding]:
    """Hold the claim of an output during its export, and release the claim afterwards.

    A TransferError releases the claim too, unless another export of the same run has taken over. After other
    errors, such as a broken connection, a retry may help: the output stays claimed.

    Raises:
        ClaimedError: Another run holds it, before or after the block.
        TransferError: This run's claim is gone after the block.
    """
    holding = Holding(output, key)
    try:
        yield holding
    except TakenOverError:  # by another export of the same run, which needs the claim
        raise
    except TransferError:
        release(output, key)
        raise
    holding.check_others()
    release(output, key)
