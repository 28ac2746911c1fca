"""A rank that does nothing, and ends at once on TERM: ``wait_for_term.py FOLDER`` leaves FOLDER/ready-RANK."""

import os
import signal
import sys

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with open(os.path.join(sys.argv[1], f"ready-{os.environ['SLURM_PROCID']}"), "w"):
    pass
signal.sigwait({signal.SIGTERM})
os._exit(0)
