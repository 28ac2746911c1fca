"""Stacks in words: the part of a rank's log that explains a crash, and the stacks of many ranks, grouped.

A thread of the process itself takes its stacks, so that neither permissions nor a debugger are needed. It reads no
source files, which may be on the disk that the process waits for. Standard library only.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import runpy
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from clusterddp.hostlist import ranges
from clusterddp.messages.reports import Stacks, Thread

if TYPE_CHECKING:
    from clusterddp.messages.requests import StackGroup
from clusterddp.process import current_frames
from clusterddp.reporter import counted

if TYPE_CHECKING:
    from clusterddp.messages.reports import Stacks  # ranks import this module, and need none of the reports

#: The frames below every script: those of the rank's entry point, a launched function, and runpy.
_BELOW = re.compile(
    r'File "(<frozen runpy>|<frozen importlib\._bootstrap\w*>'
    r'|.*/runpy\.py|.*/clusterddp/(worker/)?(rank|function|__main__)\.py|.*/submitit/core/\w+\.py)"'
)
#: The number of frames, and of log lines, that are shown.
MOST_FRAMES, MOST_LINES = 20, 12
#: The most ranks that a sentence names.
_NAMED = 4

#: A frame of a traceback or of faulthandler's stacks: file, line and function.
FRAME = re.compile(r'^ *File "([^"]+)", line (\d+),? in (\S+)', re.MULTILINE)
#: Files of code that is not the user's.
_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.\d+/|^<|/clusterddp/((__init__|__main__|api|entry|function)\.py|(checkpoint|data|distributed|training|worker)/)"
)
#: Torch's messages if ranks are in different collectives. After a timeout, one of them may also have been late.
_MISMATCH = re.compile(r"collective mismatch|mismatch between collectives|op\.preamble\.length <= op\.nbytes")
#: The last two are torch 2.15's.
_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms for|collective operation timeout"
    r"|Operation timed out after \d+ ms|Aborting process on rank \d+ due to timeout"
)
#: What libstdc++ prints of an uncaught exception, up to Python's fault handler or an empty line.
_TERMINATE = re.compile(
    r"^terminate called after throwing an instance of '([^']+)'\n"
    r"\s*what\(\):\s*((?:.|\n)*?)(?=\n\n|\nFatal Python error|\Z)",
    re.MULTILINE,
)
_ADVICE = re.compile(
    r"\n(?:CUDA|HIP) kernel errors might be|\nSearch for `|\nException raised from |\nframe #0|\nCompile with `"
)
_ROCM = re.compile(r"^(?:HW Exception by GPU node|Memory access fault by GPU node).*", re.MULTILINE)


def users_line(text: str) -> str | None:
    """The innermost frame of the user's code in a traceback, or in the first of faulthandler's stacks."""
    frames = [found for found in FRAME.findall(text) if not _NOT_THE_USERS.search(found[0])]
    if not frames:
        return None
    file, line, function = frames[0 if "(most recent call first)" in text else -1]
    return f"{file.rpartition('/')[2]}:{line} ({function})"


def different_calls(error: str, texts: Mapping[int, str]) -> str:
    """A message if ``error`` comes of ranks in different collectives. '' if not. ``texts``: the ranks' tracebacks."""
    lines = {rank: line for rank, text in texts.items() if (line := users_line(text))}
    apart = len(set(lines.values())) > 1
    where = ", ".join(f"rank {rank} in {line}" for rank, line in list(lines.items())[:_NAMED])
    if _MISMATCH.search(error):
        order = "Every rank must call the same collectives in the same order"
        return f"the ranks called different collectives{f' ({where})' if apart else ''}. {order}"
    if apart and _TIMEOUT.search(error):
        return f"the ranks waited in different calls ({where}). One was late, or they called different collectives"
    return ""


def uncaught(text: str) -> str | None:
    """The C++ exception that ended the process, as ``TYPE: MESSAGE``, or the ROCm runtime's message before it did.

    Under NCCL torch's watchdog thread ends a process so after an asynchronous error of its device or of a peer.
    """
    if amd := _ROCM.findall(text):
        return str(amd[-1])
    found = _TERMINATE.findall(text)
    if not found:
        return None
    kind, message = found[-1]
    return f"{kind}: {without_advice(message)}"


