"""What a module has besides its ``state_dict``: frozen parameters, its mode, dropout's ``p``, its hooks.

A script that unfreezes layers after the first epoch does so once. A resumed script is past that point, and would train
on with frozen layers. Therefore a checkpoint records which of these attributes the script has changed since
``ctx.run()``. A resume repeats the changes to ``requires_grad``, to ``training``, and to the attributes of torch's own
modules, unless the resumed script gives ``ctx.run()`` something else than before: what it sets itself takes precedence.

Attributes of other classes are not set, because one such as ``cached = True`` may belong to a cache that a new process
does not have. They are compared, like the hooks, except those of averaged weights and other models that no optimizer
trains: a resume is reported as inexact if one differs both before and after
the first step. Those that change within that step are counters, caches, or set in each step. Attributes are compared if
they are bool, int, float or short text and have no leading underscore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from clusterddp.distributed.wrapping import bare, optimizers, trained_parameters

_PLAIN = (bool, int, float, str)
#: The most characters of a text that is compared.
_LONGEST_TEXT = 100
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TRAINING = ".training"
#: The most differences that are reported.
_NAMED = 5
#: The key in a checkpoint.
_KEY = "attributes"
#: What to do about differences.
EXPLANATION = (
    "Set such attributes in every step from run.step or run.epoch, because a resumed script is past the step in which "
    "they were changed"
)


class _Attribute(NamedTuple):
    value: Any
    #: Whose attribute it is, and its name there. None if a resume does not set it.
    place: tuple[Any, str] | None


class ModuleAttributes:
    """The attributes of the modules among a run's parts. ``parts``: those of the run.

    Reading them takes about 1 ms for a ResNet-50. They are read at ``ctx.run()``, before and after the first step of an
    attempt, at the place for an evaluation, and for each checkpoint.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        trained = set().union(*map(trained_parameters, optimizers(parts).values()))
        #: Those that no optimizer trains, such as averaged weights. Code that runs only in evaluations changes them.
        self._untrained = {
            name
            for name, part in self._modules.items()
            if trained and (own := set(part.parameters())) and own.isdisjoint(trained)
        }
        self._at_run = self._read()
        #: The same after a restore, because ``load_state_dict`` may change attributes.
        self._restored = self._at_run
        #: Of the checkpoint: the changed attributes, and up to which step its loop was to run.
        self._saved: dict[str, Any] = {}
        self._loop: int | None = None
        #: The changed modes at the end of the last loop. None in a loop. Between loops the script may evaluate, and a
        #: resume begins at the end of the loop.
        self._modes: dict[str, Any] | None = {}
        #: What differs before the first step: the value now, and the checkpoint's.
        self._suspects: dict[str, tuple[Any, Any]] = {}

    def _read(self) -> dict[str, _Attribute]:
        return {
            key: one
            for name, part in self._modules.items()
            for key, one in _attributes(part, name)
            if one.place is not None or name not in self._untrained
        }

    def changed(self) -> dict[str, Any]:
        """The values of those that the script has changed since ``ctx.run()``: then, and now."""
        found = self._changed(self._read())
        if self._modes is None:
            return found
        return {key: both for key, both in found.items() if not key.endswith(_TRAINING)} | self._modes

    def begin_loop(self) -> None:
        """Each loop calls it."""
        self._modes = None

    def end_loop(self) -> None:
        """The loop is complete, or the script has left it. Not for a stop."""
        self._modes = {key: both for key, both in self._changed(self._read()).items() if key.endswith(_TRAINING)}

    def _changed(self, now: Mapping[str, _Attribute], since: Mapping[str, _Attribute] | None = None) -> dict[str, Any]:
        return {
            key: [before.value, now[key].value]
            for key, before in (self._at_run if since is None else since).items()
            if key in now and type(now[key].value) is type(before.value) and _differ(now[key].value, before.value)
        }

    def progress(self, changed: Mapping[str, Any], loop: int, evaluating: bool) -> dict[str, Any]:
        """For a checkpoint. ``loop``: the step to which the loop runs.

        ``evaluating``: whether the modules may be in the mode of an evaluation, which is then left out.
        """
        kept = {key: both for key, both in changed.items() if not (evaluating and key.endswith(_TRAINING))}
        return {_KEY: {"loop": loop, "changed": kept}}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Repeats the changes. On all ranks."""
        saved = progress[_KEY]
        self._loop = saved["loop"]
        # What the resumed script gives ctx.run() in another state than before is the user's own change.
        self._saved = {
            key: now
            for key, (before, now) in saved["changed"].items()
            if key in self._at_run and not _differ(self._at_run[key].value, before)
        }
        self._modes = {
            key: [self._at_run[key].value, now] for key, now in self._saved.items() if key.endswith(_TRAINING)
        }
        for key, value in self._saved.items():
            if (place := self._at_run[key].place) is not None:
                owner, name = place
                setattr(owner, name, value)
        for part in self._modules.values() if self._saved else ():
            for module in part.modules():
                module.training = bare(module).training  # DDP's own, too
        self._restored = self._read()

    def begin(self, loop: int) -> None:
        """The attempt's first loop begins. It continues the checkpoint's if it runs to the same step.

        Another loop comes after code of the script that may have changed the modules, as between phases of a training.
        """
        if self._loop != loop:
            return
        now = self._read()
        changed = self._changed(now, self._restored).keys()
        in_evaluation = [name for name in self._modules if self._saved.get(f"{name}{_TRAINING}") is False]
        for key in changed | self._saved.keys():
            wanted = self._saved.get(key, self._restored[key].value)
            # A script that leaves the mode of an evaluation at the end of a step sets the other one in the next.
            left = key.endswith(_TRAINING) and any(key.startswith(f"{name}.") for name in in_evaluation)
            if key in now and _differ(now[key].value, wanted) and not left:
                self._suspects[key] = now[key].value, wanted

    def differences(self) -> list[str]:
        """After the first step: what a resume has not restored, in words."""
        suspects, self._suspects = self._suspects, {}
        if not suspects:
            return []
        now = self._read()
        found = [
            f"{key} was {wanted!r} at the checkpoint, and is now {value!r}"
            for key, (value, wanted) in sorted(suspects.items())
            if key in now and not _differ(now[key].value, value)
        ]
        return [*found[:_NAMED], *([f"{len(found) - _NAMED} more attributes differ"] if len(found) > _NAMED else [])]


def _differ(one: Any, other: Any) -> bool:
    return one != other and not (one != one and other != other)  # NaN is equal to NaN here


def _attributes(part: torch.nn.Module, name: str) -> Iterator[tuple[str, _Attribute]]:
    """Each by its name, such as ``model.0.weight.requires_grad``."""
    seen: set[int] = set()
    for path, module in _named_modules(part, name):
        if id(module) in seen:
            continue
        seen.add(id(module))
        of_torch = type(module).__module__.startswith("torch.nn.")
        for key, value in vars(module).items():
            if type(value) in _PLAIN and not key.startswith("_") and len(str(value)) <= _LONGEST_TEXT:
                yield f"{path}.{key}", _Attribute(value, (module, key) if of_torch or key == "training" else None)
        yield f"{path} hooks", _Attribute(sum(len(getattr(module, hooks, ())) for hooks in _HOOKS), None)
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                may = parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())
                place = (parameter, "requires_grad") if may else None
                yield f"{path}.{key}.requires_grad", _Attribute(parameter.requires_grad, place)


def _named_modules(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and those inside, by their names without DDP and torch.compile around them."""
    module = bare(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{path}.{name}")
