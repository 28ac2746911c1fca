"""How ``--watch`` fills a terminal: wrapped facts, and as many of the newest events as have room. Pure."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from clusterddp.errors import INTERRUPTED
from clusterddp.report.charts import axis_of
from clusterddp.reporter import clipped, columns_of, forgiving, one_line

#: The columns of a fact's name.
INDENT = 10
#: Events that are shown where there is no terminal, and the fewest on a terminal.
EVENTS, LEAST_EVENTS = 5, 3
#: The most lines of a fact on a terminal.
MOST_LINES = 4
_NARROWEST = 20
Fact = tuple[str, str]


@dataclass(frozen=True)
class Size:
    """A terminal's columns and lines."""

    columns: int
    lines: int


def composed(above: Sequence[str], events: Sequence[str], end: str, size: Size | None) -> str:
    """Lines, the newest events and a last line, for a terminal of this size or for a pipe (None).

    If there is no room for LEAST_EVENTS, the last of the lines above them are left out.
    """
    if size is None:
        return "\n".join([*above, *events[-EVENTS:], end])
    room = max(1, size.lines - 2)  # without the last line and the one before it
    above = above[: max(1, room - min(LEAST_EVENTS, len(events)))]
    shown = events[-(room - len(above)) :] if room > len(above) else []
    below = [clipped(line, size.columns) for line in [*shown, "", end]]
    return "\n".join([*above, *below][: size.lines])


def fact_lines(facts: Sequence[Fact], columns: int | None = None) -> list[str]:
    """``name      words``, wrapped below the words if there are more than fit."""
    lines = []
    for name, words in facts:
        text = one_line(f"{name:{INDENT - 1}} {words}")
        if columns is None or columns_of(text) <= columns:
            lines.append(text)
        else:
            lines += _wrapped(text, columns)
    return lines


def _wrapped(text: str, columns: int) -> list[str]:
    indent = " " * (INDENT if columns >= INDENT + _NARROWEST else 2)
    wrapper = textwrap.TextWrapper(
        max(columns, INDENT), subsequent_indent=indent, max_lines=MOST_LINES, placeholder=" ...", break_on_hyphens=False
    )
    return wrapper.wrap(text)


#: Seconds between two looks at the runs' files. Slurm is asked less often (``slurm/pace.py``).
EVERY_S = 5.0


@dataclass(frozen=True)
class View:
    """What is shown. ``over``: whether it will not change any more."""

    text: str
    over: bool = False


#: Makes the view for a terminal of a size, or for a pipe (None).
Look = Callable[[Size | None], View]


def watch(look: Look) -> int:
    """Shows the view every EVERY_S seconds, on a terminal in place, and returns the exit code.

    Ends when the terminal is closed. Under nohup this process gets no signal then, and no write of rich fails.
    """
    on_terminal = sys.stdout.isatty()
    drawing: AbstractContextManager[Callable[[str], None]] = _screen() if in_place() else nullcontext(_print_block)
    view, code = View(""), 0
    with _resizes_held_back():
        with drawing as draw:
            try:
                while not (view := look(size() if in_place() else None)).over:
                    draw(view.text)
                    wait()
                    if on_terminal and not sys.stdout.isatty():
                        return INTERRUPTED
            except KeyboardInterrupt:
                code = INTERRUPTED
        if view.text and (in_place() or view.over):  # leave the last view on the terminal
            print(view.text)
    return code


def wait() -> None:
    """Waits until the next look is due or, on a terminal, until its size changes."""
    signal.sigtimedwait([signal.SIGWINCH], EVERY_S)


@contextmanager
def _resizes_held_back() -> Iterator[None]:
    """Keeps SIGWINCH for ``wait``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _screen() -> Iterator[Callable[[str], None]]:
    """The terminal's alternate screen, overwritten without being cleared, to avoid flicker."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=forgiving(1)), screen=True, auto_refresh=False, redirect_stdout=False) as live:
        yield lambda text: live.update(Text.from_ansi(text, no_wrap=True, overflow="crop"), refresh=True)


def _print_block(text: str) -> None:
    print(text, end="\n\n", flush=True)


def in_place() -> bool:
    """Whether stdout is a terminal with a cursor that can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def size() -> Size | None:
    """The size of the terminal, or None if stdout is not a terminal."""
    return Size(*shutil.get_terminal_size()) if sys.stdout.isatty() else None


def terminal_width() -> int | None:
    """The columns of the terminal, or None if stdout is not a terminal."""
    return found.columns if (found := size()) else None


def colour() -> bool:
    """Whether to print colours: stdout is a terminal, and NO_COLOR (https://no-color.org) is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def encoding() -> str:
    """The encoding of stdout."""
    return sys.stdout.encoding or "ascii"


#: From low to high. The second one is for terminals without UTF-8.
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
#: Where the values are NaN or infinite.
_NOT_FINITE = "x"
#: Larger values are clipped, to keep differences between values finite.
_LARGEST = 1e300


def labelled(points: Sequence[tuple[int, float]], width: int, encoding: str = "utf-8") -> str:
    """The first value, the curve and the newest value, in at most ``width`` columns. Empty without points."""
    if not points:
        return ""
    first, last = f"{points[0][1]:.4g}", f"{points[-1][1]:.4g}"
    room = width - len(first) - len(last) - 2
    if len(points) == 1 or room < 4:
        return last
    return f"{first} {sparkline(points, room, encoding)} {last}"


def sparkline(points: Sequence[tuple[int, float]], width: int, encoding: str = "utf-8") -> str:
    """A character per equal part of the steps, whose height is the part's mean. At most one per point.

    A part without points repeats the one before. The scale is logarithmic where the report's is.
    """
    means = _means(points, min(width, len(points)))
    axis = axis_of(mean for mean in means if math.isfinite(mean))
    levels = _BLOCKS if _takes_blocks(encoding) else _ASCII
    return "".join(
        levels[round(axis.at(mean) * (len(levels) - 1))] if math.isfinite(mean) else _NOT_FINITE for mean in means
    )


def _means(points: Sequence[tuple[int, float]], count: int) -> list[float]:
    if not points:
        return []
    begin, steps = points[0][0], points[-1][0] - points[0][0] + 1
    parts: list[list[float]] = [[] for _ in range(count)]
    for step, value in points:
        cut = max(-_LARGEST, min(value, _LARGEST)) if math.isfinite(value) else value
        parts[(step - begin) * count // steps].append(cut)
    means: list[float] = []
    for part in parts:
        finite = [value for value in part if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan if part else means[-1])
    return means


def _takes_blocks(encoding: str) -> bool:
    try:
        _BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
