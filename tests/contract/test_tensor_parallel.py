"""Tensor and sequence parallelism of torch over the backend ccl: outputs and gradients of one process."""

import pytest

pytest.importorskip("torch")

from support import ccl_requirements, rank_worlds

from manycpu.pipeline.node.ccl import build

MISSING = ccl_requirements.missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING)]
CASES = ("tensor_parallel:2", "tensor_parallel:4", "tensor_and_data_parallel:4")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> rank_worlds.Found:
    build.built()
    return rank_worlds.run(tmp_path_factory.mktemp("worlds"), *CASES)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_one_process_does(found: rank_worlds.Found, case: str) -> None:
    result = found(case)
    size = int(case.partition(":")[2])
    assert result["codes"] == [0] * size, result["stderr"][-3000:]
    assert len(result["results"]) == size
    for rank in result["results"].values():
        assert rank["backend"] == "ccl"
        assert rank["compared"] == 11  # the output, its input's gradient, and those of nine parameters
        assert rank["wrong"] == []
