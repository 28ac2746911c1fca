"""A terminal for commands that need one: what they show, and keys."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import termios
from collections.abc import Callable
from typing import Any


class Terminal:
    """``start`` starts the command with the options of Popen that it gets."""

    def __init__(self, start: Callable[..., subprocess.Popen[Any]]) -> None:
        self._master, slave = pty.openpty()
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        control = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731  # for Ctrl-C
        self.process = start(**ends, start_new_session=True, preexec_fn=control)
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """Waits until the terminal shows the text, after what was waited for before; what it showed before it."""
        while text not in self.shown:
            try:
                self.shown += os.read(self._master, 4096).decode(errors="replace")
            except OSError as error:  # the command has ended
                raise AssertionError(f"{text!r} not shown: {self.shown!r}") from error
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, keys: str) -> None:
        """Such as a line, or Ctrl-C (``\\x03``)."""
        os.write(self._master, keys.encode())

    def end(self) -> None:
        """Ends the command, if it has not."""
        self.process.terminate()
        self.process.wait()
        os.close(self._master)
