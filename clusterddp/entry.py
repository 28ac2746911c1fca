"""How a command's process ends: with its exit code, or with one sentence and an exit code for every error.

An error that nobody foresaw, a full or read-only disk included, leaves its traceback in a file, which the sentence
names; with CLUSTERDDP_DEBUG=1 the traceback is printed instead.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from clusterddp.errors import BROKEN_PIPE, FAILED, INTERNAL_ERROR, INTERRUPTED, ClusterddpError
from clusterddp.protocol import DEBUG
from clusterddp.reporter import say


def exit_with(command: Callable[[], int], records: Path | None = None) -> NoReturn:
    """Runs ``command`` and exits with the code that it returns, or that its error has.

    ``records``: the folder for the traceback of an unforeseen error; the system's temporary folder if None, or if
    nothing can be written there.
    """
    _print_any_text()
    try:
        code = command()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed by whoever started this process
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
        say(_told(error, records))
        _discard_output()
        code = FAILED if isinstance(error, OSError) else INTERNAL_ERROR
    sys.exit(code)


def _print_any_text() -> None:
    """Prints what the terminal's encoding lacks as escapes, such as a path with other letters under LANG=C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _told(error: Exception, records: Path | None) -> str:
    if isinstance(error, FileNotFoundError) and _working_directory_is_gone():
        return "the working directory was deleted: change to one that exists"
    kept = _keep_traceback(error, records)
    if not isinstance(error, OSError):
        words = " ".join(str(error).split())
        return f"internal error: {type(error).__name__}: {words[:300]}{kept}"
    if error.filename is None:
        return f"{error.strerror or error}{kept}"
    path = re.sub(r"/\.([^/]+)\.[0-9a-f]{8}\.tmp$", r"/\1", str(error.filename))  # write_atomically's
    return f"{path}: {error.strerror}{kept}"


def _working_directory_is_gone() -> bool:
    try:
        Path.cwd()
    except OSError:
        return True
    return False


def _keep_traceback(error: Exception, records: Path | None) -> str:
    """Where the traceback is, as the end of the sentence."""
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
    return f" ({DEBUG}=1 shows the traceback)"


def _traceback(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def _debugging() -> bool:
    return os.environ.get(DEBUG, "0") not in ("", "0")


def _discard_output() -> None:
    """What is still buffered for an output that takes nothing: else Python complains of it on exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
