"""What a checkpoint contains of a run, and how it is restored: the parts' states and the progress.

``Step`` is what has happened in a step so far, and ``BeforeStep`` the state that it began with. A stop in an evaluation
saves the state before the step, which the next attempt repeats. Changes by the script since then, such as to its own
values or to a scheduler that took the result of a first evaluation, must not count twice. Buffers are rewound by
``distributed/wrapping.py``.

In a warm start, parts take over the weights in a different program's file when a run starts, and never later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from clusterddp.checkpoint import transfer
from clusterddp.checkpoint.gradients import Gradients
from clusterddp.checkpoint.packing import pack
from clusterddp.checkpoint.parts import RESERVED, Stateful
from clusterddp.checkpoint.restore import Place
from clusterddp.checkpoint.state_copies import copied
from clusterddp.checkpoint.state_dict import changed_dtypes, load_state, recast_parameters, state_of
from clusterddp.checkpoint.transfer import broadcast
from clusterddp.data.training_loader import TrainingLoader
from clusterddp.distributed import wrapping
from clusterddp.distributed.bucket_order import BucketOrders
from clusterddp.distributed.collectives import broadcast_json
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.distributed.torch_patches import after_call, after_replayed_step, is_captured
from clusterddp.distributed.wrapping import (
    LARGEST_COPY_BYTES,
    Buffers,
    Named,
    ddp_modules,
    optimizers,
    trained_parameters,
)
from clusterddp.errors import CheckpointError, CheckpointMismatch
from clusterddp.reporter import counted, say
from clusterddp.training.exactness import CompiledShapes, Divergence, fingerprints
from clusterddp.training.given_values import GivenValues
from clusterddp.training.module_attributes import ModuleAttributes
from clusterddp.training.script_state import PerRank, Values


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
        self.per_rank = given.per_rank
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
        #: What the script gave and the checkpoint replaced, as fields of events.
        self.unused: list[dict[str, Any]] = []
        self.before = BeforeStep(parts if group.rank == 0 else {}, values, self.attributes)
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
            own = {"gradients": self.gradients.apart(before_step), "buffers": self._own_buffers()}
            with suppress(transfer.TooLarge, CheckpointError):  # the checkpoint then records that it lacks them
                found = transfer.gather({key: one for key, one in own.items() if one}, self._group.control_device)
                if found is not None:
                    self.gradients.gathered = [one.get("gradients", {}) for one in found]
                    self.buffers.gathered = [one.get("buffers", {}) for one in found]

    def _own_buffers(self) -> Named:
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
            unsaved = sum(parameter.untyped_storage().data_ptr() not in storages for parameter in parameters)
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


#: The file for the model, or a file for each part by name.
Files: TypeAlias = "str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]"
#: The most names that a message, and the history, list.
_LISTED, _RECORDED = 5, 100


@dataclass
class Loaded:
    """A part that was loaded from a file: the names that the file lacks, and those that the part lacks."""

    part: str
    file: str
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """The fields of the event in the history, with very long lists cut."""
        missing, unexpected = self.missing[:_RECORDED], self.unexpected[:_RECORDED]
        return {"part": self.part, "file": self.file, "missing": missing, "unexpected": unexpected}


def load(files: Files, strict: bool, parts: Mapping[str, Stateful], group: ProcessGroup) -> list[Loaded]:
    """Loads the files into the parts. Collective: only rank 0 reads them.

    Raises CheckpointError on all ranks for a file that cannot be read or does not fit. Names that are missing on either
    side are accepted unless ``strict``. Raises TypeError for a part that the run does not have.
    """
    chosen = _by_part(files, parts)
    if unknown := chosen.keys() - parts.keys():
        raise TypeError(
            f"run(init_from=...): the run has no part {', '.join(sorted(unknown))}, only {', '.join(parts)}"
        )
    recast: set[torch.Tensor] = set()
    modules_first = sorted(chosen, key=lambda name: not isinstance(parts[name], torch.nn.Module))
    return [_load_part(name, parts[name], Path(chosen[name]), strict, group, recast) for name in modules_first]


def _by_part(files: Files, parts: Mapping[str, Stateful]) -> dict[str, str | os.PathLike[str]]:
    for file in files.values() if isinstance(files, Mapping) else [files]:
        if not isinstance(file, (str, os.PathLike)):
            raise TypeError(f"run(init_from=...): expected a file, or a dict with a file for each part, got {file!r}")
    if isinstance(files, Mapping):
        return dict(files)
    modules = [name for name, part in parts.items() if isinstance(part, torch.nn.Module)]
    if "model" in parts:
        return {"model": files}
    if len(modules) != 1:
        listed = ", ".join(modules) or "none"
        raise TypeError(
            f"run(init_from={str(files)!r}): no part is named 'model'. Name the part, as in "
            f"init_from={{{(modules or ['NAME'])[0]!r}: {str(files)!r}}}. Modules: {listed}"
        )
    return {modules[0]: files}


def _load_part(
    name: str, part: Stateful, file: Path, strict: bool, group: ProcessGroup, recast: set[torch.Tensor]
) -> Loaded:
    """``recast``: receives a module's parameters that have another dtype in the file, for its optimizer."""
    state, failure = None, None
    if group.rank == 0:
        from clusterddp.checkpoint.weights_file import read_weights

        try:
            state = read_weights(file, name)
        except CheckpointError as error:
            failure = str(error)
    state = broadcast(state, failure, group.collective_device)
    loaded = Loaded(name, str(file.absolute()))
    if isinstance(part, torch.nn.Module):
        own = state_of(part)
        state = _fitting(state, own)
        loaded.missing, loaded.unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if strict and (loaded.missing or loaded.unexpected):
            raise CheckpointMismatch(_misfit(loaded))
        state = {**own, **{key: value for key, value in state.items() if key in own}}
    recast |= recast_parameters({name: part}, {name: state})
    try:
        load_state(part, state, recast)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointMismatch(f"init_from: {file} does not fit {name}: {error}") from error
    if group.rank == 0:
        say(f"{name} starts from {file}" + _in_words(loaded))
    return loaded


def _fitting(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The state by the part's own names: DDP and torch.compile add prefixes when such a model is saved."""
    found = {}
    for key, value in state.items():
        plain = key.replace("_orig_mod.", "")
        bare = plain.removeprefix("module.")
        found[key if key in own else bare if bare in own else plain] = value
    return found


def _misfit(loaded: Loaded) -> str:
    return (
        f"init_from: {loaded.file} does not fit {loaded.part}{_in_words(loaded)}. If that is intended, use "
        "ctx.run(init_strict=False)"
    )


def _in_words(loaded: Loaded) -> str:
    sides = (("missing from the file", loaded.missing), ("not in the model", loaded.unexpected))
    return "".join(f". {counted(len(names), 'tensor')} {what}: {_some(names)}" for what, names in sides if names)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
