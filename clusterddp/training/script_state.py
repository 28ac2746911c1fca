"""The state that a script gives to ``ctx.run()``: its parts by name, its own values, and state per rank.

The values are restored in place (``script_state={"best": 0.0, "patience": 0}``). State per rank is that of
environments, replay buffers and generators. Checkpoints hold it for all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from clusterddp.checkpoint import transfer
from clusterddp.checkpoint.parts import Stateful, check_parts, with_state
from clusterddp.checkpoint.state_copies import placed
from clusterddp.distributed.collectives import broadcast_json
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError, CheckpointMismatch
from clusterddp.history.checkpoints import PerRankGrows
from clusterddp.reporter import counted

#: What ``ctx.run()`` takes under one name.
Parts: TypeAlias = "Stateful | list[Any] | tuple[Any, ...] | dict[str, Any] | None"


def by_name(given: Mapping[str, Any]) -> dict[str, Stateful]:
    """Each part by its name: ``nets=[a, b]`` are ``nets.0`` and ``nets.1``, ``nets={"a": a}`` is ``nets.a``.

    None is left out, and random generators get a state. Raises TypeError for a part without a state, and for keys that
    are not names.
    """
    parts: dict[str, Stateful] = {}
    for name, part in given.items():
        if part is not None:
            parts |= by_name(_members(name, part)) if _is_container(part) else {name: with_state(part)}
    check_parts(
        "run", parts, "Keep numbers and text in script_state={...}, and wrap other values in a class with these methods"
    )
    return parts


def _is_container(part: object) -> bool:
    return isinstance(part, (list, tuple, dict)) and not hasattr(part, "state_dict")


def _members(name: str, container: Any) -> dict[str, Any]:
    if not isinstance(container, dict):
        return {f"{name}.{number}": member for number, member in enumerate(container)}
    for key in container:
        if not isinstance(key, str) or not key or "." in key:
            raise TypeError(f"run({name}=...): expected a dict of parts by name, got the key {key!r}")
    return {f"{name}.{key}": member for key, member in container.items()}


#: An instance of a dataclass, which ``ctx.run(script_state=...)`` takes besides dicts.
_PLAIN = (bool, int, float, str, type(None))


class Values:
    """The dict or dataclass instance that the script gave, and may change at any time. None if there is none.

    Raises TypeError for anything else, and for a value that a checkpoint cannot hold.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        if given is None:
            return
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            if given.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                raise TypeError(
                    f"run(script_state=...): {type(given).__name__} is frozen, so its values could not be restored"
                )
        elif not isinstance(given, dict):
            value = repr(given) if type(given) in _PLAIN else "..."
            raise TypeError(
                f"run(script_state={value}): expected a dict or an instance of a dataclass, got {_described(given)}"
            )
        self.state_dict()

    def __bool__(self) -> bool:
        return self._given is not None

    def state_dict(self) -> dict[str, Any]:
        """A copy of the values by name. Raises TypeError, with the name, for one that a checkpoint cannot hold."""
        if self._given is None:
            return {}
        if isinstance(self._given, dict):
            values = dict(self._given)
            if all(map(_is_plain, values, values.values())):
                return values
            copied: dict[str, Any] = _copied(values, "script_state")
            return copied
        names = [field.name for field in dataclasses.fields(self._given)]
        return {name: _copied(getattr(self._given, name), f"script_state.{name}") for name in names}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Sets the values in place. Those that the checkpoint lacks keep what the script gave.

        Raises CheckpointError for a value that has no place.
        """
        if saved and self._given is None:
            raise CheckpointMismatch(
                f"the checkpoint also has the script's values {', '.join(saved)}, but ctx.run() received no "
                "script_state=. Pass it again, or start a new run"
            )
        if isinstance(self._given, dict):
            self._given.update(saved)
            return
        for name, value in saved.items():
            if name not in {field.name for field in dataclasses.fields(self._given)}:
                raise CheckpointMismatch(
                    f"the checkpoint's script_state has {name!r}, but {type(self._given).__name__} has no such field. "
                    "Keep the field, or start a new run"
                )
            setattr(self._given, name, value)


def _is_plain(name: object, value: Any) -> bool:
    """Whether a member of a dict need not be copied, which holds for most."""
    return type(name) is str and type(value) in _PLAIN


def _copied(value: Any, path: str) -> Any:
    """A copy that shares no list or dict with the value. A checkpoint restores each of these types as it is."""
    if type(value) in _PLAIN or _is_numpy_scalar(value):
        return value
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, f"{path}[{number}]") for number, entry in enumerate(value))
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"ctx.run(script_state=...): {path} has the key {key!r}, expected text")
        return {key: _copied(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    hint = ". Pass its .item() instead" if hasattr(value, "item") else ""
    raise TypeError(
        f"ctx.run(script_state=...): {path} is {_described(value)}, expected numbers, text, True, False, None, or "
        f"lists and dicts of them{hint}"
    )


def _is_numpy_scalar(value: Any) -> bool:
    """A numpy number, such as a numpy mean. A checkpoint restores it exactly."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "tobytes")


