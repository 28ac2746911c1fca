"""The parts of a run by name: what ``ctx.run()`` got, with the members of lists, tuples and dicts as parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from clusterddp.checkpoint.generators import with_state
from clusterddp.checkpoint.state import Stateful, check_parts

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
        "run", parts, "keep numbers and text in progress={...}, and wrap other values in a class with these methods"
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
