"""What has happened in a step so far, and the state that it began with.

A stop in an evaluation saves the state before the step, which the next attempt repeats. Changes by the script since
then, such as to its own values or to a scheduler that took the result of a first evaluation, must not count twice.
Buffers are rewound by ``distributed/wrapping.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from clusterddp.checkpoint.packing import pack
from clusterddp.checkpoint.parts import Stateful
from clusterddp.checkpoint.state_copies import copied
from clusterddp.checkpoint.state_dict import state_of
from clusterddp.distributed.torch_patches import after_call, after_replayed_step, is_captured
from clusterddp.distributed.wrapping import (
    optimizers,
    trained_parameters,
)
from clusterddp.training.module_attributes import ModuleAttributes
from clusterddp.training.script_state import Values


class Step:
    """The current step. It has class attributes, because every step makes one and few change any."""

    optimizer_stepped = False
    #: Whether the metric of the best checkpoint that it has logged is that of the state before it.
    best_before = False
    #: Whether it has one of the following.
    special = False
    #: Whether the script knows that an evaluation is due.
    evaluates = False
    #: Whether ``finish`` made it the last one.
    last = False


class OptimizerSteps:
    """The optimizers among a run's parts, and which of them have stepped in the loop's step.

    ``on_step`` is called with an optimizer after each of its steps, also where a GradScaler has skipped it.
    ``on_group`` is called with its name after it has received a further group of parameters.

    A run may have several optimizers. Once the first of them has stepped, the state before the loop's step is lost, so
    that a stop from there on keeps the step, and reports which optimizers have not stepped in it.
    """

    def __init__(
        self, parts: Mapping[str, Any], on_step: Callable[[Any], None], on_group: Callable[[str], None]
    ) -> None:
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
                after_call(part, "add_param_group", lambda *_, part=part, **__: on_group(self._names[id(part)]))
            else:
                after_call(part, "step", lambda *_, part=part, **__: self._note(part))
        for part in parts.values():
            if isinstance(part, torch.amp.GradScaler):
                after_call(part, "step", self._note)
        after_replayed_step(lambda part: self._note(part) if id(part) in self._names else None)
        #: A parameter of each optimizer, and its version when the loop's step began.
        self._watched = [
            next(iter(found)) for part in optimizers(parts).values() if (found := trained_parameters(part))
        ]
        self._versions: list[int] = []

    def begin_step(self) -> None:
        """The loop begins a step."""
        self._versions = [parameter._version for parameter in self._watched]
        if self._stepped:
            self._before, self._stepped = self._stepped, {}

    def unseen(self) -> bool:
        """Whether parameters have changed in the loop's step without a step of an optimizer, as by code that changes
        them itself."""
        changed = self._versions != [parameter._version for parameter in self._watched]
        return changed and not self._stepped

    def missing(self) -> list[str]:
        """The optimizers that have stepped in an earlier step of the loop, the last with any, and not in this one."""
        return [name for name in self._before if name not in self._stepped]

    @property
    def streams(self) -> set[torch.cuda.Stream]:
        """The streams of GPUs on which the optimizers step, at least those that are current between the steps."""
        devices = set().union(*self._gpus.values())
        return self._streams | {torch.cuda.current_stream(device) for device in devices}

    @contextmanager
    def behind(self) -> Iterator[None]:
        """GPU work queued inside comes after the optimizers' steps, and before what follows on their streams, because a
        script may step on its own streams."""
        current = [(stream, torch.cuda.current_stream(stream.device)) for stream in self._streams]
        for stream, own in current:
            own.wait_stream(stream)
        yield
        for stream, own in current:
            stream.wait_stream(own)

    def _note(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if is_captured(optimizer):
            return
        if self._gpus:
            for device in self._gpus.get(id(optimizer), ()):
                stream = torch.cuda.current_stream(device)
                if stream != torch.cuda.default_stream(device):
                    self._streams.add(stream)
        if (name := self._names.get(id(optimizer))) is not None:
            self._stepped[name] = None
        self._on_step(optimizer)


#: A part with larger tensors is not copied at an evaluation, because it is a model or a buffer, not a counter.
LARGEST_PART_BYTES = 1 << 20


class BeforeStep:
    """``begin_step`` keeps the script's own values in each step. ``keep``, at the place for an evaluation, all else."""

    def __init__(self, parts: Mapping[str, Stateful], values: Values, attributes: ModuleAttributes) -> None:
        self._parts, self._own, self._has_values, self._attributes = parts, values, bool(values), attributes
        #: The script's own values.
        self.values: dict[str, Any] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        #: The modules' changed attributes, if they were kept.
        self.attributes: dict[str, Any] | None = None

    def begin_step(self) -> None:
        """A step begins."""
        if self._has_values:
            self.values = self._own.state_dict()
        if self._kept:
            self._kept, self.attributes = {}, None

    def keep(self) -> None:
        """Copies the states of optimizers, without what they hold per parameter, and of the parts that are small."""
        self._kept = {name: _small_state(part) for name, part in self._parts.items()}
        self.attributes = self._attributes.changed() if self._parts else None

    def state_of(self, name: str) -> dict[str, Any]:
        """A part's state when the step began, as far as it was kept. Its present state otherwise."""
        part, kept = self._parts[name], self._kept.get(name)
        if not kept:
            return state_of(part)
        if not isinstance(part, torch.optim.Optimizer):
            return kept
        now = state_of(part)
        groups = zip(now["param_groups"], kept["param_groups"], strict=True)
        return {**now, "param_groups": [{**group, **before} for group, before in groups]}


def _small_state(part: Stateful) -> dict[str, Any]:
    """The kept state of a part. Empty for a module and for a large part."""
    if isinstance(part, torch.nn.Module):
        return {}
    state = state_of(part)
    if isinstance(part, torch.optim.Optimizer):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        kept: dict[str, Any] = copied({"param_groups": groups})
        return kept
    _, tensors = pack(state)
    return copied(state) if sum(tensor.nbytes for tensor in tensors.values()) <= LARGEST_PART_BYTES else {}
