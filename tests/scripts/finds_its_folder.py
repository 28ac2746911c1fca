"""Starts as open_clip does: if its folder of logs exists it prints an error and exits with code 0. FOLDER STEPS."""

import sys
import time
from pathlib import Path

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
if folder.exists():
    print("Error. Experiment already exists. Use --name {} to specify a new experiment.")
    sys.exit(0)
folder.mkdir()
for step in range(steps):
    time.sleep(0.02)
    print(f"step {step}", flush=True)
