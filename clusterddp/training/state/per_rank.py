"""State that each rank has for itself: environments, replay buffers, generators; checkpoints hold that of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterddp.checkpoint import transfer
from clusterddp.checkpoint.state import Stateful, copied
from clusterddp.distributed.collectives import broadcast_json
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.training.state.parts import Parts, by_name

#: Of a part: takes over the states of another number of ranks.
SPLIT = "load_state_dicts"


class PerRank:
    """What ``ctx.run(per_rank=...)`` got; false if nothing. Made by all ranks together.

    Raises TypeError for a part without a state, and for other names than rank 0's.
    """

    def __init__(self, given: Parts, group: ProcessGroup) -> None:
        named = by_name({"per_rank": given})
        self._parts = {name.removeprefix("per_rank."): part for name, part in named.items()}
        self._group = group
        self._states: list[dict[str, Any]] = []
        self._kept: bytes | None = None
        #: Of all ranks' states, when they were last gathered; and whether ``near_limit`` has told of it.
        self._bytes, self._told = 0, False
        others = broadcast_json(sorted(self._parts), group.control_device)
        if others != sorted(self._parts):
            raise TypeError(
                f"run(per_rank=...): rank {group.rank} has {_listed(self._parts)}, and rank 0 has {_listed(others)}: "
                "all ranks save together; pass the same names on every rank"
            )

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """This rank's parts by name."""
        return self._parts

    def keep(self) -> None:
        """Remembers this rank's state, for ``changed``, at the place for an evaluation."""
        self._kept = transfer.digest(self._own()) if self._parts else None

    def changed(self) -> bool:
        """Whether this rank's state may have changed since ``keep``, of this step."""
        return bool(self._parts) and self._kept != transfer.digest(self._own())

    def begin_step(self) -> None:
        """A step begins."""
        self._kept = None

    def _own(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def gather(self) -> None:
        """Brings the states of all ranks to rank 0. Collective.

        Raises CheckpointError on all ranks if they are too large, or cannot be saved.
        """
        if not self._parts:
            return
        try:
            self._states = transfer.gather(self._own(), self._group.control_device, self._note_size) or []
        except transfer.TooLarge as error:
            raise CheckpointError(
                f"the per-rank state of all {self._group.world_size} ranks ({_listed(self._parts)}) takes "
                f"{error.size / 1e6:,.0f} MB, and a checkpoint holds at most {transfer.MOST_BYTES / 1e6:,.0f} MB of "
                "it: leave out of state_dict() what can be computed again or read from elsewhere, or save less of it, "
                "such as a replay buffer's newest entries"
            ) from error

    def _note_size(self, size: int) -> None:
        self._bytes = size

    def near_limit(self) -> dict[str, Any] | None:
        """Once, when the states as last gathered take more than half of the limit: names, bytes and the limit."""
        if self._told or 2 * self._bytes <= transfer.MOST_BYTES:
            return None
        self._told = True
        return {"names": sorted(self._parts), "bytes": self._bytes, "limit": transfer.MOST_BYTES}

    def progress(self) -> dict[str, Any]:
        """The states as last gathered, for a checkpoint."""
        return {"per_rank": self._states} if self._parts else {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restores this rank's state. Raises CheckpointError if the checkpoint does not fit."""
        states: list[dict[str, Any]] = progress.get("per_rank", [{}] * self._group.world_size)
        same = len(states) == self._group.world_size
        saved = set(states[self._group.rank] if same else set().union(*states))
        if saved != self._parts.keys():
            raise CheckpointError(
                f"the checkpoint has per-rank state of {_listed(saved)}, and ctx.run(per_rank=...) got "
                f"{_listed(self._parts)}: pass what the run started with, or start a new run"
            )
        for name, part in self._parts.items():
            try:
                self._restore(name, part, states if same else [one for one in states if name in one])
            except (ValueError, RuntimeError, KeyError, TypeError) as error:
                raise CheckpointError(f"the checkpoint does not fit per_rank {name}: {error!r}") from error

    def _restore(self, name: str, part: Stateful, states: list[dict[str, Any]]) -> None:
        rank, ranks = self._group.rank, self._group.world_size
        if len(states) == ranks:
            part.load_state_dict(copied(states[rank][name]))
        elif hasattr(part, SPLIT):
            getattr(part, SPLIT)([copied(one[name]) for one in states], rank, ranks)
        else:
            raise CheckpointError(
                f"the checkpoint has the state of {name} for {len(states)} ranks, and there are now {ranks}: use "
                f"{len(states)} ranks, or give {name} a method {SPLIT}(states, rank, world_size) that "
                "takes over a rank's share of all states"
            )


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
