"""Verified copies: a manifest with sha256, resume after a break, atomic rename. Used by stage and export."""

from manycpu.pipeline.transfer.destination import earlier, strangers
from manycpu.pipeline.transfer.fetch import Stored, discard, fetch, staged, store
from manycpu.pipeline.transfer.hashing import Hashing
from manycpu.pipeline.transfer.manifest import (
    DIGITS,
    MANIFEST,
    File,
    Manifest,
    Progress,
    TransferError,
    identity,
    scan,
)
from manycpu.pipeline.transfer.partial import Source
from manycpu.pipeline.transfer.publish import publish, save

__all__ = [
    "DIGITS",
    "MANIFEST",
    "File",
    "Hashing",
    "Manifest",
    "Progress",
    "Source",
    "Stored",
    "TransferError",
    "discard",
    "earlier",
    "fetch",
    "identity",
    "publish",
    "save",
    "scan",
    "staged",
    "store",
    "strangers",
]
