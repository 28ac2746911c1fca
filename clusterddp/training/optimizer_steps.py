"""Notices when the optimizers of a run step: from then on, the state is no longer the one before the loop's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from clusterddp.distributed.modules import optimizers, trained_parameters


class OptimizerSteps:
    """The optimizers among a run's parts, and which of them have stepped in the loop's step.

    ``on_step`` is called with an optimizer after each of its steps, also where a GradScaler has skipped it.

    A run may have several optimizers. Once the first of them has stepped, the state before the loop's step is lost, so
    that a stop from there on keeps the step, and says which optimizers have not stepped in it.
    """

    def __init__(self, parts: Mapping[str, Any], on_step: Callable[[Any], None]) -> None:
        self._names = {id(part): name for name, part in optimizers(parts).items()}
        self._on_step = on_step
        #: Whether there are optimizers.
        self.any = bool(self._names)
        self._stepped: dict[str, None] = {}
        self._gpus: dict[int, set[torch.device]] = {}
        for part in optimizers(parts).values():
            if gpus := {one.device for one in trained_parameters(part) if one.device.type == "cuda"}:
                self._gpus[id(part)] = gpus
        #: The streams of GPUs on which optimizers have stepped, other than those that are current between the steps.
        self._streams: set[torch.cuda.Stream] = set()
        self._before: dict[str, None] = {}
        for part in dict.fromkeys(optimizers(parts).values()):
            if isinstance(part, torch.optim.Optimizer):
                part.register_step_post_hook(self._note)
            else:
                part.step = _then(part.step, lambda *_, part=part, **__: self._note(part))
        for part in parts.values():
            if isinstance(part, torch.amp.GradScaler):
                part.step = _then(part.step, self._note)  # type: ignore[method-assign]

    def begin_step(self) -> None:
        """The loop begins a step."""
        if self._stepped:
            self._before, self._stepped = self._stepped, {}

    def missing(self) -> list[str]:
        """The optimizers that have stepped in an earlier step of the loop, the last with any, and not in this one."""
        return [name for name in self._before if name not in self._stepped]

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is queued on GPUs inside comes after the optimizers' steps, and before what follows on their streams:
        a script may step on streams of its own."""
        current = [(stream, torch.cuda.current_stream(stream.device)) for stream in self._streams]
        for stream, own in current:
            own.wait_stream(stream)
        yield
        for stream, own in current:
            stream.wait_stream(own)

    def _note(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self._gpus:
            for device in self._gpus.get(id(optimizer), ()):
                stream = torch.cuda.current_stream(device)
                if stream != torch.cuda.default_stream(device):
                    self._streams.add(stream)
        if (name := self._names.get(id(optimizer))) is not None:
            self._stepped[name] = None
        self._on_step(optimizer)


def _then(first: Callable[..., Any], second: Callable[..., None]) -> Callable[..., Any]:
    """Calls both in turn with the arguments, and returns what the first does."""

    def both(*values: Any, **options: Any) -> Any:
        result = first(*values, **options)
        second(*values, **options)
        return result

    return both
