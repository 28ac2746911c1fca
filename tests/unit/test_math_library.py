"""MKL's vector functions are first called in one thread: two threads that do so together may get inexact results."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.math_library import SCRIPT, cpu_number
from benchmarks.sides import REPOSITORY

BEFORE_AND_AFTER = """
import clusterddp
from benchmarks.math_library import cpu_number

number = cpu_number()
before = number.value
clusterddp.init(device="cpu")
print(before, number.value, flush=True)
"""


def of_a_process(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *command], env=environment, check=True, text=True, stdout=subprocess.PIPE, timeout=240
    ).stdout


@pytest.fixture(autouse=True)
def _mkl() -> None:
    if cpu_number() is None:
        pytest.skip("this torch has no MKL, or one that keeps the CPU's type elsewhere")


def test_init_leaves_the_detection_of_the_cpu_to_no_two_threads() -> None:
    before, after = of_a_process("-c", BEFORE_AND_AFTER).split()
    assert int(before) == -1 < int(after)


@pytest.mark.product
def test_no_first_result_is_wrong_after_settling() -> None:
    """Others are, at this rate of first calls: MKL is made to forget what it knows of the CPU."""
    how = ["--threads=4", "--enough=10", "--seconds=200", "--burners=4"]
    found = json.loads(of_a_process(str(SCRIPT), *how))
    assert found["plain"]["wrong"] > 0, f"nothing to compare with: {found}"
    assert found["settled"]["wrong"] == 0, found
