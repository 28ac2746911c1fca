"""What is read of the processes of this machine, which may be anybody's."""

from __future__ import annotations

import subprocess
import sys

#: As the kernel cuts a longer name after 15 bytes: not at the end of a letter.
NAMED = """
import ctypes, os
ctypes.CDLL(None).prctl(15, "Trainingsl\u00e4".encode()[:-1], 0, 0, 0)
from clusterddp.process import descendants, process_start
from clusterddp.failures.stack_traces import sleeping
assert process_start(os.getpid()) and os.getpid() in descendants(os.getppid()) and not sleeping(os.getpid())
"""


def test_a_process_whose_name_is_no_text_is_seen_like_any_other() -> None:
    """One that another user has started must not end a run, or keep one from being cancelled."""
    done = subprocess.run([sys.executable, "-c", NAMED], capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")
