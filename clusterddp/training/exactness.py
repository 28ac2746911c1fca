"""Why a resume may not be exact: state that differs between ranks, and shapes that change under torch.compile.

A checkpoint has only rank 0's state. With the states, the ranks compare how often the script has called
``run.every``, which all ranks must call in the same steps.

torch.compile compiles a function for the first shape that it gets, and for any shape once a second one comes. The two
graphs may differ in the last bits of their results. A resumed process that evaluates before it trains sees shapes in
a different order than the uninterrupted one, and trains with the other graph (seen in torch 2.13).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clusterddp.checkpoint.packing import Packed, bits_of
from clusterddp.checkpoint.parts import Stateful
from clusterddp.checkpoint.state_dict import parameters_of, state_of
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.distributed.wrapping import ddp_modules, unreduced
from clusterddp.reporter import counted

#: The steps of an attempt after which states are compared: some differ from the start, others only once in use.
COMPARED_AFTER = (1, 10, 100)
#: Of tensors with more bytes only a sum is compared, computed on their device.
_SMALL = 1 << 16
#: The elements that are summed at a time, because torch first converts them to the sum's dtype: 32 MiB.
SUMMED = 1 << 22
#: The ranks whose states rank 0 gets with one message.
_AT_ONCE = 512
#: The key, besides the names of parts, of the number of calls.
_ASKED = ""
#: The most ranks that a message lists.
_NAMED = 4


class Divergence:
    """Compares the ranks' states in an attempt's first steps. Other steps have no cost."""

    def __init__(self, parts: Mapping[str, Stateful], group: ProcessGroup) -> None:
        self._parts, self._group = parts, group
        #: The parts known to differ, in this attempt or an earlier one; new ones are known only to rank 0.
        self.parts: set[str] = set()
        #: How often each rank has called ``run.every``, on rank 0, when that is first seen to differ.
        self.uneven: dict[int, int] = {}
        self._even = True

    def compare(self, steps: int, asked: int = 0) -> list[str]:
        """After the attempt's first ``steps`` steps, on all ranks: the parts newly found to differ, on rank 0.

        ``asked``: how often this rank has called ``run.every``.
        """
        if steps not in COMPARED_AFTER or self._group.world_size == 1:
            return []
        own: dict[str, Any] = {name: _digest(part) for name, part in self._parts.items() if name not in self.parts}
        own[_ASKED] = asked
        key = f"states/{steps}"
        if self._group.rank != 0:
            self._group.store.set(f"{key}/{self._group.rank}", json.dumps(own))
            return []
        found: set[str] = set()
        counts = {0: own.pop(_ASKED)}
        keys = [f"{key}/{rank}" for rank in range(1, self._group.world_size)]
        for first in range(0, len(keys), _AT_ONCE):
            for text in self._group.store.multi_get(keys[first : first + _AT_ONCE]):  # waits until all are set
                others = json.loads(text)
                counts[len(counts)] = others.pop(_ASKED)
                found |= {n for n, digest in own.items() if digest and others.get(n, digest) not in (digest, None)}
        self.parts |= found
        self.uneven = counts if self._even and len(set(counts.values())) > 1 else {}
        self._even = self._even and not self.uneven
        return sorted(found)

    def unreduced(self) -> list[str]:
        """The parts newly found to have parameters that train, but whose gradients DDP does not average."""
        found = [
            name
            for name, part in self._parts.items()
            if name not in self.parts and any(map(unreduced, ddp_modules(part)))
        ]
        self.parts |= set(found)
        return found


def explanation_of_unreduced(parts: Iterable[str]) -> str:
    """The message: what it means, and the remedy."""
    return (
        f"{', '.join(parts)} has parameters that require gradients now, but did not when it was wrapped. DDP averages "
        "only the gradients of the others, so the ranks train these apart, and a checkpoint has only rank 0's. Wrap "
        "the model before you freeze its parameters, with ctx.wrap(model, find_unused_parameters=True)"
    )


def explanation_of_divergence(parts: Iterable[str]) -> str:
    """The message: what it means, and the remedy."""
    return (
        f"the state of {', '.join(parts)} differs between ranks, but a checkpoint has only rank 0's, so a resume will "
        "not be exact. Wrap models with ctx.wrap(). Derive per-rank values from run.step and ctx.rank, or pass them to "
        "ctx.run(per_rank=...), which saves them for every rank"
    )


def explanation_of_calls(counts: Mapping[int, int]) -> str:
    """The message about ``run.every`` on some ranks only."""
    usual = max(set(counts.values()), key=list(counts.values()).count)
    shown = dict(list({rank: n for rank, n in counts.items() if n != usual or rank == 0}.items())[:_NAMED])
    if len(set(shown.values())) == 1:
        shown[next(rank for rank, n in counts.items() if n == usual)] = usual
    said = ", ".join(f"rank {rank}: {counted(n, 'time')}" for rank, n in sorted(shown.items()))
    return (
        f"some ranks called run.every() more often than others ({said}). All ranks must call it in the same steps, so "
        "that they agree on evaluations and saves. Put it first, as in `if run.every(...) and ctx.is_main:`"
    )


def _digest(part: Stateful) -> str | None:
    """Equal on two ranks for equal states, practically never for others. None if this rank cannot compute it.

    For a model in DDP it covers the parameters: buffers are rank 0's, or the run reports them on its own. For a sharded
    model, it covers what all ranks have.
    """
    try:
        in_ddp = isinstance(part, torch.nn.Module) and ddp_modules(part)
        with torch.no_grad():
            packed = Packed(parameters_of(part) if in_ddp else state_of(part))  # type: ignore[arg-type]
        tensors = {name: tensor for name, tensor in packed.tensors.items() if name not in packed.sharded}
        facts = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
        text = json.dumps([packed.plain(), facts, fingerprints(tensors.values())], sort_keys=True)
    except Exception:  # The script's own code may expect to run only on rank 0, which is no reason to end the run.
        return None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@torch.no_grad()
def fingerprints(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Of each tensor: equal for the same bits, practically never for others."""
    found: list[Any] = []
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for tensor in tensors:
        bits = bits_of(tensor)
        if bits.nbytes <= _SMALL:
            found.append(hashlib.blake2b(bits.cpu().numpy().tobytes(), digest_size=8).hexdigest())
        else:
            pieces = bits.view(-1).split(SUMMED)  # type: ignore[no-untyped-call]
            total = torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()
            sums.setdefault(bits.device, []).append((len(found), total))
            found.append(None)
    for of_device in sums.values():
        for (place, _), total in zip(of_device, torch.stack([one for _, one in of_device]).tolist(), strict=True):
            found[place] = total
    return found


