"""The order in which DDP reduces gradients, kept over a stop.

DDP fills its buckets in the order in which it expects the gradients, and begins to reduce a bucket once it is full. It
first expects the parameters in reverse, and in the forward after the first backward makes its buckets again, in the
order in which that backward delivered the gradients. A resumed run would do the same after its own first backward, one
or more steps later than the uninterrupted run. The steps before that would sum in a different order, and at 3 or more
ranks give other bits.

Therefore rank 0's order is in the checkpoint, and ``ctx.wrap()`` of the next attempt gives it to DDP in a throw-away
pass, in which a stand-in for the model delivers zeros in that order. DDP then makes its buckets before the first step.
Communication hooks must not take part, so this happens when the model is wrapped, before the script can register any.
``CheckpointFolder.restore()`` does the same for its parts, unless they have hooks by then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clusterddp.distributed.torch_patches import Hook

#: The entry of a checkpoint: of each module, in the order in which the script wrapped them, the names of its parameters
#: in the order in which their gradients arrived. Empty before the first backward.
KEY = "bucket_orders"
#: The same in a checkpoint of a ``CheckpointFolder``, as pairs of a part and its orders. No name of a part has a space.
PARTS_KEY = "bucket orders"
Names: TypeAlias = "Sequence[str]"


class BucketOrder:
    """Of one DDP module that makes its buckets again, and whose every parameter gets a gradient in each backward.

    With ``static_graph``, DDP first needs a pass in which it counts how often each parameter is used, in any order.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = weakref.ref(wrapped)
        self.model = type(wrapped.module).__name__
        by_parameter = {parameter: name for name, parameter in wrapped.module.named_parameters()}
        #: By the number that DDP has given each parameter.
        self._names = [by_parameter[parameter] for parameter in self._parameters()[0]]
        #: The order from which DDP makes its buckets; as it was when the step began; and what a checkpoint had.
        self.names = self.before = self.restored = list[str]()
        self._arriving: list[str] | None = None
        if wrapped.static_graph:
            self._deliver(self._names[::-1])

    def _ddp(self) -> DistributedDataParallel:
        wrapped = self._wrapped()
        assert wrapped is not None
        return wrapped

    def _parameters(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """Those that DDP reduces, by number, and whether it expects a sparse gradient of each."""
        found: tuple[list[torch.nn.Parameter], list[bool]] = self._ddp()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return found

    def settle(self, names: Names) -> None:
        """Gives DDP the order of a checkpoint. Has no effect if there is none, or that of other parameters."""
        if sorted(names) == sorted(self._names):
            self.names = self.before = self.restored = list(names)
            self._deliver(names)

    def settle_unless_known(self, names: Names) -> None:
        """``settle``, unless a backward or an earlier checkpoint has given the order, or the module has a hook."""
        if not self.names and not getattr(self._ddp(), "_comm_hooks", ()):
            self.settle(names)

    def settle_in_reverse(self) -> None:
        """Gives DDP the order that it expects at first."""
        self._deliver(self._names[::-1])

    def _deliver(self, names: Names) -> None:
        """A pass of all ranks, without other effects, in which DDP gets gradients of zeros in this order."""
        numbers = {name: number for number, name in enumerate(self._names)}
        _deliver(self._ddp(), [numbers[name] for name in names], *self._parameters())

    def watch(self) -> None:
        """Notes the order in the coming backward from which DDP takes it."""
        handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, name))  # type: ignore[no-untyped-call]
            for name, parameter in zip(self._names, self._parameters()[0], strict=True)
        ]

        def before_forward(module: torch.nn.Module, _: Any) -> None:
            if self.names:
                for handle in handles:
                    handle.remove()
            elif torch.is_grad_enabled() and module.require_backward_grad_sync:
                self._arriving = []  # DDP reduces the gradients of the next backward, else it ignores them

        handles.append(self._ddp().register_forward_pre_hook(Hook(before_forward)))

    def _arrived(self, name: str, _: torch.Tensor) -> None:
        if self._arriving is None:
            return
        self._arriving.append(name)
        if len(self._arriving) == len(self._names):
            self.names, self._arriving = self._arriving, None


#: Those of the modules that ``ctx.wrap()`` has made.
_order_of: weakref.WeakKeyDictionary[torch.nn.Module, BucketOrder] = weakref.WeakKeyDictionary()


