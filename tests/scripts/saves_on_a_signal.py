"""Saves on a signal that it expects, as lingua (USR2) and fairseq2 (USR1) do: SIGNAL FOLDER STEPS [PAUSE].

The ranks begin together. The handler sets a flag, the loop looks at it after each step, saves and exits with code 0.
Rank 1 saves for longer. The loop ends at STEPS, or at once if a file says that all of them are done.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

name, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
pause_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.02
rank = int(os.environ.get("RANK", 0))
saved, stops = folder / f"rank-{rank}.step", []
signal.signal(signal.SIGTERM, lambda *_: print("TERM came", flush=True))
signal.signal(getattr(signal, name), lambda number, _: stops.append(signal.Signals(number).name))
folder.mkdir(exist_ok=True)
here = [
    folder / f"attempt-{os.environ.get('CLUSTERDDP_ATTEMPT', 0)}-{one}"
    for one in range(int(os.environ.get("WORLD_SIZE", 1)))
]
here[rank].touch()
while not all(path.exists() for path in here):  # as in a collective
    time.sleep(0.01)
first = int(saved.read_text()) if saved.exists() else 0
print(f"starts at step {first}", flush=True)
for step in range(first, steps):
    time.sleep(pause_s)
    print(f"step {step}", flush=True)
    if stops:
        time.sleep(rank * 0.5)
        saved.write_text(str(step + 1))
        print(f"saved step {step + 1} on {stops}", flush=True)
        if os.environ.get("REQUEUES_ITSELF"):  # as lingua does
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
        sys.exit(0)
print("all steps done", flush=True)
