"""What is said of the processor and of libraries, by the files that Linux keeps."""

from pathlib import Path

import pytest

from manycpu.pipeline.spec.machine import bf16_warning, preload_libraries, processor_flags

XEON = "processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_bf16 amx_tile amx_bf16\n"
SKYLAKE = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\n"
HASWELL = "processor\t: 0\nflags\t\t: fpu sse2 avx2 fma\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
GRAVITON2 = "processor\t: 0\nFeatures\t: fp asimd crc32\n"


def seen(root: Path, cpuinfo: str) -> frozenset[str]:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(cpuinfo)
    return processor_flags(root)


@pytest.mark.parametrize("cpuinfo", [XEON, GRAVITON3, ""])
def test_hardware_for_bf16_and_machines_that_cannot_tell_are_not_warned_of(
    cpuinfo: str, tmp_path: Path
) -> None:
    assert bf16_warning(seen(tmp_path, cpuinfo)) is None


@pytest.mark.parametrize(
    ("cpuinfo", "price"),
    [
        (HASWELL, "about 36 times as long as in fp32"),
        (SKYLAKE, "about 4 times as long as in fp32"),
        (GRAVITON2, "many times as long as in fp32"),
    ],
)
def test_bf16_without_hardware_has_a_price_and_a_way_out(cpuinfo: str, price: str, tmp_path: Path) -> None:
    warning = bf16_warning(seen(tmp_path, cpuinfo))
    assert warning is not None
    assert price in warning
    assert "set run.dtype to fp32" in warning


def test_libraries_are_found_where_the_linker_looks_and_the_better_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    for name in ("usr/lib64/libtcmalloc.so.4", "usr/lib/libtcmalloc_minimal.so.4", "venv/lib/libiomp5.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert preload_libraries(tmp_path) == {
        "tcmalloc": str(tmp_path / "usr/lib/libtcmalloc_minimal.so.4"),
        "iomp5": str(tmp_path / "venv/lib/libiomp5.so"),
    }
    (tmp_path / "own").mkdir()
    (tmp_path / "own/libiomp5.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}/own")
    assert preload_libraries(tmp_path)["iomp5"] == str(tmp_path / "own/libiomp5.so")
