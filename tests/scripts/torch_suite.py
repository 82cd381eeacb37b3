"""Run torch's own tests of its backends, those that it carries in its wheel: ``torch_suite.py BACKEND NAME [TEST ...]``.

As its ``test_distributed_spawn`` does, but that the ranks are forks of this process, which imports torch once. Of the
backends whose names it does not know the suite skips much: NAME is the backend that it takes BACKEND for when it decides
what to skip. A line of JSON for each test: ``{"test": ..., "result": "passed" | "skipped" | "failed", "why": ...}``.
"""

import json
import os
import sys
import time
import unittest
from typing import Self

LIMIT = 60  # seconds for one test; what still runs then, hangs


def environment(name: str) -> dict[str, str]:
    fixed = {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return fixed | {
        "BACKEND": name,
        "INIT_METHOD": "file://",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT),
    }


class Alias(str):
    """A backend's name, which the suite takes for another's where it compares names."""

    __slots__ = ("other",)

    def __new__(cls, name: str, other: str) -> Self:
        made = super().__new__(cls, name)
        made.other = other
        return made

    def __eq__(self, name: object) -> bool:
        return name in (self.other, str(self))

    __hash__ = str.__hash__


def suite(backend: str, name: str) -> type[unittest.TestCase]:
    """Build the suite; what it skips is decided when its module is loaded, what it uses when a test runs."""
    import torch.multiprocessing
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_OVERRIDE.clear()
    distributed_test.BACKEND = Alias(backend, name)
    # Messages between two ranks are gloo's own over ccl too, and bear its name.
    distributed_test.PROFILING_SUPPORTED_BACKENDS.append(backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # a folder of this test's own
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


class Told(unittest.TestResult):
    """Tells each result as soon as there is one."""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self.begun = time.monotonic()

    def tell(self, test: unittest.TestCase, result: str, why: str = "") -> None:
        seconds = round(time.monotonic() - self.begun, 1)
        line = {
            "test": test.id().rpartition(".")[2],
            "result": result,
            "seconds": seconds,
            "why": why[-3000:],
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        self.tell(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 - unittest's name
        self.tell(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802 - unittest's name
        self.tell(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure  # noqa: N815 - unittest's name


def main(backend: str, name: str, tests: list[str]) -> None:
    os.environ.update({key: value for key, value in environment(name).items() if key not in os.environ})
    if backend == "ccl":
        from manycpu.pipeline.node.ccl import register

        register()
    made = suite(backend, name)
    wanted = tests or unittest.TestLoader().getTestCaseNames(made)
    unittest.TestSuite(made(test) for test in wanted).run(Told())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
