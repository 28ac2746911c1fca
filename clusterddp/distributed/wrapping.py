"""Wraps the user's model in DistributedDataParallel such that a resumed run is exact.

It sums gradients in the same order (``bucket_order.py``). The buffers of the run's models, above all BatchNorm's
running statistics, are kept and rewound with the step.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.distributed.bucket_order import BucketOrders
from clusterddp.distributed.torch_patches import Hook
from clusterddp.process import at_exit


def optimizers(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that are optimizers: torch's, and those of other libraries or the user.

    The latter step and zero gradients, or are called ``optimizer`` and step. Schedulers only step, and a module may
    have methods of any name.
    """
    return {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer) or _steps(name, part)}


def _steps(name: str, part: Any) -> bool:
    zeroes = hasattr(part, "zero_grad") and not isinstance(part, torch.nn.Module)
    return hasattr(part, "step") and (name == "optimizer" or zeroes)


def trained_parameters(optimizer: Any) -> set[torch.Tensor]:
    """All parameters of an optimizer. Empty if they are unknown, as in some other libraries."""
    groups = getattr(optimizer, "param_groups", ())
    return {parameter for group in groups for parameter in group["params"]}


def bare(module: Any) -> torch.nn.Module:
    """The user's own module, without DDP and torch.compile around it."""
    while isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, DistributedDataParallel) else module._orig_mod
    return module  # type: ignore[no-any-return]


