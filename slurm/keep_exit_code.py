"""Runs a rank of torchrun's, which turns every exit code into 1, and keeps the first that is not 0 in $EXIT_CODE_FILE.

Death by a signal is 128 and its number, as in a shell. See torchrun.sbatch.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)  # not in preexec_fn, where no lock must be taken
told, ranks = [], []


def hand_on(number, _frame):
    told.append(number)
    for rank in ranks:
        rank.send_signal(number)


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, hand_on)
# torchrun kills this process in the end, and the rank must not stay.
ranks.append(subprocess.Popen(sys.argv[1:], preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)))
for number in told:  # before the rank was there; hearing it twice does no harm
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
