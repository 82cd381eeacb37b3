"""Verified copies: a manifest with sha256, resume after a break, atomic rename. Used by stage and export."""

from manycpu.pipeline.spec.output import MANIFEST
from manycpu.pipeline.transfer.claims import Claim, Claimant, ClaimedError, claim, has_claimed, release
from manycpu.pipeline.transfer.destination import (
    earlier,
    for_people,
    strangers,
    why_not_exported,
    write_beside,
    write_report,
)
from manycpu.pipeline.transfer.fetch import (
    InUseError,
    Lock,
    Stored,
    discard,
    fetch,
    is_copy,
    staged,
    store,
    strays,
)
from manycpu.pipeline.transfer.manifest import (
    DIGITS,
    File,
    Hashing,
    Manifest,
    Progress,
    Tick,
    TransferError,
    identity,
    scan,
)
from manycpu.pipeline.transfer.partial import Source, TakenOverError
from manycpu.pipeline.transfer.publish import discard_exports, publish, save, written

__all__ = [
    "DIGITS",
    "MANIFEST",
    "Claim",
    "Claimant",
    "ClaimedError",
    "File",
    "Hashing",
    "InUseError",
    "Lock",
    "Manifest",
    "Progress",
    "Source",
    "Stored",
    "TakenOverError",
    "Tick",
    "TransferError",
    "claim",
    "discard",
    "discard_exports",
    "earlier",
    "fetch",
    "for_people",
    "has_claimed",
    "identity",
    "is_copy",
    "publish",
    "release",
    "save",
    "scan",
    "staged",
    "store",
    "strangers",
    "strays",
    "why_not_exported",
    "write_beside",
    "write_report",
    "written",
]
