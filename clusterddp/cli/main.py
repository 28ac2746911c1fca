"""``clusterddp``, and ``python -m clusterddp``, which is the same program."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 failed, 2 wrong usage, 70 an internal error, 130 interrupted.

    Imports happen in this function, to handle Ctrl-C from the start.
    """
    try:
        import gc

        from clusterddp.cli.command_line import command
        from clusterddp.entry import exit_with

        # A command reads many records and keeps them. Python 3.11 searches all of them for cycles after every 700 new
        # ones, which takes a third of the time of a long history.
        gc.set_threshold(1_000_000)
        exit_with(lambda: command(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # while the two were imported
        sys.exit(130)  # INTERRUPTED
