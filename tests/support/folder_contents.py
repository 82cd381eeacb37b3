"""Folders that tests copy, and their contents."""

from pathlib import Path

from manycpu.pipeline.adapters.storage import Location


def location(path: Path) -> Location:
    return Location.of(str(path), "run.data")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
