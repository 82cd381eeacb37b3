"""Exit records: how each rank ended, as files beside the output, readable without its log; and exit codes.

The parent of a rank writes ``MEETING/RANK.json``: the exit code, and as lines of a log the events that decide
how its end is judged. A round whose ranks have all ended with 0 is finished: no part of it runs again.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

EXIT_NOT_TOGETHER: Final = 86
EXIT_PROOF: Final = 87
EXIT_BACKEND: Final = 88
EXIT_RETURNED: Final = 89
EXIT_CODES: Final = {
    EXIT_NOT_TOGETHER: "each rank trained alone, without torch.distributed or as a world of Accelerate by "
    "itself, or divided no batch among its devices",
    EXIT_PROOF: "proof of scale failed: the ranks that met, or their devices, are not those asked for",
    EXIT_BACKEND: "the collective backend or the device was not available",
    EXIT_RETURNED: "what the function returned cannot be passed on",
}
"""What a rank exits with when manycpu refuses to continue -> the cause."""

_LATEST: Final = 1e12  # seconds since the epoch: a larger number, which a program may write, is no time
FOLDER: Final = "exits"
"""Name of their folder in an attempt's."""
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "meeting": str,
    "rank": int,
    "host": str,
    "world_size": int,
    "code": int,
    "time": (int, float),
    "lines": list,
}


def write(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a rank, whole or not at all.

    Args:
        folder: The folder of an attempt's records.
        record: ``meeting``, ``rank``, ``host``, ``world_size``, ``code``, ``time`` and ``lines``.

    Raises:
        OSError: It cannot be written.
    """
    path = folder / str(record["meeting"]) / f"{record['rank']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")  # not .json: no reader takes it for a record
    with partial.open("w") as file:
        file.write(json.dumps(record))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def finished_round(folder: Path) -> list[dict[str, Any]]:
    """Return the records, sorted by rank, of the last round in which all ranks ended with 0; empty: none.

    ``folder`` is the folder of an attempt's records, with one folder for each meeting of ranks.

    Raises:
        OSError: The folder exists and cannot be read.
    """
    finished: list[dict[str, Any]] = []
    last_end = -math.inf
    for meeting_folder in folder.iterdir() if folder.is_dir() else ():
        if not meeting_folder.is_dir():
            continue
        records = sorted(_read(meeting_folder), key=itemgetter("rank"))
        ranks = [record["rank"] for record in records]
        if not ranks or ranks != [*range(records[0]["world_size"])]:
            continue  # the record of a rank is missing: not all have ended
        if all(record["code"] == 0 for record in records):
            end = max(float(record["time"]) for record in records)
            if end > last_end:
                finished, last_end = records, end
    return finished


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete records in the folder of a meeting."""
    for path in folder.iterdir():  # glob() would take a folder that cannot be listed for an empty one
        if path.suffix != ".json":
            continue
        with suppress(FileNotFoundError, ValueError, RecursionError):  # written to a full disk: not a record
            record = json.loads(path.read_text())
            if isinstance(record, dict) and _is_record(record):
                yield record


def _is_record(fields: dict[str, Any]) -> bool:
    """Whether the parsed JSON of a file has the fields of a record, with values of the right types."""
    if not all(isinstance(fields.get(name), kind) for name, kind in _FIELDS.items()):
        return False
    return abs(fields["time"]) < _LATEST and all(isinstance(line, str) for line in fields["lines"])
