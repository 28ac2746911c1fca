"""The plan of a save: a state's names and layout, and the text around its plain values, kept from one save to the next.

Training waits while a state is packed, and between two saves mostly values change. A plan is compared with the new
state depth by depth, each in a few calls that handle all its values in C. That takes a fifth of the time of ``pack``.
"""

from __future__ import annotations

import copy
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import eq, is_, methodcaller
from typing import Any

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.file_format import Tensor
from clusterddp.checkpoint.state import Packing, below, pack, tensor_facts

#: After a plan that fits no second state, saves do without one, each time twice as many, up to this number.
MOST_WITHOUT = 64

_CONTAINERS = (dict, OrderedDict, list)
#: Keys that are equal only if their JSON is.
_KEYS = {str, int, bool, type(None)}
_values_of = methodcaller("values")
_dtype_of, _shape_of = torch.Tensor.dtype.__get__, torch.Tensor.shape.__get__  # type: ignore[attr-defined]


@dataclass
class Packed:
    """A packed state: tensors to copy, and their layout, which stays the same object while it is equal."""

    layout: list[Tensor]
    tensors: list[torch.Tensor]
    _plain: Any
    #: The addresses of the tensors' bytes; None unless the bytes are there as they are saved.
    addresses: list[int] | None = None
    _plan: Plan | None = None

    def state_literal(self) -> str:
        """The state for a file's header. Slow, so not for the training thread."""
        return file_format.state_literal(self._plain) if self._plan is None else self._plan.filled(self._plain)


