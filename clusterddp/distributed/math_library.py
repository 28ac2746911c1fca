"""The first call of MKL's vector functions, which torch's CPU kernels use: made before several threads make it."""

from __future__ import annotations

import torch

_FUNCTIONS = (torch.sqrt, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sin, torch.cos, torch.tanh, torch.erf)


def settle() -> None:
    """Calls each function once, in this thread.

    MKL (2024.2, in torch 2.13) stores the number of the CPU's type in its first call, and then replaces it by its own
    numbering, without a lock. A thread that reads the number in between gets another row of the table of kernels, and
    its part of the first result has errors of up to 3e-4 (docs/measurements/math-library.md). AdamW's first step after
    a start or a resume then differed from that of other ranks.
    """
    for dtype in (torch.float32, torch.float64):
        values = torch.full((8,), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(values)
