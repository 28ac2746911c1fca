"""MKL's vector functions are first called in one thread: two threads that do so together may get inexact results."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BEFORE_AND_AFTER = """
import clusterddp
from tests.unit.test_math_library import cpu_number

number = cpu_number()
before = number.value
clusterddp.init(device="cpu")
print(before, number.value, flush=True)
"""


def cpu_number() -> ctypes.c_int | None:
    """The variable of this process in which MKL keeps the CPU's type, -1 before the first call of a vector function.

    None with a torch that has no MKL, or another one: the address is read from the first instruction of the function
    that returns the variable (``mov eax, [rip + distance]``). Imports torch.
    """
    import torch

    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).mkl_vml_serv_cpu_detect
    except (OSError, AttributeError):
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    code = ctypes.string_at(address, 6)
    if code[:2] != b"\x8b\x05":
        return None
    return ctypes.c_int.from_address(address + 6 + int.from_bytes(code[2:], "little", signed=True))


def test_init_leaves_the_detection_of_the_cpu_to_no_two_threads() -> None:
    if cpu_number() is None:
        pytest.skip("this torch has no MKL, or one that keeps the CPU's type elsewhere")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", BEFORE_AND_AFTER]
    before, after = subprocess.run(command, env=environment, check=True, text=True, capture_output=True).stdout.split()
    assert int(before) == -1 < int(after)
