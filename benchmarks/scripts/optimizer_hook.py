"""A script of benchmarks/steps/step_timing.py that does not use clusterddp: optimizer steps with and without its hook.

The arguments: a folder for ``rank-0.json``, the pairs of blocks, and the steps of a block.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks


def block(optimizer: torch.optim.Optimizer, steps: int) -> float:
    """CPU microseconds of this thread per step."""
    begun = time.thread_time()
    for _ in range(steps):
        optimizer.step()
    return 1e6 * (time.thread_time() - begun) / steps


def main() -> None:
    """Measures the pairs, whose order alternates."""
    folder, pairs, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    if not hooks:
        sys.exit("clusterddp has registered no hook")
    ours = dict(hooks)
    block(optimizer, 10 * steps)  # the first steps import modules
    figures = []
    for number in range(pairs):
        pair = {}
        for kind in ("on", "off") if number % 2 else ("off", "on"):
            hooks.clear()
            hooks.update(ours if kind == "on" else {})
            pair[kind] = block(optimizer, steps)
        hooks.update(ours)
        figures.append(pair)
    (folder / "rank-0.json").write_text(json.dumps(figures))


main()
