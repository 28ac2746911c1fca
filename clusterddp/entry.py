"""How a command exits: with its exit code or, after an error, with one message and an exit code.

The traceback of an unexpected error, such as a full or read-only disk, is written to a file that the message names.
With CLUSTERDDP_DEBUG=1 it is printed instead.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from clusterddp.errors import BROKEN_PIPE, FAILED, INTERNAL_ERROR, INTERRUPTED, ClusterddpError
from clusterddp.protocol import DEBUG
from clusterddp.reporter import is_unread, say, what_failed

#: Errors that the user can fix, and that of a file which is never read, because it seems to have terabytes.
_PLAIN = (errno.EACCES, errno.EPERM, errno.EFBIG)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_with(command: Callable[[], int], records: Path | None = None) -> NoReturn:
    """Runs ``command`` and exits with its return value, or with the exit code of its error.

    ``records``: the folder for the traceback of an unexpected error. If None or not writable, the system's temporary
    folder.
    """
    _replace_closed_streams()
    _print_any_text()
    try:
        code = _code_of(command)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BrokenPipeError:
        _discard_output()
        code = BROKEN_PIPE
    except KeyboardInterrupt:
        say("interrupted")
        code = INTERRUPTED
    except ClusterddpError as error:
        say(f"{error}\n{_traceback(error)}" if _debugging() else str(error))
        code = error.exit_code
    except Exception as error:
        if _is_of_closed_terminal(error):
            code = BROKEN_PIPE
        elif _is_of_full_output(error):
            say(f"could not write the output: {what_failed(error)}")
            code = FAILED
        else:
            say(_message(error, records))
            code = FAILED if isinstance(error, OSError) else INTERNAL_ERROR
        _discard_output()
    if (
        sys.flags.inspect
    ):  # PYTHONINSPECT is set: instead of exiting with the code, Python would read its standard input
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def _code_of(command: Callable[[], int]) -> int:
    try:
        return command()
    except SystemExit as ended:  # argparse has printed help or an error
        if isinstance(ended.code, str):
            raise
        return ended.code or 0


def _replace_closed_streams() -> None:
    """Discards output to a stream that the parent process has closed, as in ``clusterddp list >&-``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def _print_any_text() -> None:
    """Escapes characters that the terminal's encoding lacks, such as non-ASCII letters of a path under LANG=C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _is_of_closed_terminal(error: Exception) -> bool:
    """Whether a write to a terminal has failed that was closed while this process ignores SIGHUP, as under nohup."""
    of_stream = isinstance(error, OSError) and error.errno == errno.EIO and error.filename is None
    return of_stream and (is_unread(sys.stdout) or is_unread(sys.stderr))


def _is_of_full_output(error: Exception) -> bool:
    """Whether a write to standard output has failed, because its disk, quota or file size limit is full.

    A flush does not show it: with PYTHONUNBUFFERED, the buffer is empty. So this writes once more.
    """
    if not isinstance(error, OSError) or error.errno not in _FULL or error.filename is not None:
        return False
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _message(error: Exception, records: Path | None) -> str:
    if isinstance(error, FileNotFoundError) and _working_directory_deleted():
        return "the working directory was deleted. Change to one that exists"
    if isinstance(error, OSError) and error.errno in _PLAIN and error.filename and not _debugging():
        return what_failed(error)
    kept = _keep_traceback(error, records)
    if not isinstance(error, OSError):
        text = " ".join(str(error).split())
        return f"internal error: {type(error).__name__}: {text[:300]}{kept}"
    return f"{what_failed(error)}{kept}"


def _working_directory_deleted() -> bool:
    try:
        Path.cwd()
    except OSError:
        return True
    return False


def _keep_traceback(error: Exception, records: Path | None) -> str:
    """Writes the traceback to a file. Returns the end of the message, with its path."""
    import tempfile

    text = _traceback(error)
    if _debugging():
        return f"\n{text}"
    for folder in (records, None):  # None: the system's
        with suppress(OSError):
            descriptor, path = tempfile.mkstemp(".traceback", "clusterddp-", folder)
            with open(descriptor, "w", errors="backslashreplace") as file:
                file.write(text)
            return f" (traceback: {path})"
    return f" (to see the traceback, set {DEBUG}=1)"


def _traceback(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def _debugging() -> bool:
    return os.environ.get(DEBUG, "0") not in ("", "0")


def _discard_output() -> None:
    """Discards buffered output that cannot be written, for which Python would report an error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
