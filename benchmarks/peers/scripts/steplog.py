"""What every script calls, the same for all: a line per step, a pad that hides the noise of a busy CPU, the end.

``$PEERS_LOG/steps`` has a line per step, by rank 0: time, step, pid. ``$PEERS_LOG/ranks`` has a line per started rank,
after its first step: time, rank, pid, host. ``$PEERS_LOG/final.bin`` has the final parameters and buffers: the training
is done.
"""

import os
import socket
import time

LOG = os.environ["PEERS_LOG"]
PAD_S = 0.1
_started = False


def steplog(step):
    """Call it after each optimizer step; ``step`` counts from 0 over the whole training."""
    global _started
    time.sleep(PAD_S)
    rank, now = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))), time.time()
    if not _started:
        _append("ranks", f"{now:.3f} {rank} {os.getpid()} {socket.gethostname()}\n")
        _started = True
    if rank == 0:
        _append("steps", f"{now:.3f} {step} {os.getpid()}\n")


def finish(model):
    """Call it after the last step, on any rank."""
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0:
        tensors = [tensor.detach().float().reshape(-1).numpy().tobytes() for tensor in model.state_dict().values()]
        with open(f"{LOG}/final.tmp", "wb") as file:
            file.write(b"".join(tensors))
        os.replace(f"{LOG}/final.tmp", f"{LOG}/final.bin")


def _append(name, line):
    file = os.open(f"{LOG}/{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line.encode())
    os.close(file)
