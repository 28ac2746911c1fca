"""Runs a rank under torchrun and writes the first exit code other than 0 to $EXIT_CODE_FILE, as torchrun exits with 1.

A rank killed by a signal has exit code 128 + signal, as in a shell. See torchrun.sbatch.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)  # loaded here: preexec_fn must not take locks
received, ranks = [], []


def forward(number, _frame):
    received.append(number)
    for rank in ranks:
        rank.send_signal(number)


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, forward)
# torchrun may kill this process, and the rank must end with it.
ranks.append(subprocess.Popen(sys.argv[1:], preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)))
for number in received:  # received before the rank started. A second signal does no harm
    ranks[0].send_signal(number)
code = ranks[0].wait()
code = 128 - code if code < 0 else code
if code != 0:
    try:
        with open(os.environ["EXIT_CODE_FILE"], "x") as file:
            file.write(f"{code}\n")
    except FileExistsError:
        pass
sys.exit(code)
