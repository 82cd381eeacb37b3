"""What is said about bf16 on a processor, by what Linux says of it."""

import pytest

from manycpu.pipeline.recipes.hardware import bf16_warning

XEON = "processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_bf16 amx_tile amx_bf16\n"
SKYLAKE = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\n"
HASWELL = "processor\t: 0\nflags\t\t: fpu sse2 avx2 fma\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
GRAVITON2 = "processor\t: 0\nFeatures\t: fp asimd crc32\n"


@pytest.mark.parametrize("cpuinfo", [XEON, GRAVITON3, ""])
def test_hardware_for_bf16_and_machines_that_cannot_tell_are_not_warned_of(cpuinfo: str) -> None:
    assert bf16_warning(cpuinfo) is None


@pytest.mark.parametrize(
    ("cpuinfo", "price"),
    [
        (HASWELL, "about 36 times as long as in fp32"),
        (SKYLAKE, "about 4 times as long as in fp32"),
        (GRAVITON2, "many times as long as in fp32"),
    ],
)
def test_bf16_without_hardware_has_a_price_and_a_way_out(cpuinfo: str, price: str) -> None:
    warning = bf16_warning(cpuinfo)
    assert warning is not None
    assert price in warning
    assert "set run.dtype to fp32" in warning
