"""``--watch``: redraws a text on the terminal every few seconds, until Ctrl-C."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable

from clusterddp.errors import INTERRUPTED, UsageError

#: Seconds between two looks, each of which asks Slurm at most once.
EVERY_S = 5.0


def watch(text: Callable[[], str]) -> int:
    """Shows ``text()``, refreshed every EVERY_S seconds; returns the exit code after Ctrl-C."""
    if not sys.stdout.isatty():
        raise UsageError("--watch: stdout is not a terminal; for a program, use --json")
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                live.update(Text.from_ansi(text(), no_wrap=True, overflow="crop"), refresh=True)
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            return INTERRUPTED


def terminal_width() -> int | None:
    """The columns of the terminal; None if stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def colour() -> bool:
    """Whether stdout takes colours: it is a terminal, and https://no-color.org is not asked for."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