class Packer:
    """Packs the states of one run, by the last plan if it fits."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._fitted = False
        #: How many saves to pack before the next plan is made, and how many it was the last time.
        self._without = self._last_without = 0

    def __call__(self, state: Mapping[str, Any]) -> Packed:
        """Raises CheckpointError if the state cannot be saved."""
        if self._plan is not None:
            if (packed := self._plan.fit(state)) is not None:
                self._fitted = True
                return packed
            self._without = self._last_without = 0 if self._fitted else min(MOST_WITHOUT, 2 * self._last_without + 1)
            self._plan = None
        plain, tensors = pack(state)
        packed = Packed(tensor_facts(tensors), list(tensors.values()), plain)
        if self._without:
            self._without -= 1
        else:
            self._plan, self._fitted = Plan.of(state, packed.layout), False
        return packed


class Plan:
    """The result of ``pack`` for a state, in a form that fits every state that differs only in values."""

    def __init__(self, levels: list[_Level], leaf_paths: list[str], layout: list[Tensor]) -> None:
        self._levels, self._leaf_paths, self._layout = levels, leaf_paths, layout

    @classmethod
    def of(cls, state: Mapping[str, Any], layout: list[Tensor]) -> Plan | None:
        """The plan of a state that ``pack`` accepts, with this layout. None for one that no plan can describe."""
        mark = uuid.uuid4().hex
        levels, leaf_paths, marked = _surveyed(state, mark)
        if any(not _KEYS.issuperset(level.key_types) for level in levels):
            return None
        plan = cls(levels, leaf_paths, layout)
        found = plan._values(state)
        assert found is not None
        tensors, leaves = found
        in_leaves = Packing()
        for path, leaf in zip(leaf_paths, leaves, strict=True):
            in_leaves.walk(leaf, path)
        packing = Packing()
        text = file_format.state_literal(packing.walk(marked, ""))
        named = {**packing.tensors, **in_leaves.tensors}
        pieces = re.split(rf'\\"{mark}(\d+)\\"', text)
        if named.keys() != {tensor.name for tensor in layout} or len(pieces) != 2 * len(leaves) + 1:
            return None
        plan._set_text(pieces, list(in_leaves.tensors))
        return plan if plan._set_tensors([*tensors, *in_leaves.tensors.values()], named) else None

    def _set_text(self, pieces: list[str], in_leaves: list[str]) -> None:
        """Notes the text, with the number of a leaf at every other place, and the names of the leaves' tensors."""
        self._pieces, self._slots, self._in_leaves = pieces, [int(number) for number in pieces[1::2]], in_leaves

    def _set_tensors(self, tensors: list[torch.Tensor], named: Mapping[str, torch.Tensor]) -> bool:
        """Notes what ``_are_alike`` compares, and which of the tensors the layout has. False if it has complex ones."""
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
        self._order = [places[id(named[tensor.name])] for tensor in self._layout]
        self._dtypes, self._shapes = list(map(_dtype_of, tensors)), list(map(_shape_of, tensors))
        #: A tensor whose elements are negated when they are read is a view of every other one: it has no more than one.
        self._are_single = [tensor.numel() == 1 and tensor.is_floating_point() for tensor in tensors]
        self._contiguous = all(map(torch.Tensor.is_contiguous, tensors))
        self._strides = list(map(torch.Tensor.stride, tensors))
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._shared = _sharing(self._addresses)
        return not any(dtype.is_complex for dtype in set(self._dtypes))  # a tie also depends on their conjugate bits

    def fit(self, state: Mapping[str, Any]) -> Packed | None:
        """Packs a state that differs from the plan's in values only. None for a different one, or one that cannot be
        saved.

        Raises CheckpointError for a value that cannot be saved.
        """
        packing = Packing()
        try:
            if (found := self._values(state)) is None:
                return None
            tensors, leaves = found
            plain = [packing.walk(leaf, path) for leaf, path in zip(leaves, self._leaf_paths, strict=True)]
            tensors += packing.tensors.values()
            if list(packing.tensors) != self._in_leaves or not self._are_alike(tensors):
                return None
        except (RuntimeError, RecursionError):  # of a tensor without strides or memory
            return None
        sources = list(map(tensors.__getitem__, self._order))
        if not self._contiguous or any(map(torch.Tensor.is_neg, compress(tensors, self._are_single))):
            return Packed(self._layout, sources, plain, None, self)
        return Packed(self._layout, sources, plain, list(map(self._addresses.__getitem__, self._order)), self)

    def filled(self, plain: Sequence[Any]) -> str:
        """The state as text, with these plain values at the places of the plan's."""
        texts = [_literal(value) for value in plain]
        self._pieces[1::2] = map(texts.__getitem__, self._slots)
        return "".join(self._pieces)

    def _values(self, state: Any) -> tuple[list[torch.Tensor], list[Any]] | None:
        """The tensors and the other values of a state in the plan's order. None if its structure differs."""
        items: list[Any] = [state]
        tensors: list[torch.Tensor] = []
        leaves: list[Any] = []
        for level in self._levels:
            if (opened := level.opened(items)) is None:
                return None
            tensors += compress(items, level.is_tensor)
            leaves += compress(items, level.is_leaf)
            items = opened
        return tensors, leaves

    def _are_alike(self, tensors: list[torch.Tensor]) -> bool:
        """Whether each tensor is of the same kind as the plan's, and the same ones share memory."""
        # Without lists of shapes, because that many new objects would start the garbage collector.
        if not all(map(is_, map(_dtype_of, tensors), self._dtypes)):
            return False
        if not all(map(eq, map(_shape_of, tensors), self._shapes)):
            return False
        if self._contiguous:
            if not all(map(torch.Tensor.is_contiguous, tensors)):
                return False
        elif not all(map(eq, map(torch.Tensor.stride, tensors), self._strides)):
            return False
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            if _sharing(addresses) != self._shared:
                return False
            self._addresses = addresses
        return True