#: Each rank checks its shapes after this many steps, after an evaluation, and when all ranks stop.
SHAPES_CHECK_STEPS = 32
_KEY = "shapes_changed"
#: The module in which torch records shapes since 2.6.
_PGO = "torch._dynamo.pgo"
REASON = "torch.compile chooses among its graphs by the order in which it saw shapes"
_SHAPES_CHANGED = (
    "torch.compile has seen changing shapes, and chooses among its graphs by the order in which it saw them, so a "
    "resume will not be exact. Use torch.compile(..., dynamic=False), which compiles for each shape, or evaluate "
    "with the training's batch size or without torch.compile"
)
_COMPILED_AGAIN = (
    "torch.compile has compiled a function more than once, either for changing shapes, after which a resume will not "
    "be exact, or for a different reason, such as an evaluation. torch before 2.6 does not record which. Use torch 2.6 "
    "or newer, or evaluate without torch.compile"
)


def explanation_of_shapes() -> str:
    """What a change means, for the user."""
    return _SHAPES_CHANGED if _PGO in sys.modules else _COMPILED_AGAIN


class CompiledShapes:
    """Whether compiled functions have seen changing shapes. Each rank looks at those of its process."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._graphs = 0
        #: Whether one has, in this attempt or an earlier one. On rank 0: whether one has on any rank.
        self.changed = False

    def look(self) -> bool:
        """Whether this is news, for rank 0. The other ranks pass theirs on to it."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if self.changed or dynamo is None or dynamo.counters["stats"]["unique_graphs"] == self._graphs:
            return False
        self._graphs = dynamo.counters["stats"]["unique_graphs"]
        self.changed = self._changed()
        if self.changed and self._group.rank != 0:
            self._group.store.set(_KEY, "")
            return False
        return self.changed

    def ask(self) -> bool:
        """For rank 0, before it saves: whether a different rank has passed on a change that is news."""
        if self.changed or self._group.world_size == 1:
            return False
        self.changed = self._group.store.check([_KEY])
        return self.changed

    def progress(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {_KEY: True} if self.changed else {}

    def restore(self, progress: Mapping[str, Any]) -> list[str]:
        """The inverse of ``progress``. Returns the reason why the resume is not exact."""
        self.changed = progress.get(_KEY, False)
        return [REASON] if self.changed else []

    @staticmethod
    def _changed() -> bool:
        pgo = sys.modules.get(_PGO)
        if pgo is None:  # whether a function was compiled twice, perhaps for another reason
            metrics = sys.modules["torch._dynamo.utils"].get_compilation_metrics()
            return any(getattr(one, "cache_size", None) for one in metrics)
        states = pgo.get_code_state().values()
        return any(_changes(entry, pgo.auto_dynamic) for state in states for entry in state.automatic_dynamic.values())


def _changes(entry: Any, mark: object) -> bool:
    """Whether a tensor's size or stride, or a number, has changed. ``mark``: dynamo's, in the place of one that has."""
    if isinstance(entry.size, tuple):
        return mark in entry.size or (isinstance(entry.stride, tuple) and mark in entry.stride)
    return entry.scalar is mark
