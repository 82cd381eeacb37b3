"""The configuration files in configs/, with their {names} filled in."""

from pathlib import Path

from cluster.settings import HERE


def write(name: str, target: Path, /, **values: object) -> None:
    """Write configs/NAME to `target`; each {key} is replaced by its value, other braces stay unchanged."""
    text = (HERE / "configs" / name).read_text()
    for key, value in values.items():
        text = text.replace("{" + key + "}", str(value))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
