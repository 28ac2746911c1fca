"""The first call of MKL's vector functions, which torch's CPU kernels use: made before several threads make it."""

from __future__ import annotations

import torch

_FUNCTIONS = (torch.sqrt, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sin, torch.cos, torch.tanh, torch.erf)


def settle() -> None:
    """Calls each function once, in this thread.

    Where two OpenMP threads made the first call of a process together, one of them sometimes got its part with errors
    of up to 3e-4 (``sqrt`` of 16,384 floats, torch 2.13, MKL: in a few of a hundred processes on a busy machine, never
    later in a process). AdamW's first step after a start or a resume then differed from that of other ranks.
    """
    for dtype in (torch.float32, torch.float64):
        values = torch.full((8,), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(values)
