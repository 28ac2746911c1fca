"""Ends as yolov5 does: a file when the last epoch is done, then a long end. Started again, it fails. FOLDER EPOCHS."""

import sys
import time
from pathlib import Path

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(exist_ok=True)
last, best = folder / "last.txt", folder / "best.txt"
first = int(last.read_text()) if last.exists() else 0
assert first < epochs, f"training to {epochs} epochs is finished, nothing to resume."
for epoch in range(first, epochs):
    time.sleep(0.02)
    last.write_text(str(epoch + 1))
    print(f"epoch {epoch}", flush=True)
best.write_text("validated")
print(f"{epochs} epochs completed", flush=True)
if "--fails" in sys.argv:
    raise RuntimeError("plots need a display")
time.sleep(600)
