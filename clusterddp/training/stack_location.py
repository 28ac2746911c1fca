"""Where a thread is, in a few words: the line of the user's code, or the collective that it waits in."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
#: Code that is not the user's: torch, clusterddp, Python's standard library.
_OTHERS = (
    f"{Path(torch.__file__).resolve().parent}/",
    *(f"{Path(__file__).resolve().parents[1] / room}/" for room in ("checkpoint", "data", "distributed", "training")),
    f"{sysconfig.get_path('stdlib')}/",
    "<frozen",
)


def place_of(frame: FrameType, sleeping: bool) -> tuple[str, bool]:
    """Where a thread with this innermost ``frame`` is, and whether it waits there for other ranks.

    ``sleeping``: whether the thread sleeps in the kernel. In a backward on CPUs that distinguishes DDP's all_reduce,
    which Python does not see, from work.
    """
    frames = list(_outward(frame))
    for inner in frames:
        if inner.f_code.co_filename.endswith(_COLLECTIVES):
            return inner.f_code.co_name, True
    code = frames[0].f_code
    if sleeping and code.co_filename.endswith(_BACKWARD[0]) and code.co_name == _BACKWARD[1]:
        return "the all_reduce of backward", True
    theirs = next((one for one in frames if not one.f_code.co_filename.startswith(_OTHERS)), frames[-1])
    line = f"{Path(theirs.f_code.co_filename).name}:{theirs.f_lineno} ({theirs.f_code.co_name})"
    return (line if theirs is frames[0] else f"{line}, {code.co_name}"), False


def position_of(frame: FrameType) -> tuple[tuple[CodeType, int], ...]:
    """A thread's position, to the instruction of each call: unchanged while it waits.

    torch's own calls count too: an evaluation may spend all of its time in one line of the user's code.
    """
    return tuple((one.f_code, one.f_lasti) for one in _outward(frame))


def sleeping(native_id: int) -> bool:
    """Whether a thread of this process sleeps in the kernel (proc(5), state S or D); False if unknown."""
    try:
        text = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except OSError:  # such as no file descriptor left
        return False
    return text.rpartition(")")[2].split()[0] in ("S", "D")


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
