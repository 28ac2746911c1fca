"""The end of a rank's error log that explains a crash: the stack of the crashed thread, else the last lines."""

from __future__ import annotations

import re

#: The frames below every script: those of the rank's entry point, a launched function, and runpy.
_BELOW = re.compile(
    r'File "(<frozen runpy>|<frozen importlib\._bootstrap\w*>'
    r'|.*/runpy\.py|.*/clusterddp/(worker/)?(rank|function|__main__)\.py|.*/submitit/core/\w+\.py)"'
)
#: The number of frames, and of log lines, that are shown.
MOST_FRAMES, MOST_LINES = 20, 12


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
