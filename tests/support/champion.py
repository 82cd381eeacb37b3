"""Candidates for a champion model, as trainings leave them."""

from pathlib import Path

from manycpu.operators.champion.promotions import Candidate
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.transfer import Hashing, save


def trained(folder: Path, name: str, files: dict[str, str] | None = None) -> Candidate:
    """Create the exported model of a training and its report; return the candidate.

    ``files`` are the model's files: name -> content; None: one file, whose content is ``name``.
    """
    made, output = folder / "made" / name, folder / "runs" / name
    made.mkdir(parents=True)
    for file, content in (files or {"model.pt": name}).items():
        (made / file).write_text(content)
    manifest = save(Hashing(Location.of(str(made), "test")), output, "key")
    (output / "report.json").write_text("{}")
    return Candidate(
        name=name,
        key="key",
        path=str(output),
        sha256=manifest.digest,
        rate=0.1,
        data="/data/v0001",
        accuracy=0.9,
    )
