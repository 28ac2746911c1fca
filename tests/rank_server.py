"""Forks ranks from a process that has imported torch once: importing it again takes each rank 1 to 2 s of CPU.

A request is a line on stdin: {"start": {"argv": [...], "env": {...}, "output": PATH}} is answered by the pid, and
{"poll": PID} by the exit code, negative for a signal, or null, with the CPU seconds used. A rank ends as a Python
process does, but for the interpreter's own clean-up, which takes 0.9 s with torch in it.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import clusterddp.history.codec  # which rank 0 needs if it finds no checkpoint
import clusterddp.training.context  # noqa: F401


def serve() -> dict[str, Any] | None:
    """Answers requests; returns in every forked rank, with what it is to run, and at the end of the input."""
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                return dict(request["start"])
            answer: object = pid
        else:
            pid, status, used = os.wait4(request["poll"], os.WNOHANG)
            answer = [os.waitstatus_to_exitcode(status) if pid else None, used.ru_utime + used.ru_stime]
        print(json.dumps(answer), flush=True)
    return None


def become(start: dict[str, Any]) -> None:
    """Applies a rank's environment, arguments and outputs."""
    output = os.open(start["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    faulthandler.register(signal.SIGPROF)  # ddp.py asks a rank that does not end where it is
    os.environ.clear()
    os.environ.update(start["env"])
    sys.argv = start["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def run() -> int:
    """The script as ``__main__``; its exit code, as the interpreter would have it."""
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    if task := serve():
        become(task)
        exit_code = run()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(exit_code)
