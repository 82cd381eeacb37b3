"""Many objects and a large one on a real S3 server."""

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from support import s3_server
from support.s3_server import Server

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location

OBJECTS = 20_000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with s3_server.running(tmp_path / "server") as running:
        for name, value in running.variables.items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield running


def test_many_objects_are_staged(server: Server, tmp_path: Path) -> None:
    folder = server.folder / "bucket" / "set"
    for number in range(OBJECTS):
        path = folder / f"{number % 100:02d}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
    there = Location.of("s3://bucket/set", "run.data")
    assert there.exists()  # imports what is imported later
    tracemalloc.start()
    items = there.items()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(items) == OBJECTS
    assert peak < 12 << 20, peak
    copied = transfer.fetch(there, tmp_path / "copy").manifest
    assert (len(copied.files), copied.size) == (OBJECTS, sum(len(str(each)) for each in range(OBJECTS)))
    assert (tmp_path / "copy" / "42" / "142.txt").read_text() == "142"


def test_a_model_of_many_parts_arrives(server: Server, tmp_path: Path) -> None:
    server.client().mkdir("bucket")
    (tmp_path / "source").mkdir()
    block = os.urandom(1 << 20)
    with (tmp_path / "source" / "model.safetensors").open("wb") as file:
        for number in range(500):
            file.write(number.to_bytes(4) + block)
    published = transfer.publish(tmp_path / "source", Location.of("s3://bucket/out", "run.output"), "key")
    there = Location.of("s3://bucket/out", "run.data")
    fetched = transfer.fetch(there.only(["model.safetensors"]), tmp_path / "copy").manifest
    assert fetched.digest == published.digest