def ddp_modules(part: object) -> list[DistributedDataParallel]:
    """The DDP modules that a part is or contains."""
    modules = part.modules() if isinstance(part, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


#: All DDP modules made here, and those whose order of gradients is kept over a stop.
_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_ordered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
#: Their parameters that were frozen when they were made, whose gradients DDP never averages.
_frozen: weakref.WeakKeyDictionary[DistributedDataParallel, list[torch.nn.Parameter]] = weakref.WeakKeyDictionary()


def wrap(
    model: torch.nn.Module,
    devices: Sequence[torch.device],
    orders: BucketOrders | None = None,
    *,
    all_used_once: bool = False,
    **options: Any,
) -> DistributedDataParallel:
    """The model in DDP, whose gradients ``orders`` keeps in order over a stop. It is moved to a single device.

    With ``static_graph``, DDP learns from its first pass how often each parameter is used. After an artificial pass it
    rejects a model with unused parameters, and reduces the gradients of reentrant checkpointing too early (seen in
    torch 2.13: wrong gradients, no error). There is no throw-away pass then, and a resume is not exact at 3 and more
    ranks, unless ``all_used_once`` promises that every parameter gets its gradient in every backward, in one piece.

    If the promise is broken, DDP itself rejects an unused parameter in the second step, and a gradient in several
    pieces raises RuntimeError in the first backward. Raises TypeError for ``all_used_once`` without ``static_graph``.
    """
    _check_unwrapped(model)
    _check_trained(model)
    static_graph = options.get("static_graph", False)
    if all_used_once and not static_graph:
        raise TypeError("all_used_once=True requires static_graph=True. Without static_graph, a resume is exact anyway")
    if len(devices) == 1:
        model = model.to(devices[0])
        if devices[0].type == "cuda":
            options = {"device_ids": [devices[0].index], **options}
    wrapped = DistributedDataParallel(model, **options)
    if not _made:
        at_exit(_release_process_group)
    _made.add(wrapped)
    _frozen[wrapped] = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if orders is not None and _rebuilds(wrapped) and (all_used_once or not static_graph):
        orders.add(wrapped)
        _ordered.add(wrapped)
    if all_used_once:
        _check_first_backward(wrapped)
    return wrapped


def _check_unwrapped(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"wrap() received an object of type {type(model).__name__}, expected a torch.nn.Module")
    if ddp_modules(model):
        raise TypeError(
            f"wrap() received a module of type {type(model).__name__}, which is or contains a DDP module. Pass the "
            "bare model"
        )
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise TypeError(
            f"wrap() received a module of type {type(model).__name__} that is already sharded, by fully_shard for "
            "example. FSDP averages its gradients, so pass it to ctx.run() without wrap()"
        )
    if _is_wrapped(model):
        gc.collect()  # the script may have dropped the wrapper
    if _is_wrapped(model):
        raise TypeError(f"this {type(model).__name__} is already wrapped. Use what the first wrap() returned")


def _check_trained(model: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TypeError(
            f"wrap() received a module of type {type(model).__name__} in which no parameter requires a gradient, but "
            "DDP is for models that train. Move this one to its device, as in teacher.to(ctx.device)"
        )


def _is_wrapped(model: torch.nn.Module) -> bool:
    return any(bare(wrapped) is bare(model) for wrapped in _made)


def unreduced(wrapped: DistributedDataParallel) -> bool:
    """Whether parameters that were frozen at ``wrap`` require gradients now."""
    return any(parameter.requires_grad for parameter in _frozen.get(wrapped, ()))


def _rebuilds(wrapped: DistributedDataParallel) -> bool:
    """Whether DDP makes its buckets again in the order in which gradients arrive."""
    if getattr(wrapped, "_delay_all_reduce_all_params", False) or getattr(wrapped, "_use_python_reducer", False):
        return False  # it has no buckets
    return wrapped.static_graph or not wrapped.find_unused_parameters


def doubt(wrapped: DistributedDataParallel) -> str | None:
    """Why a resume may sum gradients in a different order, at 3 and more ranks. None if it does not."""
    if wrapped in _ordered or not _rebuilds(wrapped):
        return None
    if wrapped.static_graph:
        return "is wrapped in DDP with static_graph=True, without all_used_once=True"
    return "is wrapped in DDP, but not by ctx.wrap()"


def _release_process_group() -> None:
    """Drops the models' references to the process group at exit, before the context destroys it.

    A gloo thread takes the GIL to free its last work. After interpreter shutdown that aborts the process ("terminate
    called without an active exception"), so the group must be destroyed before. Its destructor joins the threads. If
    the last reference is a reducer's, the destructor runs with the GIL held and deadlocks. Both seen in torch 2.13.
    """
    for wrapped in list(_made):
        for owner in ("logger", "reducer", "process_group"):
            wrapped.__dict__.pop(owner, None)


def _check_first_backward(wrapped: DistributedDataParallel) -> None:
    """Raises in the first backward if a parameter gets its gradient in pieces, of which DDP would reduce only the
    first."""
    seen: set[str] = set()

    def note(name: str, _: torch.Tensor) -> None:
        if name in seen:
            raise RuntimeError(
                f"wrap() received all_used_once=True, but {name} got its gradient in several pieces in one backward "
                "pass, as in reentrant checkpointing. Use checkpoint(..., use_reentrant=False), or omit all_used_once"
            )
        seen.add(name)

    def end(*_: Any) -> None:
        if seen:
            for handle in handles:
                handle.remove()

    handles = [
        parameter.register_post_accumulate_grad_hook(functools.partial(note, name))
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad
    ]
    handles.append(wrapped.register_forward_pre_hook(Hook(end)))


#: Larger buffers are not copied in each step: tables and masks, which seldom change.
LARGEST_COPY_BYTES = 1 << 20
#: The dtypes that torch._foreach_copy_ does not support on GPUs (torch 2.13), and those whose bits it copies instead.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
#: Buffers by part and name.
Named: TypeAlias = dict[str, dict[str, torch.Tensor]]


class Buffers:
    """Keeps the buffers equal on all ranks, and free of steps that are not done. ``parts``: those of the run.

    After a forward, each rank's statistics are those of its batch. DDP broadcasts rank 0's before the next forward. An
    average or an evaluation in between would see other values after a resume, which restores rank 0's on all ranks.
    Therefore ``share`` broadcasts earlier: after the optimizer has stepped, and at the end of each step of the loop.

    DDP does not broadcast after a forward inside ``no_sync`` or without gradients, and neither does ``share``. Each
    rank then has its own buffers until after the next forward whose gradients are reduced. A stop meanwhile saves those
    of all ranks.

    A stop may come between a step's forward and its optimizer's step, in an evaluation there. The step is repeated
    after the resume, so its forward must not count: ``rewind`` restores the buffers from before the step.
    """

    def __init__(self, parts: Mapping[str, Any], world_size: int) -> None:
        modules = [module for part in parts.values() for module in ddp_modules(part)]
        #: The modules that have buffers. DDP looks for them when it is made, and does not broadcast later ones.
        self._modules = [module for module in modules if module.modules_buffers]
        self._trained_by = {
            id(part): [module for module in self._modules if trained_parameters(part) & set(module.parameters())]
            for part in optimizers(parts).values()
        }
        every = (part for part in parts.values() if isinstance(part, torch.nn.Module))
        owners = dict.fromkeys(module for part in every for module in part.modules())
        #: The buffers in a checkpoint, by owner and name: a forward may also assign other tensors to them.
        self._names = [(m, name) for m in owners for name in m._buffers.keys() - m._non_persistent_buffers_set]
        self._before: list[torch.Tensor | None] = []
        self._copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._large: list[torch.Tensor] = []
        self._versions: list[int] = []
        #: Of modules in DDP, those in a checkpoint by part and name: the module in DDP, the owner, the name there.
        self._in_ddp = {
            name: found for name, part in parts.items() if world_size > 1 and (found := _saved_in_ddp(part))
        }
        #: The same of each module in DDP, and their versions when all ranks last had the same.
        self._of_module: dict[DistributedDataParallel, list[tuple[torch.nn.Module, str]]] = {}
        self._equal: dict[DistributedDataParallel, list[tuple[torch.Tensor | None, int]]] = {}
        for module, owner, name in (one for found in self._in_ddp.values() for one in found.values()):
            self._of_module.setdefault(module, []).append((owner, name))
        #: The modules whose buffers may differ between ranks.
        self._apart = {module for module in self._of_module if not module.broadcast_buffers}
        #: On rank 0, after the ranks have met in this step: the buffers of each that differ from rank 0's.
        self.gathered: list[Named] | None = None

    def share(self, optimizer: Any = None) -> None:
        """Broadcasts rank 0's buffers, of the models that an optimizer trains, or of all. Collective."""
        for module in self._modules if optimizer is None else self._trained_by.get(id(optimizer), ()):
            if module._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
                module._sync_buffers()  # type: ignore[no-untyped-call]
                module.require_forward_param_sync = False
                self._note_equal(module)
                self._apart.discard(module)
            elif optimizer is None and self._changed(module):
                self._apart.add(module)

    def _note_equal(self, module: DistributedDataParallel) -> None:
        buffers = [owner._buffers.get(name) for owner, name in self._of_module.get(module, ())]
        self._equal[module] = [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]

    def _changed(self, module: DistributedDataParallel) -> bool:
        """Whether this rank has changed a module's buffers since all had the same."""
        for (owner, name), (buffer, version) in zip(self._of_module.get(module, ()), self._equal[module], strict=True):
            now = owner._buffers.get(name)
            if now is not buffer or (now is not None and now._version != version):
                return True
        return False

    def in_ddp(self) -> Named:
        """The buffers of modules in DDP that a checkpoint has."""
        return {
            part: {n: buffer for n, (_, owner, key) in found.items() if (buffer := owner._buffers.get(key)) is not None}
            for part, found in self._in_ddp.items()
        }

    def progress(self) -> dict[str, Any]:
        """For a checkpoint: the buffers of ranks other than 0, or the parts without them."""
        if self.gathered is not None:
            return {"buffers_apart": self.gathered} if any(self.gathered) else {}
        parts = [part for part, found in self._in_ddp.items() if any(one[0] in self._apart for one in found.values())]
        return {"buffers_lost": parts} if parts else {}

    @torch.no_grad()
    def restore(self, progress: Mapping[str, Any], rank: int, world_size: int) -> list[str]:
        """Loads this rank's own buffers. Returns the reasons why the resume is not exact."""
        of_ranks: Sequence[Named] = progress.get("buffers_apart", [])
        if len(of_ranks) == world_size:
            for part, name in ((part, name) for one in of_ranks for part, of_part in one.items() for name in of_part):
                module, owner, key = self._in_ddp[part][name]
                self._apart.add(module)
                module.require_forward_param_sync = False  # as before the stop, on all ranks
                if name in of_ranks[rank].get(part, {}):
                    getattr(owner, key).copy_(of_ranks[rank][part][name])
        return [
            f"{part} had separate buffers on each rank, but the checkpoint has only rank 0's"
            for part in progress.get("buffers_lost", [])
        ]

    def begin_step(self) -> None:
        """Copies the buffers for ``rewind``, in 0.1 ms for the 159 buffers of a ResNet-50 on a CPU."""
        self.gathered = None
        if self._names:
            self._copy()
        for module in self._modules:
            if module not in self._equal:
                self._note_equal(module)

    @torch.no_grad()
    def _copy(self) -> None:
        now = [module._buffers.get(name) for module, name in self._names]
        if len(now) != len(self._before) or any(one is not other for one, other in zip(now, self._before, strict=True)):
            self._make_copies(now)
        for buffers, copies in self._copies:
            torch._foreach_copy_(copies, buffers)
        self._versions = [buffer._version for buffer in self._large]

    def _make_copies(self, buffers: list[torch.Tensor | None]) -> None:
        """Allocates copies of the small ones, by device and dtype as ``torch._foreach_copy_`` is fastest."""
        self._before, self._large = buffers, []
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for buffer in buffers:
            if buffer is not None and buffer.nbytes <= LARGEST_COPY_BYTES:
                bits = buffer.view(_SIGNED[buffer.dtype]) if buffer.dtype in _SIGNED else buffer
                groups.setdefault((bits.device, bits.dtype), []).append(bits)
            elif buffer is not None:
                self._large.append(buffer)
        self._copies = [(group, [torch.empty_like(buffer) for buffer in group]) for group in groups.values()]

    def unchanged(self) -> bool:
        """Whether the buffers are those from before the step. Waits for a GPU."""
        now = [module._buffers.get(name) for module, name in self._names]
        same = all(one is other for one, other in zip(now, self._before, strict=True))
        same &= self._versions == [buffer._version for buffer in self._large]
        return same and all(torch.equal(*pair) for both in self._copies for pair in zip(*both, strict=True))

    @torch.no_grad()
    def rewind(self) -> bool:
        """Restores the buffers from before the step. False if one that is too large for a copy has changed."""
        for (module, name), buffer in zip(self._names, self._before, strict=True):
            module._buffers[name] = buffer
        for buffers, copies in self._copies:
            torch._foreach_copy_(buffers, copies)
        return self._versions == [buffer._version for buffer in self._large]


def _saved_in_ddp(part: Any) -> dict[str, tuple[DistributedDataParallel, torch.nn.Module, str]]:
    """The persistent buffers of the modules in DDP of a part: the module, the owner, and the name there."""
    return {
        f"{number}.{path}.{name}".replace("_orig_mod.", ""): (module, owner, name)
        for number, module in enumerate(ddp_modules(part))
        for path, owner in bare(module).named_modules()
        for name in owner._buffers
        if name not in owner._non_persistent_buffers_set
    }
