"""``--watch``, which shows the same again every few seconds, and what commands know of their terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from clusterddp.errors import INTERRUPTED
from clusterddp.reporter import forgiving

#: Seconds between two looks at the runs' files. Slurm is asked less often (``slurm/polling.py``).
EVERY_S = 5.0


@dataclass(frozen=True)
class View:
    """What is shown: on a terminal as many lines as have room. ``over``: whether it will not change any more."""

    lines: Sequence[str]
    over: bool = False


def watch(look: Callable[[], View]) -> int:
    """Shows the view every EVERY_S seconds, on a terminal in place, and returns the exit code.

    Ends when the terminal is closed. Under nohup this process gets no signal then, and no write of rich fails.
    """
    on_terminal, in_place = sys.stdout.isatty(), _can_redraw()
    drawing: AbstractContextManager[Callable[[View], None]] = _screen() if in_place else nullcontext(_print_block)
    view, code = View(()), 0
    with drawing as draw:
        try:
            while not (view := look()).over:
                draw(view)
                time.sleep(EVERY_S)
                if on_terminal and not sys.stdout.isatty():
                    return INTERRUPTED
        except KeyboardInterrupt:
            code = INTERRUPTED
    if in_place:  # leave the last view on the terminal
        print("\n".join(view.lines[: _room()]))
    elif view.over:
        print("\n".join(view.lines))
    return code


@contextmanager
def _screen() -> Iterator[Callable[[View], None]]:
    """The terminal's alternate screen. rich fits the text to it every second, also after a change of its size."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=forgiving(1)), screen=True, refresh_per_second=1, redirect_stdout=False) as live:
        yield lambda view: live.update(Text.from_ansi("\n".join([_heading(), *view.lines[: _room()]])), refresh=True)


def _print_block(view: View) -> None:
    print("\n".join([_heading(), *view.lines]), end="\n\n", flush=True)


def _heading() -> str:
    return f"{time.strftime('%H:%M:%S')}, every {EVERY_S:.0f} s until Ctrl-C"


def _room() -> int:
    """The lines of the terminal but one. rich need not wrap all of a long history every second."""
    return shutil.get_terminal_size().lines - 1


def _can_redraw() -> bool:
    """Whether stdout is a terminal with a cursor that can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def terminal_width() -> int | None:
    """The columns of the terminal, or None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured(stream: object) -> bool:
    """Whether a stream takes colours: it is a terminal, and NO_COLOR (https://no-color.org) is not set."""
    isatty = getattr(stream, "isatty", lambda: False)
    return isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
