"""What the log of a rank that ended without a record tells of it: the stack of what crashed, else its last lines."""

from __future__ import annotations

import re

#: The frames that every script has below it: those of the rank shim, of a launched function, and of runpy.
_BELOW = re.compile(
    r'File "(<frozen runpy>|<frozen importlib\._bootstrap\w*>'
    r'|.*/runpy\.py|.*/clusterddp/(worker/)?(rank|function|__main__)\.py|.*/submitit/core/\w+\.py)"'
)
#: How many frames, and lines of a log, are shown.
MOST_FRAMES, MOST_LINES = 20, 12


def end_of_log(text: str) -> str:
    """From a rank's error output, what tells most of how it ended."""
    return _crash(text) or _hang(text) or "\n".join(text.splitlines()[-MOST_LINES:])


def _crash(text: str) -> str:
    """What Python's fault handler wrote: the error, and the stack of the thread that made it.

    A thread of C++ has no such stack (a process group's, which aborts): then the main thread's, which comes last. What
    C++ says of an exception that nobody caught stands right before.
    """
    before, found, after = text.rpartition("Fatal Python error:")
    if not found:
        return ""
    said = [line for line in before.splitlines()[-2:] if re.match(r"terminate called|  what\(\):", line)]
    error, *sections = re.split(r"\n\n+", found + after)
    stacks = [section for section in sections if re.match(r"(Current t|T)hread 0x", section)]
    crashed = next((stack for stack in stacks if stack.startswith("Current")), stacks[-1] if stacks else "")
    return "\n".join([*said, error, "", *_frames(crashed)]).rstrip()


def _hang(text: str) -> str:
    """The main thread's stack, which faulthandler writes last, if it was written because the rank's time was over."""
    if "Timeout (" not in text:
        return ""
    stacks = text.rpartition("Timeout (")[2].partition("\nclusterddp: ")[0]
    return "\n".join(_frames(stacks.rpartition("Thread 0x")[2])[1:])


def _frames(stack: str) -> list[str]:
    """The title of a stack and its frames, the most recent first, down to the script's outermost."""
    title, *frames = stack.splitlines() or [""]
    frames = [frame for frame in frames if frame.startswith("  ") and not _BELOW.search(frame)]
    left_out = [f"  ... {len(frames) - MOST_FRAMES} more"] if len(frames) > MOST_FRAMES else []
    return [title, *frames[:MOST_FRAMES], *left_out]
