"""What a step may change before its optimizer steps, as it was when the step began: for a checkpoint of that moment.

A stop in an evaluation saves the state before the step, which the next attempt repeats. What the script has changed
since then, such as its own values or a scheduler that took the result of a first evaluation, must not count twice.
Buffers are rewound by ``distributed/buffers.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from clusterddp.checkpoint.state import Stateful, copied, pack, state_of
from clusterddp.training.state.values import Values

#: A part with larger tensors is not copied at an evaluation: it trains or collects, rather than counts.
LARGEST_COPY_BYTES = 1 << 20


class BeforeStep:
    """``begin_step`` keeps the script's own values in each step; ``keep``, at the place for an evaluation, all else."""

    def __init__(self, parts: Mapping[str, Stateful], values: Values) -> None:
        self._parts, self._own, self._has_values = parts, values, bool(values)
        #: The script's own values.
        self.values: dict[str, Any] = {}
        self._kept: dict[str, dict[str, Any]] = {}

    def begin_step(self) -> None:
        """A step begins."""
        if self._has_values:
            self.values = self._own.state_dict()
        if self._kept:
            self._kept = {}

    def keep(self) -> None:
        """Copies the states of optimizers, without what they hold per parameter, and of the parts that are small."""
        self._kept = {name: _small_state(part) for name, part in self._parts.items()}

    def state_of(self, name: str) -> dict[str, Any]:
        """A part's state when the step began, as far as it was kept; its present state otherwise."""
        part, kept = self._parts[name], self._kept.get(name)
        if not kept:
            return state_of(part)
        if not isinstance(part, torch.optim.Optimizer):
            return kept
        now = state_of(part)
        groups = zip(now["param_groups"], kept["param_groups"], strict=True)
        return {**now, "param_groups": [{**group, **before} for group, before in groups]}


def _small_state(part: Stateful) -> dict[str, Any]:
    """What is kept of a part; nothing of a module, or of one that is large."""
    if isinstance(part, torch.nn.Module):
        return {}
    state = state_of(part)
    if isinstance(part, torch.optim.Optimizer):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        kept: dict[str, Any] = copied({"param_groups": groups})
        return kept
    _, tensors = pack(state)
    return copied(state) if sum(tensor.nbytes for tensor in tensors.values()) <= LARGEST_COPY_BYTES else {}
