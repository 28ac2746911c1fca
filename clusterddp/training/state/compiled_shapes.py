"""Whether a resume changes which graphs torch.compile uses: it depends on the order in which shapes came.

A function is compiled for the first shape that it gets, and for any shape once a second one comes. The two graphs may
differ in the last bits of their results. A resumed process that evaluates before it trains sees shapes in another order
than the uninterrupted one, and trains with the other graph: seen in torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from clusterddp.distributed.process_group import ProcessGroup

#: Each rank looks every so many steps, after an evaluation, and when all ranks stop.
LOOK_STEPS = 32
_KEY = "shapes_changed"
#: The module in which torch records shapes since 2.6.
_PGO = "torch._dynamo.pgo"
REASON = "torch.compile chooses among its graphs by the order in which shapes came"
_SHAPES_CHANGED = (
    "torch.compile has seen changing shapes and chooses among its graphs by the order in which they came: a resume "
    "will not be exact. Pass torch.compile(..., dynamic=False), which compiles for each shape, or evaluate with the "
    "training's batch size or without torch.compile"
)
_COMPILED_AGAIN = (
    "torch.compile has compiled a function more than once: for changing shapes, after which a resume will not be "
    "exact, or for another reason, such as an evaluation. torch before 2.6 does not record which. Use torch 2.6 or "
    "newer, or evaluate without torch.compile"
)


def explanation() -> str:
    """What a change means, for the user."""
    return _SHAPES_CHANGED if _PGO in sys.modules else _COMPILED_AGAIN


class CompiledShapes:
    """Whether compiled functions have seen changing shapes; each rank looks at those of its process."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._graphs = 0
        #: Whether one has, in this attempt or an earlier one; on rank 0, on any rank.
        self.changed = False

    def look(self) -> bool:
        """Whether this is news, for rank 0; the other ranks pass theirs on to it."""
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
        """For rank 0, before it saves: whether it is news that another rank has passed on."""
        if self.changed or self._group.world_size == 1:
            return False
        self.changed = self._group.store.check([_KEY])
        return self.changed

    def progress(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {_KEY: True} if self.changed else {}

    def restore(self, progress: Mapping[str, Any]) -> list[str]:
        """The inverse of ``progress``; returns the reason why the resume is not exact."""
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
