"""A rank without torch that trains nothing: it sends heartbeats, stops when it is told to, and answers with its stacks.

It prints a line with its process id and the time once it runs, and one when it is told to stop.
"""

import os
import signal
import sys
import threading
import time
import types

from clusterddp.errors import Stopped
from clusterddp.worker import control_channel

sys.modules["clusterddp.training.context"] = types.ModuleType("stub")  # a script that uses clusterddp, without torch
told = threading.Event()
why = []


def stop(reason):
    why.append(str(reason))
    told.set()


for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: stop(signal.Signals(number).name))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
channel, rank = control_channel.current, int(os.environ["RANK"])
channel.on_stop(stop)
print("runs", os.getpid(), time.time(), flush=True)
if rank == 0:
    channel.send("training", step=0)
    channel.send("progress", step=0, steps=1000)
while not told.wait(2.0):
    channel.send("alive", count=7, step=6, age_s=0.0, allowed_s=600.0)
channel.send("signal", signal=why[0])
if rank == 0:
    channel.send("stopping", step=7, reason=why[0])
print("told", os.getpid(), time.time(), flush=True)
raise Stopped(None, why[0])
