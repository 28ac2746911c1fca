"""Waiting for the memory of a GPU that a killed process still holds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from clusterddp.reporter import say

#: The driver frees the memory of a killed process within seconds, or after its last kernel. Between two looks.
PATIENCE_S, LOOK_S = 60.0, 0.5
GIB = 2**30


def wait_until_free(devices: Sequence[torch.device], wanted: int, patience_s: float = PATIENCE_S) -> bool:
    """Waits until each device has ``wanted`` free bytes, as the attempt before used; False after ``patience_s``."""
    deadline, said = time.monotonic() + patience_s, False
    while (least := min((torch.cuda.mem_get_info(device)[0], str(device)) for device in devices))[0] < wanted:
        free = f"{least[0] / GIB:.2f} GiB are free on {least[1]}, but the previous attempt used {wanted / GIB:.2f} GiB"
        if time.monotonic() > deadline:
            say(f"{free}: continuing anyway after {patience_s:.0f} s")
            return False
        if not said:
            say(f"{free}: waiting")
            said = True
        time.sleep(LOOK_S)
    return True
