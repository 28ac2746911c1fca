"""Whether a process's first vector function is exact: ``python -m benchmarks.math_library``, 8 minutes.

``make measure-math-library``. torch's CPU kernels call MKL's vector functions from several OpenMP threads. Counted: how
often the first such call of a process is wrong (``benchmarks/scripts/first_calls.py``), with and without the
``settle()`` that ``clusterddp.init()`` begins with, on a machine that is kept busy. In forked processes, where the
fault is rare; and in one process in which MKL is made to forget the calls before, where it is not. ``--quick`` takes
under 2 minutes.

The bar: after ``settle()``, at most a tenth as many are wrong, by the upper end of the interval. None is expected.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rows import Row, within

SCRIPT = Path(__file__).with_name("scripts") / "first_calls.py"
REPOSITORY = Path(__file__).resolve().parents[1]
THREADS = (2, 4)
ALLOWED = 0.1
#: Wrong results without ``settle()`` after which a line ends.
ENOUGH = 60
KINDS = {"forks": "a process each", "again": "made to forget"}


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


def counted(kind: str, threads: int, enough: int, seconds: float, burners: int) -> dict[str, Any]:
    """The counts of first calls on so many threads."""
    shape = {"kind": kind, "threads": threads, "enough": enough, "seconds": seconds, "burners": burners}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in shape.items())]
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=-1)
    if done.returncode:
        sys.exit(f"{SCRIPT.name} ended with {done.returncode}")
    return {"kind": kind, "threads": threads, **json.loads(done.stdout)}


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


def row(figures: dict[str, Any]) -> dict[str, Any] | None:
    """Of the common table; None where no result was wrong without ``settle()``, so that nothing can be compared.

    The interval is exact for a given sum of wrong results: without an effect, each belongs to either side with equal
    chances, as both made equally many calls.
    """
    plain, settled = figures["plain"], figures["settled"]
    if not plain["wrong"]:
        return None
    high = most(settled["wrong"], plain["wrong"] + settled["wrong"])
    ours, limit = (1000 * side["wrong"] / side["calls"] for side in (settled, plain))
    name = f"wrong first vector functions, {figures['threads']} threads, {KINDS[figures['kind']]}"
    ratio, high = ours / limit, max(ours / limit, high / (1 - high))
    met = within(ALLOWED, 0.0, high)
    return Row(name, "of 1000", ours, limit, "without settle()", ratio, 0.0, high, ALLOWED, met).as_json()


def described(measured: list[dict[str, Any]], rows: list[dict[str, Any]], burners: int) -> str:
    """The page."""
    lines = []
    for figures in measured:
        for side, words in (("plain", "without"), ("settled", "with `settle()`")):
            counts = figures[side]
            share, high = counts["wrong"] / counts["calls"], most(counts["wrong"], counts["calls"])
            per_1000 = f"{1000 * share:.2f} (at most {1000 * high:.2f})"
            case = [KINDS[figures["kind"]], figures["threads"], words]
            lines.append([*case, counts["calls"], counts["wrong"], per_1000, f"{counts['largest']:.1e}"])
    head = ["first calls", "threads", "", "calls", "wrong", "of 1000 (95%)", "largest error"]
    met = [one["met"] for one in rows]
    words = report.verdict(all(met)) if rows and None not in met else "not decided: too few wrong results without it"
    return f"""# The first vector function of a process

How often the fault comes depends on the machine's load and on the moments at which the threads start. In new processes
it is rare; an idle machine may show none. "{KINDS["forks"]}": forks of a process that had imported torch and used
neither OpenMP nor MKL. "{KINDS["again"]}": one process, in which the variable that MKL sets in the first call was set
back before each call, which happens in no training; the share of wrong results there is not that of new processes. Only
`sqrt` of floats was called.

{report.place(f"with {burners} busy processes beside those that were measured")} {time.strftime("%Y-%m-%d")},
`python -m benchmarks.math_library`. A call is `torch.sqrt` of 8192 floats per thread; its result is wrong if a later
call gives another one. Calls with and without `settle()` took turns, until {ENOUGH} were wrong or the time was over.

{report.table(head, lines)}

A thread that makes its first call while another thread makes its own can get a kernel of lower accuracy, for an older
CPU. MKL (2024.2, in torch 2.13) stores the number of the CPU's type and then replaces it by its own numbering, without
a lock; the number in between selects another row of its table of kernels. All values of that thread's part then have
errors of up to 3e-4, once. `clusterddp.init()` makes the first call in a single thread (`settle()` in
`clusterddp/distributed/math_library.py`).

The bar, at most {ALLOWED:g} times as many wrong results after `settle()`, is {words}."""


def main() -> None:
    """The command line."""
    parser = report.parser(__doc__, "25 seconds")
    parser.add_argument("--seconds", type=float, default=120, help="at most, for each line (default: %(default)g)")
    options = parser.parse_args()
    seconds, burners = 25 if options.quick else options.seconds, len(os.sched_getaffinity(0))
    cases = [(kind, threads) for kind in KINDS for threads in THREADS]
    measured = [counted(kind, threads, ENOUGH, seconds, burners) for kind, threads in cases]
    rows = [one for figures in measured if (one := row(figures))]
    text = described(measured, rows, burners)
    report.write(options.out, "math-library", text, {"burners": burners, "counts": measured, "rows": rows})


if __name__ == "__main__":
    main()
