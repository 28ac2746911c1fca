"""Where this process is: the stacks of its threads, and the place of its main thread in words. Standard library only.

A thread of the process itself looks, so that neither permissions nor a debugger are needed. It reads no source files,
which may be on the disk that the process waits for.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from clusterddp.process import current_frames

#: The most threads that are shown, and the most frames of each.
MOST_THREADS, MOST_FRAMES = 50, 100
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
_PACKAGE = Path(__file__).resolve().parents[1]
_STANDARD = (f"{sysconfig.get_path('stdlib')}/", "<frozen")
#: The frames below a script: the rank's entry point, and what runs a module.
_BELOW = (f"{_PACKAGE}/worker/", runpy.__file__, "<frozen runpy>", "<string>")


def stacks() -> dict[str, Any]:
    """This process's stacks: "place", where the main thread is, and "threads" with "name" and "frames".

    The main thread comes first. Threads that run neither the script nor a library are left out, because they are
    clusterddp's own, or wait in the standard library for work.
    """
    frames = current_frames()
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main and thread.ident in frames]
    shown = [thread for thread in others if any(map(_foreign, outward(frames[thread.ident or 0])))]
    threads = [main, *sorted(shown, key=lambda thread: thread.name)[: MOST_THREADS - 1]]
    return {
        "place": main_thread_place()[0],
        "threads": [{"name": thread.name, "frames": _lines(frames[thread.ident or 0])} for thread in threads],
    }


def _foreign(frame: FrameType) -> bool:
    """Whether a frame is neither clusterddp's nor the standard library's."""
    file = frame.f_code.co_filename
    if file.startswith((f"{_PACKAGE}/", "<string>")):
        return False
    return "/site-packages/" in file or not file.startswith(_STANDARD)


def _lines(frame: FrameType) -> list[str]:
    """The frames of a thread, the most recent call first, without those below the script."""
    found = list(outward(frame))
    above = len(found)
    while above and found[above - 1].f_code.co_filename.startswith(_BELOW):
        above -= 1
    kept = found[: above or len(found)][:MOST_FRAMES]
    return [f"{one.f_code.co_filename}:{one.f_lineno} ({one.f_code.co_name})" for one in kept]


def main_thread_place() -> tuple[str, bool]:
    """Where the main thread is, and whether it waits there for other ranks."""
    frame = current_frames()[threading.main_thread().ident or 0]
    return place_of(frame, sleeping(os.getpid()))  # Linux: the main thread has the process's id


def main_thread_line() -> str:
    """The line of the script that the main thread is in, such as ``train.py:40``."""
    theirs = _of_the_user(list(outward(current_frames()[threading.main_thread().ident or 0])))
    return f"{Path(theirs.f_code.co_filename).name}:{theirs.f_lineno}"


def place_of(frame: FrameType, sleeping: bool) -> tuple[str, bool]:
    """Where a thread with this innermost ``frame`` is, and whether it waits there for other ranks.

    ``sleeping``: whether the thread sleeps in the kernel. In a backward on CPUs that distinguishes DDP's all_reduce,
    which Python does not see, from work.
    """
    frames = list(outward(frame))
    for inner in frames:
        if inner.f_code.co_filename.endswith(_COLLECTIVES):
            return inner.f_code.co_name, True
    code = frames[0].f_code
    if sleeping and code.co_filename.endswith(_BACKWARD[0]) and code.co_name == _BACKWARD[1]:
        return "the all_reduce of backward", True
    theirs = _of_the_user(frames)
    line = f"{Path(theirs.f_code.co_filename).name}:{theirs.f_lineno} ({theirs.f_code.co_name})"
    return (line if theirs is frames[0] else f"{line}, {code.co_name}"), False


def _of_the_user(frames: list[FrameType]) -> FrameType:
    """The innermost frame of the user's code. The outermost one if there is none."""
    others = _others(getattr(sys.modules.get("torch"), "__file__", None))
    return next((one for one in frames if not one.f_code.co_filename.startswith(others)), frames[-1])


@functools.cache
def _others(torch: str | None) -> tuple[str, ...]:
    """Folders of code that is not the user's: torch (its file, if it is imported), clusterddp, the library."""
    rooms = ("checkpoint", "data", "distributed", "training")
    own = (f"{_PACKAGE / room}/" for room in rooms)
    return (*((f"{Path(torch).resolve().parent}/",) if torch else ()), *own, *_STANDARD)


def sleeping(native_id: int) -> bool:
    """Whether a thread of this process sleeps in the kernel (proc(5), state S or D). False if unknown."""
    try:
        text = Path(f"/proc/self/task/{native_id}/stat").read_text(errors="replace")
    except OSError:  # such as no file descriptor left
        return False
    return text.rpartition(")")[2].split()[0] in ("S", "D")


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back
