"""A script without clusterddp: at a TERM rank 0 saves for ``saving_alone.py SECONDS``; the other ranks exit at once."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

RUN, RANK = Path(os.environ["CLUSTERDDP_RUN_DIR"]), os.environ["RANK"]
FILE = RUN / "own.txt"


def save(*_):
    with open(FILE, "w") as file:
        file.write("first half, ")
        file.flush()
        time.sleep(float(sys.argv[1]))
        file.write("second half")
    sys.exit(0)


assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0  # in every rank
if FILE.exists():
    sys.exit(0)
if RANK == "0":
    signal.signal(signal.SIGTERM, save)
(RUN / f"ready-{RANK}").touch()
while True:
    signal.pause()