class BucketOrders:
    """Those of all modules that the script wraps, as far as DDP takes an order from their gradients."""

    def __init__(self, read: Callable[[], Sequence[Names] | None]) -> None:
        """``read``: what the newest checkpoint has of them. None if there is none. Called once."""
        self._read = functools.cache(read)
        self._orders: list[BucketOrder] = []
        #: Those whose order was unknown when the step began.
        self._open: list[BucketOrder] = []

    def add(self, wrapped: DistributedDataParallel) -> None:
        """A module that was wrapped, and has no communication hook of the script's yet. Collective."""
        order = BucketOrder(wrapped)
        if dist.get_world_size(wrapped.process_group) < dist.get_world_size():
            order.settle_in_reverse()  # the order of a smaller group is that of its first rank, which may not save
            return
        recorded = self._read() or []
        if len(self._orders) < len(recorded):
            order.settle(recorded[len(self._orders)])
        self._orders.append(order)
        _order_of[wrapped] = order
        if not order.names:
            order.watch()
            self._open.append(order)

    def begin_step(self) -> None:
        """A step begins."""
        if self._open:
            for order in self._open:
                order.before = order.names
            self._open = [order for order in self._open if not order.names]

    def progress(self, before_step: bool) -> dict[str, Any]:
        """For a checkpoint. ``before_step``: a step is in progress, and the state is the one before it."""
        return {KEY: [order.before if before_step else order.names for order in self._orders]}

    def restore(self, progress: Mapping[str, Any]) -> list[str]:
        """Why the resume is not exact at 3 and more ranks: models whose gradients are reduced in a different order."""
        recorded = progress.get(KEY, [])
        return [
            f"the checkpoint does not have the order in which DDP sums the gradients of {order.model}"
            for number, order in enumerate(self._orders)
            if number >= len(recorded) or order.restored != recorded[number]
        ]


def orders_in(parts: Mapping[str, Any]) -> dict[str, Any]:
    """For a checkpoint that the script saves itself: the orders of its parts. Empty if it has none."""
    found = [[name, [order.names for order in orders]] for name, part in parts.items() if (orders := _orders(part))]
    return {PARTS_KEY: found} if found else {}


def settle_in(parts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Gives DDP the orders of such a checkpoint, before the first backward. Collective.

    Has no effect on modules with a communication hook, which must not take part.
    """
    recorded = dict(saved.get(PARTS_KEY, []))
    for name, part in parts.items():
        for order, names in zip(_orders(part), recorded.get(name, []), strict=False):
            order.settle_unless_known(names)


def _orders(part: object) -> list[BucketOrder]:
    modules = part.modules() if isinstance(part, torch.nn.Module) else ()
    return [_order_of[module] for module in modules if module in _order_of]


def _deliver(
    wrapped: DistributedDataParallel, order: Sequence[int], parameters: Sequence[torch.nn.Parameter], sparse: list[bool]
) -> None:
    """A pass of all ranks in which DDP gets a gradient of zeros for each parameter, in this order."""
    model, broadcast_buffers = wrapped.module, wrapped.broadcast_buffers
    for parameter, is_sparse in zip(parameters, sparse, strict=True):
        if is_sparse:
            parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo)
        elif wrapped.static_graph:  # otherwise DDP takes a missing gradient for zeros, which saves the memory
            parameter.grad = torch.zeros_like(parameter)
    reducer: Any = wrapped.reducer
    stand_in = _StandIn(lambda: [reducer._autograd_hook(number) for number in order])
    wrapped._modules["module"], wrapped.broadcast_buffers = stand_in, False
    try:
        with torch.enable_grad():
            wrapped(torch.zeros(())).backward()  # with device_ids, DDP moves its inputs, and fails if there are none
    finally:
        wrapped._modules["module"], wrapped.broadcast_buffers = model, broadcast_buffers
    for parameter in parameters:
        parameter.grad = None


class _StandIn(torch.nn.Module):
    """Replaces the user's model: it has no parameters and no buffers, and delivers gradients in its backward."""

    def __init__(self, deliver: Callable[[], object]) -> None:
        super().__init__()
        self._deliver = deliver

    def forward(self, _: torch.Tensor) -> Any:
        # On the CPU, the backward runs in this thread, and so with its current streams of all devices.
        return _Delivery.apply(torch.zeros((), requires_grad=True), self._deliver)  # type: ignore[no-untyped-call]


class _Delivery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, zero: torch.Tensor, deliver: Callable[[], object]) -> torch.Tensor:
        ctx.deliver = deliver
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        ctx.deliver()
        return None, None