def without_advice(error: str) -> str:
    """An error's message without what torch appends: how to debug an asynchronous error, and its own C++ stack."""
    return _ADVICE.split(error)[0].strip()


def after_suspension(error: str, stood_s: float, timeout_s: float) -> str:
    """A message if ``error`` is a timeout of a collective that may have ended while the job was suspended. '' if not.

    The clocks of NCCL's watchdog and of gloo keep running meanwhile. After the resume, collectives that are still under
    way count as late. In torch 2.4 and 2.6, unlike 2.9 and 2.15, so do those that the GPUs completed meanwhile.
    ``stood_s``: for how long the ranks were stopped.
    """
    if stood_s < timeout_s or not _TIMEOUT.search(error):
        return ""
    return (
        f"the ranks had been stopped for {stood_s:.0f} s, for example by scontrol suspend, and that time counts "
        f"against timeouts.step_s ({timeout_s:g} s). If this happens often, raise timeouts.step_s"
    )


def write_stacks(seconds: float) -> None:
    """Writes the stacks of all threads to stderr, as faulthandler's timer does after this time, for ``end_of_log``.

    A timer that the script has set stays.
    """
    with suppress(OSError, ValueError, AttributeError):  # the script has closed stderr
        os.write(2, f"Timeout ({timedelta(seconds=seconds)})!\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)


def end_of_log(text: str) -> str:
    """The part of a rank's error output that best explains its end."""
    return _crash(text) or _hang(text) or "\n".join(text.splitlines()[-MOST_LINES:])


def _crash(text: str) -> str:
    """The output of Python's fault handler: the error and the stack of the thread that caused it.

    A C++ thread, such as a process group's that aborts, has no Python stack: then the main thread's, which is printed
    last. The message of an uncaught C++ exception is printed right before.
    """
    before, found, after = text.rpartition("Fatal Python error:")
    if not found:
        return ""
    uncaught = [line for line in before.splitlines()[-2:] if re.match(r"terminate called|  what\(\):", line)]
    error, *sections = re.split(r"\n\n+", found + after)
    stacks = [section for section in sections if re.match(r"(Current t|T)hread 0x", section)]
    crashed = next((stack for stack in stacks if stack.startswith("Current")), stacks[-1] if stacks else "")
    return "\n".join([*uncaught, error, "", *_frames(crashed)]).rstrip()


def _hang(text: str) -> str:
    """The main thread's stack, which faulthandler prints last, if it was dumped on a timeout."""
    if "Timeout (" not in text:
        return ""
    stacks = text.rpartition("Timeout (")[2].partition("\nclusterddp: ")[0]
    return "\n".join(_frames(stacks.rpartition("Thread 0x")[2])[1:])


def _frames(stack: str) -> list[str]:
    """A stack's title and frames, most recent first, without those below the script."""
    title, *frames = stack.splitlines() or [""]
    frames = [frame for frame in frames if frame.startswith("  ") and not _BELOW.search(frame)]
    left_out = [f"  ... {len(frames) - MOST_FRAMES} more"] if len(frames) > MOST_FRAMES else []
    return [title, *frames[:MOST_FRAMES], *left_out]


#: The most ranks, or hosts, that a line names.
NAMED = 8


def grouped(stacks: Mapping[int, Stacks], hosts: Mapping[int, str]) -> list[StackGroup]:
    """Ranks with equal stacks together, the largest group first."""
    groups: dict[Any, list[int]] = {}
    keys: dict[int, Any] = {}  # by the identity of values, which thousands of ranks share
    for rank, answer in sorted(stacks.items(), key=lambda item: item[0]):
        if (key := keys.get(id(answer))) is None:
            key = keys[id(answer)] = answer.place, answer.threads
        groups.setdefault(key, []).append(rank)
    from clusterddp.messages.requests import StackGroup  # no rank needs it

    found = [
        StackGroup(ranks, list(dict.fromkeys(hosts.get(rank) for rank in ranks)), place, threads)
        for (place, threads), ranks in groups.items()
    ]
    return sorted(found, key=lambda group: (-len(group.ranks), group.ranks))


def summary(groups: Iterable[StackGroup]) -> str:
    """``510 ranks in the all_reduce of backward, 2 in data.py:88 (read)``: where the main threads are."""
    places: Counter[str] = Counter()
    for group in groups:
        places[group.place] += len(group.ranks)
    parts = [f"{number} in {place}" for place, number in places.most_common()]
    if parts:
        place, number = places.most_common(1)[0]
        parts[0] = f"{counted(number, 'rank')} in {place}"
    return ", ".join(parts) or "no rank has answered"


def described(group: StackGroup) -> Iterator[str]:
    """The lines about one group: its ranks and hosts, and the stacks of its threads."""
    ranks, hosts = group.ranks, group.hosts
    where = ", ".join(map(str, hosts)) if len(hosts) <= NAMED else f"{len(hosts)} nodes"
    yield f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)} ({where}) in {group.place}"
    for thread in group.threads:
        yield f"  {thread.name}, most recent call first"
        yield from (f"    {frame}" for frame in thread.frames)


