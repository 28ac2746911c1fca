"""A warm start: parts take over the weights in a different program's file when a run starts, and never later."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from clusterddp.checkpoint.parts import Stateful
from clusterddp.checkpoint.sharded.sharding import is_sharded, shard_like
from clusterddp.checkpoint.state_dict import load_state, recast_parameters, state_of
from clusterddp.checkpoint.transfer import broadcast
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError, CheckpointMismatch
from clusterddp.history.beginnings import Initialized
from clusterddp.reporter import counted, say

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

    def event(self) -> Initialized:
        """The event in the history, with very long lists cut."""
        missing, unexpected = self.missing[:_RECORDED], self.unexpected[:_RECORDED]
        return Initialized(part=self.part, file=self.file, missing=missing, unexpected=unexpected)


def load(
    files: Files, strict: bool, parts: Mapping[str, Stateful], group: ProcessGroup, sharded: bool = False
) -> list[Loaded]:
    """Loads the files into the parts. Collective: only rank 0 reads them, or, of a ``sharded`` run, each rank its part.

    Raises CheckpointError on all ranks for a file that cannot be read or does not fit. Names that are missing on either
    side are accepted unless ``strict``. Raises TypeError for a part that the run does not have, and in a sharded run
    for one that is no module.
    """
    chosen = _by_part(files, parts)
    if unknown := chosen.keys() - parts.keys():
        raise TypeError(
            f"run(init_from=...): the run has no part {', '.join(sorted(unknown))}, only {', '.join(parts)}"
        )
    for name in chosen if sharded else ():
        if not isinstance(parts[name], torch.nn.Module):
            raise TypeError(f"run(init_from=...): {name} is not a module, and a sharded run loads only modules")
    recast: set[torch.Tensor] = set()
    read = _on_each_rank if sharded else _from_rank_0
    modules_first = sorted(chosen, key=lambda name: not isinstance(parts[name], torch.nn.Module))
    return [_load_part(name, parts[name], Path(chosen[name]), strict, group, recast, read) for name in modules_first]


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


def _from_rank_0(file: Path, name: str, group: ProcessGroup) -> Mapping[str, Any]:
    """The state in the file, which rank 0 reads and sends to all."""
    state, failure = None, None
    if group.rank == 0:
        state, failure = _read(file, name)
    found: Mapping[str, Any] = broadcast(state, failure, group.collective_device)
    return found


def _on_each_rank(file: Path, name: str, group: ProcessGroup) -> Mapping[str, Any]:
    """The state in the file, which each rank maps into its memory, to copy its own shards."""
    from clusterddp.checkpoint.sharded.restore import any_failure

    state, own = _read(file, name)
    failure = any_failure(group, f"init_from/{name}", own)
    if state is None or failure is not None:
        raise CheckpointError(failure)
    return state


def _read(file: Path, name: str) -> tuple[Mapping[str, Any] | None, str | None]:
    """The state, or why it cannot be read."""
    from clusterddp.checkpoint.weights_file import read_weights

    try:
        return read_weights(file, name), None
    except CheckpointError as error:
        return None, str(error)


def _load_part(
    name: str,
    part: Stateful,
    file: Path,
    strict: bool,
    group: ProcessGroup,
    recast: set[torch.Tensor],
    read: Callable[[Path, str, ProcessGroup], Mapping[str, Any]],
) -> Loaded:
    """``recast``: receives a module's parameters that have another dtype in the file, for its optimizer."""
    state = read(file, name, group)
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
        if isinstance(part, torch.nn.Module):
            state = {
                key: shard_like(own[key], value) if is_sharded(own[key]) else value for key, value in state.items()
            }
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
