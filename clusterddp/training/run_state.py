"""What a checkpoint contains of a run, and how it is restored: the parts' states and the progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from clusterddp.checkpoint import transfer
from clusterddp.checkpoint.checkpoint import RESERVED
from clusterddp.checkpoint.gradients import Gradients
from clusterddp.checkpoint.packing import pack
from clusterddp.checkpoint.parts import Stateful
from clusterddp.checkpoint.restore import Place
from clusterddp.checkpoint.sharded.sharding import Sharding, local, reshard
from clusterddp.checkpoint.state_dict import changed_dtypes, load_state, recast_parameters, state_of
from clusterddp.data.training_loader import TrainingLoader
from clusterddp.distributed import wrapping
from clusterddp.distributed.bucket_order import BucketOrders
from clusterddp.distributed.collectives import broadcast_json
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.distributed.wrapping import (
    LARGEST_COPY_BYTES,
    Buffers,
    Named,
    ddp_modules,
    optimizers,
    trained_parameters,
)
from clusterddp.errors import CheckpointError, CheckpointMismatch
from clusterddp.history.beginnings import NotUsed
from clusterddp.reporter import counted, say
from clusterddp.training.exactness import CompiledShapes, Divergence, fingerprints
from clusterddp.training.given_values import GivenValues
from clusterddp.training.module_attributes import ModuleAttributes
from clusterddp.training.script_state import PerRank, Values
from clusterddp.training.step_state import BeforeStep
from clusterddp.training.warm_start import Loaded

_REMEDY = "Pass ctx.run() the parts that the run started with, or start a new run"
Randomness = Literal["step", "user"]


@dataclass(frozen=True)
class Given:
    """What the script gave to ``ctx.run()``. ``parts`` are saved and restored by name. ``per_rank`` is each rank's own.

    ``warm_start`` loads the weights to start from, unless the run resumes, from ``warm_start_files``.
    ``orders``: of the modules in DDP.
    """

    parts: dict[str, Stateful]
    loader: TrainingLoader
    rng: Randomness
    values: Values
    per_rank: PerRank
    warm_start: Callable[[], list[Loaded]] | None
    warm_start_files: str | None
    orders: BucketOrders
    sharding: Sharding | None = None


class RunState:
    """The state of a run."""

    def __init__(self, given: Given, seed: int, group: ProcessGroup) -> None:
        parts, loader, rng, values = given.parts, given.loader, given.rng, given.values
        if clash := RESERVED & parts.keys():
            names = " or ".join(sorted(map(repr, clash)))
            raise TypeError(f"run(): no part may be named {names}. Choose a different name")
        if rng not in get_args(Randomness):
            raise ValueError(f"run(rng={rng!r}): expected one of {', '.join(map(repr, get_args(Randomness)))}")
        self._parts, self._loader, self._rng, self._seed, self._group = parts, loader, rng, seed, group
        self.per_rank, self._sharding = given.per_rank, given.sharding
        #: The number of completed steps.
        self.step = 0
        #: The checkpoint that this attempt resumed from.
        self.parent: Place | None = None
        #: The goals of loops that ``Run.finish`` ended.
        self.finished: list[int] = []
        #: Why the resume is not exact; empty if it is.
        self.inexact: list[str] = []
        #: The entries of a checkpoint about a stop inside a step: "cut", or "buffers_changed", "unseen" and "begun".
        self.stopped_in_step: dict[str, Any] = {}
        self.gradients = Gradients(parts, group.world_size, group.rank)
        self._values = values
        self.attributes = ModuleAttributes(parts)
        self._given = GivenValues(parts, loader.given, given.warm_start_files)
        #: What the script gave and the checkpoint replaced.
        self.unused: list[NotUsed] = []
        saves = group.rank == 0 or given.sharding is not None
        self.before = BeforeStep(parts if saves else {}, values, self.attributes)
        self.divergence = Divergence({**parts, "script_state": values} if values else parts, group)
        self.buffers = Buffers(parts, group.world_size)
        self.orders = given.orders
        self._hardware = group.hardware() if group.rank == 0 else {}
        self.shapes = CompiledShapes(group)
        self._partly_saved = self._check_saved() if group.rank == 0 else []

    def content(self, before_step: bool, loop: int) -> dict[str, Any]:
        """The content of a checkpoint. ``before_step``: a step is in progress, and the state is the one before it.

        ``loop``: the step to which the script's loop runs.
        """
        if self._sharding is not None:
            reshard(self._parts)
        progress = {
            "step": self.step,
            **self._loader.progress(self.step),
            "world_size": self._group.world_size,
            "seed": self._seed,
            "finished": self.finished,
            "diverged": sorted(self.divergence.parts),
            **({"hardware": self._hardware} if self._hardware else {}),
            **self.stopped_in_step,
            **self.gradients.progress(before_step),
            **self.buffers.progress(),
            **self.orders.progress(before_step),
            **self.shapes.progress(),
            **self.per_rank.progress(),
            **self._progress_of_attributes(before_step, loop),
            **self._given.progress(),
        }
        if self._values:
            progress["values"] = self.before.values if before_step else self._values.state_dict()
        parent = self.parent and {"attempt": self.parent[0], "step": self.parent[1]}
        find = self.before.state_of if before_step else self._state_of
        return {"parent": parent, "progress": progress, **{name: find(name) for name in self._parts}}

    def _progress_of_attributes(self, before_step: bool, loop: int) -> dict[str, Any]:
        if before_step and self.before.attributes is not None:
            return self.attributes.progress(self.before.attributes, loop, evaluating=False)
        evaluating = before_step or "cut" in self.stopped_in_step
        return self.attributes.progress(self.attributes.changed(), loop, evaluating)

    def _state_of(self, name: str) -> dict[str, Any]:
        return state_of(self._parts[name])

    def is_before_step(self) -> bool:
        """Whether the models are as they were when the step began, and rank 0 has all of that state. Waits for a
        GPU."""
        return self.gradients.unchanged() and self.buffers.unchanged()

    def gather(self, before_step: bool) -> None:
        """Brings what each rank has for itself to rank 0. Collective. Raises CheckpointError."""
        self.per_rank.gather()
        if self._group.world_size > 1:
            own = {"gradients": self.gradients.apart(before_step), "buffers": self._differing_buffers()}
            with suppress(transfer.TooLarge, CheckpointError):  # the checkpoint then records that it lacks them
                found = transfer.gather({key: one for key, one in own.items() if one}, self._group.control_device)
                if found is not None:
                    self.gradients.gathered = [one.get("gradients", {}) for one in found]
                    self.buffers.gathered = [one.get("buffers", {}) for one in found]

    def _differing_buffers(self) -> Named:
        """The buffers that differ from rank 0's. Collective."""
        own = self.buffers.in_ddp()
        if not own:
            return {}
        marks = {part: dict(zip(found, fingerprints(found.values()), strict=True)) for part, found in own.items()}
        first = broadcast_json(marks, self._group.control_device)
        differ = {
            part: {name: own[part][name] for name, mark in found.items() if first[part].get(name, mark) != mark}
            for part, found in marks.items()
        }
        return {part: found for part, found in differ.items() if found}

    def restore(self, found: tuple[dict[str, Any], Place] | None) -> None:
        """Loads a checkpoint's content, if there is one, and notes its place. Raises CheckpointError."""
        if found is None:
            return
        content, self.parent = found
        self.step = step = self.parent[1]
        self._check_parts(content.keys() - RESERVED)
        progress = content["progress"]
        if repr(progress["seed"]) != repr(self._seed):  # all randomness comes from the repr
            raise CheckpointMismatch(
                f"the run started with seed {progress['seed']!r}, but the seed is now {self._seed!r}. Use the recorded "
                "seed, or start a new run"
            )
        self._loader.restore(progress)
        self.inexact = self._reasons_for_doubt()
        if self._group.world_size > 2:
            self.inexact += self.orders.restore(progress)
        if progress["world_size"] != self._group.world_size:
            self.inexact.append(f"{counted(self._group.world_size, 'rank')} instead of {progress['world_size']}")
        if self._group.rank == 0:
            self.inexact += other_hardware(progress.get("hardware", {}), self._hardware)
        recast = recast_parameters(self._parts, content)
        for name, part in self._parts.items():
            try:
                load_state(part, content[name], recast)
            except (ValueError, RuntimeError, KeyError) as error:
                raise CheckpointMismatch(f"the checkpoint does not fit {name}: {error}. {_REMEDY}") from error
        if self._group.rank == 0:
            self.inexact += self._changed_dtypes(content)
        self._values.load_state_dict(progress.get("values", {}))
        self.per_rank.restore(progress)
        self.attributes.restore(progress)
        self.unused = list(self._given.unused(progress))
        self.inexact += self.gradients.restore(progress)
        self.inexact += self.buffers.restore(progress, self._group.rank, self._group.world_size)
        self.inexact += self.shapes.restore(progress)
        self.divergence.parts = set(progress["diverged"])
        self.inexact += [f"{name} differed between ranks, which now all have rank 0's" for name in progress["diverged"]]
        if progress.get("cut"):
            reason = f"step {step - 1} was stopped during an evaluation, and the rest of its code did not run"
            waiting = _listed(progress.get("not_stepped", []))
            self.inexact.append(reason + (f", including the optimizer steps of {waiting}" if waiting else ""))
        if progress.get("buffers_changed"):
            size = f"{LARGEST_COPY_BYTES >> 20} MiB"
            self.inexact.append(
                f"step {step} was stopped after a forward pass that changed a buffer larger than {size}"
            )
        if progress.get("unseen"):
            self.inexact.append(
                f"step {step} was stopped after its parameters had changed without a step of an optimizer, and is "
                "repeated on top of that change"
            )
        if progress.get("begun"):
            self.inexact.append(f"step {step} was stopped during an evaluation, and is repeated from its beginning")
        self.finished = list(progress["finished"])

    def _changed_dtypes(self, content: Mapping[str, Any]) -> list[str]:
        """Why a resume is not exact: modules or optimizers that have other dtypes than the checkpoint."""
        found = []
        parts = {name: part for name, part in self._parts.items() if isinstance(part, torch.nn.Module)}
        for name, part in (parts | optimizers(self._parts)).items():
            if changed := changed_dtypes(part, content[name]):
                found.append(f"{counted(len(changed), 'tensor')} of {name} changed dtype, such as {changed[0]}")
        return found

    def _check_parts(self, saved: set[str]) -> None:
        if missing := self._parts.keys() - saved:
            raise CheckpointMismatch(f"the checkpoint has no {_listed(missing)}, only {_listed(saved)}. {_REMEDY}")
        if extra := saved - self._parts.keys():
            raise CheckpointMismatch(
                f"the checkpoint also has {_listed(extra)}, which ctx.run() did not receive. {_REMEDY}"
            )

    def _check_saved(self) -> list[str]:
        """Raises CheckpointError for a state that cannot be saved. Returns the names of the optimizers that train a
        parameter, perhaps of a loss module, that is in no part's state."""
        _, saved = pack({name: state_of(part) for name, part in self._parts.items()})
        storages = {tensor.untyped_storage().data_ptr() for tensor in saved.values()}
        found = []
        for name, part in optimizers(self._parts).items():
            parameters = trained_parameters(part)
            unsaved = sum(local(one).untyped_storage().data_ptr() not in storages for one in parameters)
            if unsaved:
                found.append(name)
                say(
                    f"ctx.run() received no part with {unsaved} of {name}'s {counted(len(parameters), 'parameter')}, "
                    "so checkpoints are incomplete. Also pass the missing module, as in "
                    "ctx.run(criterion=criterion, ...)"
                )
        return found

    def _reasons_for_doubt(self) -> list[str]:
        """Why a resumed run may differ from an uninterrupted one, in its last bits or more."""
        reasons = [*(["rng='user'"] if self._rng == "user" else []), *self._loader.inexact]
        reasons += [f"{name} has parameters that no part saves" for name in self._partly_saved]
        if self._group.may_use_nvls:
            reasons.append("NCCL may sum with NVLS, which is not deterministic")
        for name, part in self._parts.items():
            for module in ddp_modules(part):
                if self._group.world_size > 2 and (doubt := wrapping.doubt(module)):
                    reasons.append(f"{name} {doubt}")
        return reasons


def other_hardware(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How the hardware of ``ProcessGroup.hardware`` differs from that of the checkpoint, in words."""
    gpus = ["CPUs" if not of else " and ".join(of["gpus"]) for of in (before, now)]
    if gpus[0] != gpus[1]:
        return [f"on {gpus[1]} instead of {gpus[0]}"]
    per_node = [of.get("ranks_per_node", 0) for of in (before, now)]
    return [f"{counted(per_node[1], 'rank')} per node instead of {per_node[0]}"] if per_node[0] != per_node[1] else []


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
