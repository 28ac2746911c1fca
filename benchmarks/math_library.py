"""Whether a process's first vector function is exact: ``python -m benchmarks.math_library``, 4 minutes.

``make measure-math-library``. torch's CPU kernels call MKL's vector functions from several OpenMP threads. Counted: how
often the first such call is wrong (``benchmarks/scripts/first_calls.py``), with and without the ``settle()`` that
``clusterddp.init()`` begins with, on a machine that is kept busy, in a process in which MKL is made to forget the calls
before. ``--quick`` takes a minute.

The bar: after ``settle()``, at most a tenth as many are wrong, by the upper end of the interval. None is expected.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rows import Row, within
from benchmarks.sides import REPOSITORY, SCRIPTS

SCRIPT = SCRIPTS / "first_calls.py"
THREADS = (2, 4)
ALLOWED = 0.1
#: Wrong results without ``settle()`` after which a line ends.
ENOUGH = 60
TEXT = """# The first vector function of a process

How often the first `torch.sqrt` of a process is wrong, with and without `settle()`, on a busy machine. MKL's
record of the CPU is reset before each call."""


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


def counted(threads: int, seconds: float, burners: int) -> dict[str, Any]:
    """The counts of first calls on so many threads."""
    shape = {"threads": threads, "enough": ENOUGH, "seconds": seconds, "burners": burners}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in shape.items())]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, check=True)
    return {"threads": threads, **json.loads(done.stdout)}


def most(wrong: int, calls: int) -> float:
    """The upper end of the exact 95% interval (Clopper-Pearson) of a share, by bisection."""
    low, high = wrong / calls, 1.0
    for _ in range(60):
        share = (low + high) / 2
        term = tail = (1 - share) ** calls
        for number in range(wrong):
            term *= (calls - number) / (number + 1) * share / (1 - share)
            tail += term
        low, high = (share, high) if tail > 0.025 else (low, share)
    return high


def row(figures: dict[str, Any]) -> Row | None:
    """Of the common table; None where no result was wrong without ``settle()``, so that nothing can be compared.

    The interval is exact for a given sum of wrong results: without an effect, each belongs to either side with equal
    chances, as both made equally many calls.
    """
    plain, settled = figures["plain"], figures["settled"]
    if not plain["wrong"]:
        return None
    share = most(settled["wrong"], plain["wrong"] + settled["wrong"])
    ours, limit = (1000 * side["wrong"] / side["calls"] for side in (settled, plain))
    name = f"wrong first vector functions, {figures['threads']} threads, made to forget"
    ratio, high = ours / limit, max(ours / limit, share / (1 - share))
    return Row(name, "of 1000", ours, limit, "without settle()", ratio, 0.0, high, ALLOWED, within(ALLOWED, 0.0, high))


def measure(quick: bool) -> report.Found:
    burners = len(os.sched_getaffinity(0))
    found = [counted(threads, 25 if quick else 120, burners) for threads in THREADS]
    lines = [
        [figures["threads"], words, figures[side]["calls"], figures[side]["wrong"], f"{figures[side]['largest']:.1e}"]
        for figures in found
        for side, words in (("plain", "without"), ("settled", "with `settle()`"))
    ]
    table = report.table(["threads", "", "calls", "wrong", "largest error"], lines)
    made = [one for figures in found if (one := row(figures))]
    return report.Found({"burners": burners, "counts": found}, made, f"{burners} busy processes", {"Calls": table})


if __name__ == "__main__":
    report.main("math-library", __doc__, TEXT, measure, "25 seconds for each line")
