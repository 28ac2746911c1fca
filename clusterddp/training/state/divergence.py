"""Finds parts whose state differs between ranks: a checkpoint has only rank 0's, so that a resume is not exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clusterddp.checkpoint.state import Stateful, bits_of, pack, parameters_of, state_of
from clusterddp.distributed.modules import ddp_modules
from clusterddp.distributed.process_group import ProcessGroup

#: The steps of an attempt after which states are compared: some differ from the start, others only once in use.
COMPARED_AFTER = (1, 10, 100)
#: Of tensors with more bytes only a sum is compared, computed on their device.
_SMALL = 1 << 16
#: The ranks whose states rank 0 gets with one message.
_AT_ONCE = 512


class Divergence:
    """Compares the ranks' states in an attempt's first steps; other steps cost nothing."""

    def __init__(self, parts: Mapping[str, Stateful], group: ProcessGroup) -> None:
        self._parts, self._group = parts, group
        #: The parts known to differ, in this attempt or an earlier one; new ones are known only to rank 0.
        self.parts: set[str] = set()

    def compare(self, steps: int) -> list[str]:
        """After the attempt's first ``steps`` steps, on all ranks: the parts newly found to differ, on rank 0."""
        if steps not in COMPARED_AFTER or self._group.world_size == 1:
            return []
        own = {name: _digest(part) for name, part in self._parts.items() if name not in self.parts}
        key = f"states/{steps}"
        if self._group.rank != 0:
            self._group.store.set(f"{key}/{self._group.rank}", json.dumps(own))
            return []
        found: set[str] = set()
        keys = [f"{key}/{rank}" for rank in range(1, self._group.world_size)]
        for first in range(0, len(keys), _AT_ONCE):
            for text in self._group.store.multi_get(keys[first : first + _AT_ONCE]):  # waits until all are set
                others = json.loads(text)
                found |= {n for n, digest in own.items() if digest and others.get(n, digest) not in (digest, None)}
        self.parts |= found
        return sorted(found)


def explanation(parts: Iterable[str]) -> str:
    """The message: what it means, and the remedy."""
    return (
        f"the state of {', '.join(parts)} differs between ranks, and a checkpoint has only rank 0's: a resume will not "
        "be exact. Wrap models with ctx.wrap(); derive per-rank values from run.step and ctx.rank, or pass them by "
        "ctx.run(per_rank=...), which saves them for every rank"
    )


def _digest(part: Stateful) -> str | None:
    """Equal on two ranks for equal states, practically never for others; None if this rank cannot compute it.

    For a model in DDP it covers the parameters: buffers are rank 0's, or the run reports them on its own.
    """
    try:
        in_ddp = isinstance(part, torch.nn.Module) and ddp_modules(part)
        plain, tensors = pack(parameters_of(part) if in_ddp else state_of(part))  # type: ignore[arg-type]
        facts = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
        text = json.dumps([plain, facts, _fingerprints(tensors.values())], sort_keys=True)
    except Exception:  # The script's own code, which may expect to run only on rank 0: not a reason to end the run.
        return None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@torch.no_grad()
def _fingerprints(tensors: Iterable[torch.Tensor]) -> list[Any]:
    sums: dict[torch.device, list[torch.Tensor]] = {}
    found: list[Any] = []
    for tensor in tensors:
        bits = bits_of(tensor)
        if bits.nbytes <= _SMALL:
            found.append(hashlib.blake2b(bits.cpu().numpy().tobytes(), digest_size=8).hexdigest())
        else:
            sums.setdefault(bits.device, []).append(bits.sum(dtype=torch.int64))
    return found + [torch.stack(of_device).tolist() for of_device in sums.values()]