#: The most threads that are shown, and the most frames of each.
MOST_THREADS, MOST_SENT_FRAMES = 50, 100
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
_PACKAGE = Path(__file__).resolve().parents[1]
_STANDARD = (f"{sysconfig.get_path('stdlib')}/", "<frozen")
_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = ("<", f"{_PACKAGE}/", *(f"{folder}/" for folder in sorted(_INSTALLED)))
#: The frames below a script: the rank's entry point, and what runs a module.
_BELOW_SCRIPT = (f"{_PACKAGE}/worker/", runpy.__file__, "<frozen runpy>", "<string>")


def stacks(request: int) -> Stacks:
    """This process's stacks, for a request.

    The main thread comes first. Threads that run neither the script nor a library are left out, because they are
    clusterddp's own, or wait in the standard library for work.
    """
    frames = current_frames()
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main and thread.ident in frames]
    shown = [thread for thread in others if any(map(_foreign, outward(frames[thread.ident or 0])))]
    threads = [main, *sorted(shown, key=lambda thread: thread.name)[: MOST_THREADS - 1]]
    described = tuple(Thread(thread.name, _lines(frames[thread.ident or 0])) for thread in threads)
    return Stacks(request, main_thread_place()[0], described)


def _foreign(frame: FrameType) -> bool:
    """Whether a frame is neither clusterddp's nor the standard library's."""
    file = frame.f_code.co_filename
    if file.startswith((f"{_PACKAGE}/", "<string>")):
        return False
    return "/site-packages/" in file or not file.startswith(_STANDARD)


def is_library(file: str) -> bool:
    """Whether a file is the standard library's, an installed package's or clusterddp's own."""
    return file.startswith(_LIBRARIES)


def _lines(frame: FrameType) -> list[str]:
    """The frames of a thread, the most recent call first, without those below the script."""
    kept = _above_entry(frame)[:MOST_SENT_FRAMES]
    return [f"{one.f_code.co_filename}:{one.f_lineno} ({one.f_code.co_name})" for one in kept]


def _above_entry(frame: FrameType) -> list[FrameType]:
    """The frames of a thread, the most recent call first, without those below the script, if it has any of its own."""
    found = list(outward(frame))
    above = len(found)
    while above and found[above - 1].f_code.co_filename.startswith(_BELOW_SCRIPT):
        above -= 1
    return found[: above or len(found)]


def main_thread_stack() -> str:
    """The stack of the main thread in the form of a traceback, without the text of the lines: a disk may hang."""
    frames = _above_entry(current_frames()[threading.main_thread().ident or 0])
    lines = [f'  File "{one.f_code.co_filename}", line {one.f_lineno}, in {one.f_code.co_name}' for one in frames]
    return "\n".join(["Stack (most recent call last):", *reversed(lines)])


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
