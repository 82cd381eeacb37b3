"""What an output says of the run that wrote it.

>>> replaceable('{"key": "0123456789", "state": "succeeded"}', "0123456789")
True
>>> replaceable('{"loss": 0.5}', "0123456789")
False
"""

import json
from typing import Any, Final

__all__ = ["MANIFEST", "MANIFESTS", "OTHER_MANIFEST", "REPORT", "fields_of", "replaceable"]

MANIFEST: Final = "manifest.json"
"""Lists what an export wrote; its ``run`` is the key of the run that did."""
OTHER_MANIFEST: Final = "manifest.manycpu.json"
"""Its name where the program wrote a ``manifest.json`` of its own."""
MANIFESTS: Final = (OTHER_MANIFEST, MANIFEST)
REPORT: Final = "report.json"


def fields_of(text: str | None) -> dict[str, Any]:
    """Read the fields of one of the two; none where it is something else."""
    try:
        fields = json.loads(text or "")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def replaceable(report: str | None, key: str) -> bool:
    """Whether a run may write its report over one: its own, or that of a run which left no model."""
    if report is None:
        return True
    fields = fields_of(report)
    if "key" not in fields or "state" not in fields:
        return False
    return fields["key"] == key or (fields["state"] != "succeeded" and not fields.get("export"))
