"""Notices when an optimizer of the run steps: from then on, the state is no longer the one before the loop's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

#: Gets the optimizer that has stepped; None if it is not torch's.
OnStep: TypeAlias = Callable[["torch.optim.Optimizer | None"], None]


def watch_optimizers(parts: Mapping[str, Any], on_step: OnStep) -> bool:
    """Calls ``on_step`` after each step of an optimizer among the parts. Returns whether there is one.

    That holds too when a GradScaler has skipped the optimizer's step after an overflow and updated its scale.
    """
    found = False
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            part.register_step_post_hook(lambda optimizer, *_: on_step(optimizer))
            found = True
        elif isinstance(part, torch.amp.GradScaler):
            part.update = _then(part.update, lambda: on_step(None))  # type: ignore[method-assign]
        elif is_foreign_optimizer(name, part):
            part.step = _then(part.step, lambda: on_step(None))
            found = True
    return found


def is_foreign_optimizer(name: str, part: Any) -> bool:
    """Whether a part is an optimizer of another library, or the user's: it steps, and zeroes gradients."""
    if not hasattr(part, "step") or isinstance(part, torch.optim.Optimizer):
        return False
    return name == "optimizer" or (hasattr(part, "zero_grad") and not isinstance(part, torch.nn.Module))


def _then(first: Callable[..., Any], second: Callable[[], None]) -> Callable[..., Any]:
    """Calls both in turn, the first with the arguments, and returns what the first does."""

    def both(*values: Any, **options: Any) -> Any:
        result = first(*values, **options)
        second()
        return result

    return both