@dataclass
class _Level:
    """The values at one depth of a state. A container is opened, to become part of the next level, if it has tensors in
    it. Others are leaves, as plain values are."""

    is_dict: list[bool]
    is_ordered: list[bool]
    is_list: list[bool]
    is_tensor: list[bool]
    is_leaf: list[bool]
    is_fixed: list[bool]
    fixed_types: list[type]
    keys: list[Any]
    key_types: list[type]
    lengths: list[int]
    #: The entry of module states about submodules.
    metadata: list[Any]

    @classmethod
    def of(cls, items: Sequence[Any], opened: set[int]) -> _Level:
        is_list = [id(item) in opened and type(item) is list for item in items]
        is_dict = [id(item) in opened and type(item) is not list for item in items]
        is_ordered = [id(item) in opened and type(item) is OrderedDict for item in items]
        is_tensor = [isinstance(item, torch.Tensor) for item in items]
        is_fixed = [any(flags) for flags in zip(is_list, is_dict, is_tensor, strict=True)]
        dicts, lists = list(compress(items, is_dict)), list(compress(items, is_list))
        return cls(
            is_dict=is_dict,
            is_ordered=is_ordered,
            is_list=is_list,
            is_tensor=is_tensor,
            is_leaf=[not fixed for fixed in is_fixed],
            is_fixed=is_fixed,
            fixed_types=list(map(type, compress(items, is_fixed))),
            keys=list(chain.from_iterable(dicts)),
            key_types=list(map(type, chain.from_iterable(dicts))),
            lengths=list(map(len, [*dicts, *lists])),
            metadata=copy.deepcopy(_metadata(compress(items, is_ordered))),
        )

    def opened(self, items: Sequence[Any]) -> list[Any] | None:
        """The values in this level's containers: of all dicts, then of all lists. None if the level differs."""
        if not all(map(is_, map(type, compress(items, self.is_fixed)), self.fixed_types)):
            return None
        dicts, lists = list(compress(items, self.is_dict)), list(compress(items, self.is_list))
        if list(map(len, [*dicts, *lists])) != self.lengths:
            return None
        keys = list(chain.from_iterable(dicts))
        if not all(map(is_, map(type, keys), self.key_types)) or keys != self.keys:
            return None
        if _metadata(compress(items, self.is_ordered)) != self.metadata:
            return None
        # Not dict.values, because an OrderedDict has its own order.
        return [*chain.from_iterable(map(_values_of, dicts)), *chain.from_iterable(lists)]


def _surveyed(state: Any, mark: str) -> tuple[list[_Level], list[str], Any]:
    """The levels of a state, the paths of its leaves, and the state with marks and numbers in place of these."""
    opened: set[int] = set()
    _find_opened(state, opened)
    root = [state]
    places: list[tuple[Any, Any, str]] = [(root, 0, "")]
    levels: list[_Level] = []
    leaf_paths: list[str] = []
    while places:
        items = [holder[key] for holder, key, _ in places]
        levels.append(_Level.of(items, opened))
        in_dicts: list[tuple[Any, Any, str]] = []
        in_lists: list[tuple[Any, Any, str]] = []
        for (holder, key, path), item in zip(places, items, strict=True):
            if id(item) in opened:
                holder[key] = within = copy.copy(item)
                keys: Iterable[Any] = range(len(within)) if type(within) is list else within
                found = [(within, key, below(path, key)) for key in keys]
                (in_lists if type(within) is list else in_dicts).extend(found)
            elif not isinstance(item, torch.Tensor):
                holder[key] = f"{mark}{len(leaf_paths)}"
                leaf_paths.append(path)
        places = [*in_dicts, *in_lists]
    return levels, leaf_paths, root[0]


def _find_opened(item: Any, opened: set[int]) -> bool:
    """Whether a value is or contains a tensor. Notes the containers that do."""
    if isinstance(item, torch.Tensor):
        return True
    if type(item) not in _CONTAINERS:
        return False
    found = [_find_opened(value, opened) for value in (item if type(item) is list else item.values())]
    if any(found):
        opened.add(id(item))
    return any(found)


def _metadata(dicts: Iterable[Any]) -> list[Any]:
    return [getattr(one, "_metadata", None) for one in dicts]


def _sharing(addresses: list[int]) -> list[int]:
    """Equal for two lists in which the same positions have equal addresses."""
    last = dict(zip(addresses, range(len(addresses)), strict=True))
    return list(map(last.__getitem__, addresses))


def _literal(plain: Any) -> str:
    """A plain value within ``file_format.state_literal``. Numbers skip json, because there may be many."""
    if type(plain) is int or type(plain) is float:
        return repr(plain)
    return file_format.state_literal(plain)[1:-1]
