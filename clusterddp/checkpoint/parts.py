"""The parts of a run: objects with ``state_dict()`` and ``load_state_dict()``.

``with_state`` makes parts of random generators, because those of torch, numpy and ``random`` have no ``state_dict``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """Anything whose state can be saved and restored: a module, an optimizer, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def check_parts(
    where: str, parts: Mapping[str, Any], remedy: str = "Wrap other values in a class with these methods"
) -> None:
    """Raises TypeError for a part without ``state_dict()`` and ``load_state_dict()``."""
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            given = repr(part) if isinstance(part, (bool, int, float)) else "..."
            raise TypeError(
                f"{where}({name}={given}): expected an object with state_dict() and load_state_dict(), got "
                f"{type(part).__name__}. {remedy}"
            )


class GeneratorPart:
    """A generator with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: Any, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.generator, self._get, self._put = generator, get, put

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"state": self._get()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """The inverse."""
        self._put(state["state"])


def with_state(part: Any) -> Any:
    """A part for a ``torch.Generator``, a numpy ``Generator`` or ``RandomState``, or a ``random.Random``. Other parts
    are returned as they are."""
    numpy = sys.modules.get("numpy")
    if isinstance(part, torch.Generator):
        return GeneratorPart(part, part.get_state, part.set_state)
    if isinstance(part, random.Random):
        return GeneratorPart(part, part.getstate, part.setstate)
    if numpy is not None and isinstance(part, numpy.random.Generator):
        bits = part.bit_generator
        return GeneratorPart(part, lambda: bits.state, lambda state: setattr(bits, "state", state))
    if numpy is not None and isinstance(part, numpy.random.RandomState):
        return GeneratorPart(part, lambda: part.get_state(legacy=False), part.set_state)
    return part
