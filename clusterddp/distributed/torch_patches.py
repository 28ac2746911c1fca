"""Functions of torch, and of a script's own objects, that are replaced in a rank, because there is no hook for them.

Each gives the reason. For everything else, a run uses torch's hooks, those of the script's modules by ``Hook``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

_NAME = "init_process_group"
#: The context that is entered around the broadcasts of each DDP module.
_around: weakref.WeakKeyDictionary[DistributedDataParallel, Callable[[], AbstractContextManager[None]]]
_around = weakref.WeakKeyDictionary()
_sync_buffers = DistributedDataParallel._sync_buffers
#: The CUDA graph that is being captured, and the optimizers whose steps each graph repeats.
_capturing: torch.cuda.CUDAGraph | None = None
_optimizers_in: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, dict[Any, None]] = weakref.WeakKeyDictionary()
_replayed: list[Callable[[Any], None]] = []


class Hook:
    """A hook of a module that calls ``act``. In a copy of the module, and in a file that it is saved to, it is a
    function of Python that does nothing. So ``torch.save`` works, and the file can be read without clusterddp."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *values: Any) -> None:
        self._act(*values)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class SecondGroup:
    """From now on, and once, the script may make its own default group, beside the one that ``init()`` has made.

    torch refuses that: "trying to initialize the default process group twice!". But nearly every public training
    repository calls ``init_process_group`` without asking ``is_initialized()``, and ``init()`` cannot leave the group
    to the script, because other scripts and libraries use the group that exists. So until the script calls torch's
    function, a replacement destroys the group of ``init()`` first.

    The function is replaced in every module that has it under its name, because ``from torch.distributed import
    init_process_group`` usually comes before ``init()``. Under a different name it fails as without this class.

    Args:
        before: removes the group that there is.
        made: called once the script's own exists.
    """

    def __init__(self, before: Callable[[], None], made: Callable[[], None]) -> None:
        self._torchs = dist.init_process_group

        @functools.wraps(self._torchs)
        def init_process_group(*values: Any, **options: Any) -> None:
            self.allow()
            before()
            self._torchs(*values, **options)
            made()

        self._ours = init_process_group
        _replace(self._torchs, self._ours)

    def allow(self) -> None:
        """Restores torch's function."""
        _replace(self._ours, self._torchs)


def _replace(old: Callable[..., None], new: Callable[..., None]) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is old:
            setattr(module, _NAME, new)


def around_broadcasts(module: DistributedDataParallel, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Enters ``around`` whenever this module broadcasts its buffers.

    DDP broadcasts in the middle of its forward, where there is no hook. The method is replaced in the class, because
    one of the module would be copied and pickled with it.
    """
    DistributedDataParallel._sync_buffers = _sync_within  # type: ignore[method-assign]
    _around[module] = around


def forget_broadcasts(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Stops entering ``around``, for all modules."""
    for module in [module for module, given in _around.items() if given == around]:
        del _around[module]


def _sync_within(module: DistributedDataParallel) -> None:
    around = _around.get(module, nullcontext)
    with around():
        _sync_buffers(module)  # type: ignore[no-untyped-call]


def after_call(part: Any, method: str, act: Callable[..., None]) -> None:
    """Calls ``act`` after each call of a part's method, with its arguments.

    For methods without a hook: ``step`` of a different library's optimizer, ``step`` of a GradScaler, which may skip an
    optimizer's step without a call of the optimizer's hook, and ``add_param_group``. The method of this one object is
    replaced.
    """
    setattr(part, method, _Extended(getattr(part, method), act))


class _Extended:
    """``method``, and ``act`` after it. In a copy of the object, and in a file that it is saved to, only the former."""

    def __init__(self, method: Callable[..., Any], act: Callable[..., None]) -> None:
        self._method, self._act = method, act

    def __call__(self, *values: Any, **options: Any) -> Any:
        result = self._method(*values, **options)
        self._act(*values, **options)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._method.__reduce_ex__(protocol)


@functools.cache  # once
def watch_graphs() -> None:
    """From now on, notes which optimizers' steps are captured in CUDA graphs, for ``after_replayed_step``.

    A capture calls the hooks of an optimizer, and runs none of its kernels. A replay runs the kernels, and calls no
    hook. Nothing else shows it either: a replay does not change the versions of tensors. The methods are replaced in
    the class, which torch.compile's graphs also use.
    """
    graphs: Any = torch.cuda.CUDAGraph
    capture_begin, capture_end, replay = graphs.capture_begin, graphs.capture_end, graphs.replay
    hooks: list[Any] = []

    def note(optimizer: Any, *_: Any) -> None:
        is_captured(optimizer)

    def begin(graph: torch.cuda.CUDAGraph, *values: Any, **options: Any) -> None:
        global _capturing
        capture_begin(graph, *values, **options)
        _capturing, _optimizers_in[graph] = graph, {}
        hooks.append(register_optimizer_step_post_hook(note))

    def end(graph: torch.cuda.CUDAGraph) -> None:
        global _capturing
        _capturing = None
        while hooks:
            hooks.pop().remove()
        capture_end(graph)

    def replay_and_note(graph: torch.cuda.CUDAGraph) -> None:
        replay(graph)
        for optimizer in _optimizers_in.get(graph, ()):
            for act in _replayed:
                act(optimizer)

    graphs.capture_begin, graphs.capture_end, graphs.replay = begin, end, replay_and_note


def is_captured(optimizer: Any) -> bool:
    """Whether the step that the optimizer has just made is captured in a graph, so that it has no effect yet."""
    if _capturing is None:
        return False
    _optimizers_in[_capturing][optimizer] = None
    return True


def after_replayed_step(act: Callable[[Any], None]) -> None:
    """Calls ``act`` with each optimizer of which a graph has repeated a step."""
    _replayed.append(act)
