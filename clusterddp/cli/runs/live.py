"""``--watch``: shows a text again every few seconds, until Ctrl-C or until it cannot change any more."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from clusterddp.cli.runs.screen import Size
from clusterddp.errors import INTERRUPTED

#: Seconds between two looks, each of which asks Slurm at most once.
EVERY_S = 5.0


@dataclass(frozen=True)
class View:
    """What is shown; ``over``: it will not change any more."""

    text: str
    over: bool = False


#: Makes the view for a terminal of a size, or for a pipe (None).
Look = Callable[[Size | None], View]


def watch(look: Look) -> int:
    """Shows the view every EVERY_S seconds, on a terminal in place; returns the exit code."""
    drawing: AbstractContextManager[Callable[[str], None]] = _screen() if in_place() else nullcontext(_print_block)
    view, code = View(""), 0
    with _resizes_held_back():
        with drawing as draw:
            try:
                while not (view := look(size() if in_place() else None)).over:
                    draw(view.text)
                    wait()
            except KeyboardInterrupt:
                code = INTERRUPTED
        if view.text and (in_place() or view.over):  # the screen is gone: what it showed last stays
            print(view.text)
    return code


def wait() -> None:
    """Waits until the next look is due; on a terminal also until its size changes."""
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
    """The terminal's second screen, which is overwritten without being cleared, so that nothing flickers."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), screen=True, auto_refresh=False, redirect_stdout=False) as live:
        yield lambda text: live.update(Text.from_ansi(text, no_wrap=True, overflow="crop"), refresh=True)


def _print_block(text: str) -> None:
    print(text, end="\n\n", flush=True)


def in_place() -> bool:
    """Whether stdout is a terminal with a cursor that can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def size() -> Size | None:
    """The size of the terminal; None if stdout is none."""
    return Size(*shutil.get_terminal_size()) if sys.stdout.isatty() else None


def terminal_width() -> int | None:
    """The columns of the terminal; None if stdout is none."""
    return found.columns if (found := size()) else None


def colour() -> bool:
    """Whether stdout takes colours: it is a terminal, and https://no-color.org is not asked for."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def encoding() -> str:
    """In what stdout encodes text."""
    return sys.stdout.encoding or "ascii"