def _described(value: object) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


#: A part's method that takes over the states of a different number of ranks.
SPLIT = "load_state_dicts"


class PerRank:
    """The parts of ``ctx.run(per_rank=...)``. False if there are none. Made by all ranks together.

    Raises TypeError for a part without a state, and for names that differ from rank 0's.
    """

    #: The most bytes of all ranks' states together.
    most_bytes = transfer.MOST_BYTES

    def __init__(self, given: Parts, group: ProcessGroup) -> None:
        named = by_name({"per_rank": given})
        self._parts = {name.removeprefix("per_rank."): part for name, part in named.items()}
        self._group = group
        self._states: list[dict[str, Any]] = []
        self._kept: bytes | None = None
        #: The size of all ranks' states, when they were last gathered, and whether ``near_limit`` has reported it.
        self._bytes, self._near_limit_reported = 0, False
        others = broadcast_json(sorted(self._parts), group.control_device)
        if others != sorted(self._parts):
            raise TypeError(
                f"run(per_rank=...): rank {group.rank} has {_listed(self._parts)}, but rank 0 has {_listed(others)}. "
                "All ranks save together. Pass the same names on every rank"
            )

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """This rank's parts by name."""
        return self._parts

    def keep(self) -> None:
        """Remembers this rank's state, for ``changed``, at the place for an evaluation."""
        self._kept = transfer.digest(self._state_dicts()) if self._parts else None

    def changed(self) -> bool:
        """Whether this rank's state may have changed since ``keep``, of this step."""
        return bool(self._parts) and self._kept != transfer.digest(self._state_dicts())

    def begin_step(self) -> None:
        """A step begins."""
        self._kept = None

    def _state_dicts(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def gather(self) -> None:
        """Brings the states of all ranks to rank 0. Collective.

        Raises CheckpointError on all ranks if they are too large, or cannot be saved.
        """
        if not self._parts:
            return
        try:
            device = self._group.control_device
            self._states = transfer.gather(self._state_dicts(), device, self._note_size, self.most_bytes) or []
        except transfer.TooLarge as error:
            raise CheckpointError(
                f"the per-rank state of all {self._group.world_size} ranks ({_listed(self._parts)}) takes "
                f"{error.size / 1e6:,.0f} MB, but a checkpoint holds at most {self.most_bytes / 1e6:,.0f} MB of "
                "it. Leave out of state_dict() what can be computed again or read from elsewhere, or save less of it, "
                "such as a replay buffer's newest entries"
            ) from error

    def _note_size(self, size: int) -> None:
        self._bytes = size

    def near_limit(self, step: int) -> PerRankGrows | None:
        """The event, once, when the states as last gathered take more than half of the limit."""
        if self._near_limit_reported or 2 * self._bytes <= self.most_bytes:
            return None
        self._near_limit_reported = True
        return PerRankGrows(step=step, names=sorted(self._parts), bytes=self._bytes, limit=self.most_bytes)

    def progress(self) -> dict[str, Any]:
        """The states as last gathered, for a checkpoint."""
        return {"per_rank": self._states} if self._parts else {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restores this rank's state. Raises CheckpointError if the checkpoint does not fit."""
        states: list[dict[str, Any]] = progress.get("per_rank", [{}] * self._group.world_size)
        same = len(states) == self._group.world_size
        saved = set(states[self._group.rank] if same else set().union(*states))
        if saved != self._parts.keys():
            raise CheckpointMismatch(
                f"ctx.run(per_rank=...) received {_listed(self._parts)}, but the checkpoint has {_listed(saved)}. Pass "
                "the parts that the run started with, or start a new run"
            )
        for name, part in self._parts.items():
            try:
                self._restore(name, part, states if same else [one for one in states if name in one])
            except (ValueError, RuntimeError, KeyError, TypeError) as error:
                raise CheckpointMismatch(f"the checkpoint does not fit per_rank {name}: {error!r}") from error

    def _restore(self, name: str, part: Stateful, states: list[dict[str, Any]]) -> None:
        rank, ranks = self._group.rank, self._group.world_size
        if len(states) == ranks:
            part.load_state_dict(placed(states[rank][name], part.state_dict))
        elif hasattr(part, SPLIT):
            getattr(part, SPLIT)([placed(one[name], part.state_dict) for one in states], rank, ranks)
        else:
            before = counted(len(states), "rank")
            raise CheckpointMismatch(
                f"the checkpoint has the state of {name} for {before}, but the world size is now {ranks}. Use "
                f"{before}, or give {name} a method {SPLIT}(states, rank, world_size) that takes over a rank's share "
                "of all states"
            )


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
