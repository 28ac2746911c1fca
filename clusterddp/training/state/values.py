"""The script's own values: ``ctx.run(progress={"best": 0.0, "patience": 0})``, saved, and restored in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from clusterddp.errors import CheckpointError

#: What ``ctx.run(progress=...)`` takes besides dicts: an instance of a dataclass.
_PLAIN = (bool, int, float, str, type(None))


class Values:
    """The dict or dataclass instance that the script gave, and may change at any time; None: there is none.

    Raises TypeError for anything else, and for a value that a checkpoint cannot hold.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        if given is None:
            return
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            if given.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                raise TypeError(
                    f"run(progress=...): {type(given).__name__} is frozen; the values could not be restored"
                )
        elif not isinstance(given, dict):
            value = repr(given) if type(given) in _PLAIN else "..."
            raise TypeError(
                f"run(progress={value}): expected a dict or an instance of a dataclass, got {_described(given)}"
            )
        self.state_dict()

    def __bool__(self) -> bool:
        return self._given is not None

    def state_dict(self) -> dict[str, Any]:
        """A copy of the values by name. Raises TypeError for one that a checkpoint cannot hold, with its name."""
        if self._given is None:
            return {}
        if isinstance(self._given, dict):
            values = dict(self._given)
            if all(map(_is_plain, values, values.values())):
                return values
            copied: dict[str, Any] = _copied(values, "progress")
            return copied
        names = [field.name for field in dataclasses.fields(self._given)]
        return {name: _copied(getattr(self._given, name), f"progress.{name}") for name in names}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Sets the values in place; those that the checkpoint does not have keep what the script gave.

        Raises CheckpointError for a value that has no place.
        """
        if saved and self._given is None:
            raise CheckpointError(
                f"the checkpoint also has the script's values {', '.join(saved)}, and ctx.run() got no progress=: pass "
                "it again, or start a new run"
            )
        if isinstance(self._given, dict):
            self._given.update(saved)
            return
        for name, value in saved.items():
            if name not in {field.name for field in dataclasses.fields(self._given)}:
                raise CheckpointError(
                    f"the checkpoint's progress has {name!r}, and {type(self._given).__name__} has no such field: keep "
                    "the field, or start a new run"
                )
            setattr(self._given, name, value)


def _is_plain(name: object, value: Any) -> bool:
    """Whether a member of a dict need not be copied: so are most, in each step."""
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
                raise TypeError(f"ctx.run(progress=...): {path} has the key {key!r}; expected text")
        return {key: _copied(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    hint = ": keep its .item()" if hasattr(value, "item") else ""
    raise TypeError(
        f"ctx.run(progress=...): {path} is {_described(value)}; expected numbers, text, True, False, None, and lists "
        f"and dicts of them{hint}"
    )


def _is_numpy_scalar(value: Any) -> bool:
    """A number of numpy's, which a mean of numpy's is: a checkpoint restores it exactly."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "tobytes")


def _described(value: object) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
