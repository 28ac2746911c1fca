"""Parts whose state differs between ranks: a checkpoint holds rank 0's, so that a resume of the others is not exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clusterddp.checkpoint.state import Stateful, pack, parameters_of, state_of
from clusterddp.distributed.modules import ddp_modules
from clusterddp.distributed.process_group import ProcessGroup

#: The steps of an attempt after which the ranks' states are compared: some differ from the beginning, some only once
#: they are in use.
COMPARED_AFTER = (1, 10, 100)
#: Of larger tensors only a sum is compared: it is made where they are.
_SMALL = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Divergence:
    """Compares the ranks' states in an attempt's first steps; at any other step it costs nothing."""

    def __init__(self, parts: Mapping[str, Stateful], group: ProcessGroup) -> None:
        self._parts, self._group = parts, group
        self._steps = 0
        #: The parts that are known to differ, now or in an attempt before; rank 0 alone knows of what is new.
        self.parts: set[str] = set()

    def compare(self) -> list[str]:
        """After a step, on all ranks: the parts that were found to differ now, on rank 0."""
        self._steps += 1
        if self._steps not in COMPARED_AFTER or self._group.world_size == 1:
            return []
        own = {name: _digest(part) for name, part in self._parts.items() if name not in self.parts}
        key = f"states/{self._steps}"
        if self._group.rank != 0:
            self._group.store.set(f"{key}/{self._group.rank}", json.dumps(own))
            return []
        found: set[str] = set()
        for rank in range(1, self._group.world_size):
            others = json.loads(self._group.store.get(f"{key}/{rank}"))
            found |= {name for name, digest in own.items() if digest and others.get(name, digest) not in (digest, None)}
        self.parts |= found
        return sorted(found)


def explanation(parts: Iterable[str]) -> str:
    """What it means, and the remedy."""
    return (
        f"the state of {', '.join(parts)} differs between ranks, and a checkpoint holds rank 0's alone: a resume will "
        "not be exact. Wrap a model with ctx.wrap(); what each rank has of its own, derive from run.step and ctx.rank, "
        "or make it the state of the run's loader, which is saved for every rank"
    )


def _digest(part: Stateful) -> str | None:
    """Equal on two ranks for equal states, as good as never for others; None for a state that this rank cannot give.

    Of a model in DDP these are the parameters: its buffers are rank 0's, or the run says so by itself.
    """
    try:
        in_ddp = isinstance(part, torch.nn.Module) and ddp_modules(part)
        plain, tensors = pack(parameters_of(part) if in_ddp else state_of(part))  # type: ignore[arg-type]
        facts = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
        text = json.dumps([plain, facts, _fingerprints(tensors.values())], sort_keys=True)
    except Exception:  # The script's own code, which may expect to run on rank 0 alone: not a reason to end the run.
        return None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@torch.no_grad()
def _fingerprints(tensors: Iterable[torch.Tensor]) -> list[Any]:
    sums: dict[torch.device, list[torch.Tensor]] = {}
    found: list[Any] = []
    for tensor in tensors:
        values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
        bits = values.contiguous().view(_INTEGERS[values.element_size()])
        if bits.nbytes <= _SMALL:
            found.append(hashlib.blake2b(bits.cpu().numpy().tobytes(), digest_size=8).hexdigest())
        else:
            sums.setdefault(bits.device, []).append(bits.sum(dtype=torch.int64))
    return found + [torch.stack(of_device).tolist() for of_device in sums.values()]
