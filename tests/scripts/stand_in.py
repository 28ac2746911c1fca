"""In place of a training, without torch: ``stand_in.py finish|fail|wait``, after ten steps whose metrics it writes.

It does not use clusterddp: SIGTERM ends it, but for the one of a user's request, so that commands wait for the stop.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

attempt = int(os.environ["CLUSTERDDP_ATTEMPT"])
with open(Path(os.environ["CLUSTERDDP_RUN_DIR"]) / "metrics.jsonl", "a") as metrics:
    for step in range(10 * attempt, 10 * attempt + 10):
        values = {"step": step, "time": time.time(), "attempt": attempt, "loss": 1 / (step + 1)}
        metrics.write(json.dumps(values) + "\n")
print(f"attempt {attempt}: ten steps done", flush=True)
if sys.argv[1] == "fail":
    raise ValueError("bad label")
if sys.argv[1] == "wait":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid == os.getpid():  # from the rank's entry point in this process
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    signal.raise_signal(signal.SIGTERM)
