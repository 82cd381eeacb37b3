"""The files that a run writes beside its model: their names, and how to tell which run wrote them.

>>> replaceable('{"key": "0123456789", "state": "succeeded"}', "0123456789")
True
>>> replaceable('{"loss": 0.5}', "0123456789")
False
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from itertools import count, takewhile
from typing import Any, Final

from manycpu.pipeline.spec.naming import is_key

RETURNED: Final = "returned"
"""Folder beside the output, for the return value of a notebook's function."""
MANIFEST: Final = "manifest.json"
"""Lists the files of an export; its field ``run`` is the key of the run that wrote it."""
METRICS: Final = "metrics.json"
"""What ``metrics()`` of a rank writes to the output; the report has it too."""
REPORT: Final = "report.json"
PAGE: Final = "report.html"
"""Shows report.json to people; only outputs on disk have it."""
LOG: Final = "run.log"
"""What the ranks wrote, for people."""
CLAIM: Final = ".manycpu-claim-"
PAGE_BEGINS: Final = "<!doctype html>\n<!-- a report of manycpu -->\n"
LOG_BEGINS: Final = "# the log of a run of manycpu\n"
FOR_PEOPLE: Final = {PAGE: PAGE_BEGINS, LOG: LOG_BEGINS}
"""Files beside the report -> how they begin: a program may have its own file of that name."""


def partial_name(name: str) -> str:
    """Name the file that a record in an output is written to first, before it is renamed."""
    return f".{name}.partial"


OUTDATED: Final = partial_name(MANIFEST)
"""The manifest of an export behind a URL, while a new export of the same run deletes its files."""
PARTIALS: Final = (*map(partial_name, (REPORT, *FOR_PEOPLE)), OUTDATED)
"""Files that a process leaves in an output when it is killed while it writes."""


def claim_key(key: str, ledger: str) -> str:
    """Return the key of a run's claim: the run's key, and 8 digits of a hash of what identifies its ledger.

    In another place, a run with the same id has the same key, and another ledger. ``ledger`` empty: it is not
    known, and the claim has the run's key, as those of earlier versions.

    >>> claim_key("1a2b3c4d5e", "the uid of a ConfigMap"), claim_key("1a2b3c4d5e", "")
    ('1a2b3c4d5e-8e10f393', '1a2b3c4d5e')
    """
    return f"{key}-{hashlib.sha256(ledger.encode()).hexdigest()[:8]}" if ledger else key


def run_of(claim_key: str) -> str:
    """Return the key of the run in the key of its claim; another text is returned unchanged.

    >>> run_of("1a2b3c4d5e-8e10f393"), run_of("1a2b3c4d5e"), run_of("qa-1a2b3c4d5e")
    ('1a2b3c4d5e', '1a2b3c4d5e', 'qa-1a2b3c4d5e')
    """
    key, _, ledger = claim_key.partition("-")
    return key if is_key(key) and re.fullmatch(r"[0-9a-f]{8}", ledger) else claim_key


def claim_name(key: str) -> str:
    """Name the file by which a run claims an output behind a URL; ``key`` is that of the claim."""
    return f"{CLAIM}{key}.json"


def claimed_by(name: str) -> str | None:
    """Return the key of the claim that a file is; None: the file is no claim.

    ``name`` is the file's path below the output; claims are at its top.

    >>> claimed_by(claim_name("1a2b3c4d5e")), claimed_by("model/.manycpu-claim-1.json")
    ('1a2b3c4d5e', None)
    """
    # removeprefix returns a name without the prefix unchanged: so the name is built from the key again.
    key = name.removeprefix(CLAIM).removesuffix(".json")
    is_claim = bool(key) and "/" not in name and name == claim_name(key)
    return key if is_claim else None


def manifest_name(taken: Collection[str]) -> str:
    """Choose a name for the manifest that is not in ``taken``: the files at the top of the program's output.

    >>> manifest_name({"manifest.json", "manifest.manycpu.json"})
    'manifest.manycpu-2.json'
    """
    return next(name for name in _manifest_names() if name not in taken)


def program_report_name(taken: Collection[str]) -> str:
    """Choose a new name for the program's own report.json, whose name the run's report needs.

    ``taken``: the names at the top of the program's output.
    """
    return next(name for name in _numbered("report.program") if name not in taken)


def manifests(has: Callable[[str], bool]) -> list[str]:
    """List the names that the manifest may have in an output; the first of them that exists is the manifest.

    Other files with one of these names are the program's own: their names were taken when the manifest got
    its name. ``has`` returns whether the output has a file of a name.
    """
    names = _manifest_names()
    first_two = [next(names), next(names)]  # listed even if the output does not have them
    return [*reversed([*first_two, *takewhile(has, names)])]


def _manifest_names() -> Iterator[str]:
    """Yield the names that a manifest may have, without end, in the order in which they are tried."""
    yield MANIFEST
    yield from _numbered("manifest.manycpu")


def _numbered(stem: str) -> Iterator[str]:
    """Yield ``STEM.json``, ``STEM-2.json``, ``STEM-3.json`` and so on, without end."""
    yield f"{stem}.json"
    yield from (f"{stem}-{number}.json" for number in count(2))


def fields_of(text: str | None) -> dict[str, Any]:
    """Parse the fields of a manifest or a report; empty: the text is neither."""
    try:
        fields = json.loads(text or "")
    except (ValueError, RecursionError):  # RecursionError: no manifest or report is nested so deeply
        return {}
    return fields if isinstance(fields, dict) else {}


def is_page(text: str | None) -> bool:
    """Whether a report.html was written by manycpu, and is no file of the program's own."""
    return text is not None and text.startswith(PAGE_BEGINS)


def replaceable(report: str | None, key: str) -> bool:
    """Whether a run may overwrite the report.json of an output: its own, or of a run that left no model.

    Args:
        report: The text of report.json; None: the output has none.
        key: The key of the run that would overwrite it.
    """
    if report is None:
        return True
    fields = fields_of(report)
    if "key" not in fields or "state" not in fields:  # a file of that name that manycpu did not write
        return False
    return fields["key"] == key or (fields["state"] != "succeeded" and not fields.get("export"))
