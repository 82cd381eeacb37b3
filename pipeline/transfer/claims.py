"""The claim of an output: one run at a time holds it, and the others are refused before they train.

Each run has its own file: in the folder behind a URL, or beside the folder on disk. The storage needs one
property: a list shows every file that was written before. A run first asks: it writes its file, and lists the
others. It withdraws if another run holds the output, or if one with a lower key asks; it waits until those
with a higher key have withdrawn. Of any two runs, the one that lists last sees the other: so at most one
holds the output, and of runs that ask at the same time it is the one with the lowest key.
"""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.output import claim_name, claimed_by
from manycpu.pipeline.transfer.manifest import TransferError
from manycpu.pipeline.transfer.partial import TakenOverError

log = logging.getLogger(__name__)

_EXPORT_LEASE_S: Final = 86_400.0  # that an export may take between two files
_RENEWAL_INTERVAL_S: Final = 600.0
_ASKING_LEASE_S: Final = 600.0  # then a run that was killed while it asked blocks no other
_WITHDRAWAL_TIMEOUT_S: Final = 30.0  # for other runs that ask
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
    held: bool | None
    """Whether the run holds the output; False: it asks; None: the file cannot be read."""
    holder: ProcessHandle | None = None
    """The process that does all of the run, whose death ends the claim; None: several work in turn."""

    def __str__(self) -> str:
        return f"{self.run} ({self.place}), since {_date(self.since)}"

    def is_over(self) -> bool:
        """Whether it was not renewed in time, or its holder is known to be dead."""
        dead = self.holder is not None and process.is_alive(self.holder) is False
        return dead or self.until <= time.time()


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
    """Another run has the output.

    Args:
        other: The claim of that run.
        path: Its file.
    """

    def __init__(self, other: Claim, path: str) -> None:
        super().__init__(f"another run has it: {other}")
        end = f"ends by itself on {_date(other.until)}; " if other.until else ""
        self.fix = (
            "Give another output; or wait until that run has ended, or end it: "
            f"`manycpu cancel {other.run}`. Its claim {end}where the run is gone for good, delete {path}"
        )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


class _Files(NamedTuple):
    """The claims of one output."""

    folder: Location
    stem: str | None
    """Name of an output on disk, beside which its claims are; None: the output is behind a URL."""

    @classmethod
    def of(cls, output: Location) -> "_Files":
        if output.local is None:
            return cls(output, None)
        folder = output.local.resolve()  # the target of a link, as in the export
        return cls(Location.of(str(folder.parent), "run.output"), folder.name)

    def name(self, key: str) -> str:
        return claim_name(key) if self.stem is None else f".{self.stem}.{key}.claim"

    def path(self, key: str) -> str:
        return f"{self.folder.root.rstrip('/')}/{self.name(key)}"

    def read(self, key: str) -> Claim | None:
        text = self.folder.read_text(self.name(key))
        if text is None:
            return None
        try:
            return Claim.model_validate_json(text)
        except ValueError:  # it is being written, and the storage shows a part of it
            return Claim(
                key=key, run=key, place="unknown", since=0, until=time.time() + _ASKING_LEASE_S, held=None
            )

    def write(self, claim: Claim) -> None:
        text = claim.model_dump_json()
        if self.stem is None:
            self.folder.write_text(self.name(claim.key), text)
        else:
            Path(self.folder.root).mkdir(parents=True, exist_ok=True)
            process.write_json(Path(self.path(claim.key)), claim.model_dump(mode="json"))

    def remove(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self.folder.remove(self.name(key))

    def others(self, key: str) -> list[Claim]:
        """List the claims of other runs, and delete those that are over."""
        found = [
            self.read(other) for name in self.folder.names() if (other := self._key(name)) not in (None, key)
        ]
        living = []
        for claim in found:
            if claim is None:
                continue
            if claim.is_over():
                self.remove(claim.key)
            else:
                living.append(claim)
        return living

    def _key(self, name: str) -> str | None:
        if self.stem is None:
            return claimed_by(name)
        key = name.removeprefix(f".{self.stem}.").removesuffix(".claim")
        return key if key and "." not in key and name == self.name(key) else None


def claim(output: Location, claimant: Claimant) -> None:
    """Claim an output for a run, or renew its claim.

    Raises:
        ClaimedError: Another run holds it, or asks at the same time and has the lower key.
        OSError: The output cannot be written; other protocols have their own errors.
    """
    files, now, key = _Files.of(output), time.time(), claimant.key
    mine = files.read(key)
    if mine is None or not mine.held or mine.is_over():
        run, place = claimant.run or key, claimant.place or f"host {socket.gethostname()}"
        mine = Claim(key=key, run=run, place=place, since=now, until=now + _ASKING_LEASE_S, held=False)
        mine.holder = claimant.holder
        files.write(mine)
        _withdraw_for(files, key, _first(files, key))
    until, holder = now + claimant.seconds, claimant.holder or mine.holder
    files.write(mine.model_copy(update={"until": until, "held": True, "holder": holder}))
    _withdraw_for(files, key, _holding(files, key))  # claimed while this process was suspended past its time


def _first(files: _Files, key: str) -> Claim | None:
    """Find the run that goes first; None: this one, after the others have withdrawn."""
    deadline = time.monotonic() + _WITHDRAWAL_TIMEOUT_S
    while others := files.others(key):
        for other in sorted(others, key=lambda claim: not claim.held):
            if other.held or (other.held is False and other.key < key):
                return other
        if time.monotonic() > deadline:
            return others[0]
        time.sleep(_POLL_INTERVAL_S)
    return None


def _holding(files: _Files, key: str) -> Claim | None:
    return next((other for other in files.others(key) if other.held), None)


def _withdraw_for(files: _Files, key: str, other: Claim | None) -> None:
    if other is not None:
        files.remove(key)
        raise ClaimedError(other, files.path(other.key))


def release(output: Location, key: str) -> None:
    """Delete a run's claim, and no other's; if that fails, the claim ends by itself."""
    try:
        _Files.of(output).remove(key)
    except Exception as error:  # noqa: BLE001 - every protocol of fsspec has errors of its own
        log.warning("the claim of the output cannot be deleted, and ends by itself: %s", error)


class Holding:
    """The claim of an output during its export."""

    def __init__(self, output: Location, key: str) -> None:
        self._output, self._key, self._files = output, key, _Files.of(output)
        self._renew()

    def check(self) -> None:
        """Check that the claim exists, and renew it in time.

        Raises:
            ClaimedError: Another run has taken the output over.
            TransferError: The claim is gone.
        """
        if self._files.read(self._key) is None:
            _withdraw_for(self._files, self._key, _holding(self._files, self._key))
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
        _withdraw_for(self._files, self._key, _holding(self._files, self._key))

    def _renew(self) -> None:
        claim(self._output, Claimant(self._key))
        self._renewed = time.monotonic()


@contextmanager
def claimed(output: Location, key: str) -> Iterator[Holding]:
    """Hold an output during its export; after an error that a retry may pass, it stays claimed.

    Raises:
        ClaimedError: Another run holds it.
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
