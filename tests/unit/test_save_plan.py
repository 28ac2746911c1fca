"""The plan of a save: what it packs is what ``pack`` would, and a state that it does not fit is noticed. The snapshot
then has the same bytes, whichever way they are copied."""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from clusterddp.checkpoint import client, file_format
from clusterddp.checkpoint.client import Snapshot
from clusterddp.checkpoint.save_plan import MOST_WITHOUT, Packer, Plan
from clusterddp.checkpoint.state import pack, state_of, tensor_facts
from clusterddp.errors import CheckpointError
from tests.instructions import Instructions


def a_state() -> dict[str, Any]:
    """A state with every kind of value, after ``json`` and the layouts of tensors have had their say."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.BatchNorm2d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    weight = torch.ones(4, 2)
    return {
        "parent": None,
        "progress": {"step": 3, "best": float("nan"), "zero": 0.0, "long": 1 << 5000, "text": 'a "$quoted" \\ line\n'},
        "model": state_of(model),
        "optimizer": optimizer.state_dict(),
        "tied": {"one": weight, "other": weight, "also": weight.detach(), "flipped": weight.t()},
        "mixed": {
            "numbers": [1, 2, True, None, "x"],
            "pair": (torch.ones(1), 2.5, {3}),
            "counts": Counter([10, 20, 20]),
            "array": numpy.arange(6.0).reshape(2, 3),
            "in order": OrderedDict(b=torch.zeros(0), a=[torch.ones(2), {"deep": 1e300, 3: torch.ones(1)}]),
            "$odd": torch.tensor(1, dtype=torch.int8),
            "a.b": torch.ones(1),
            "a": {"b": torch.ones(2)},
            "channels": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
            "trained": torch.nn.Parameter(torch.ones(3)),
        },
    }


def as_packed(state: Any) -> tuple[str, list[Any], list[torch.Tensor]]:
    plain, tensors = pack(state)
    return file_format.state_literal(plain), tensor_facts(tensors), list(tensors.values())


def same(packed: Any, state: Any) -> bool:
    """Whether the state was packed as ``pack`` does it."""
    literal, layout, tensors = as_packed(state)
    equal = len(tensors) == len(packed.tensors) and all(map(torch.equal, tensors, packed.tensors))
    return equal and packed.layout == layout and packed.state_literal() == literal


def test_a_state_packed_by_a_plan_is_what_pack_makes_of_it() -> None:
    packer, state = Packer(), a_state()
    first = packer(state)
    assert first._plan is None and same(first, state)
    again = packer(state)
    assert again._plan is not None and again.layout is first.layout and same(again, state)


def test_new_values_are_packed_by_the_same_plan() -> None:
    packer, state = Packer(), a_state()
    packer(state)
    state["progress"] |= {"step": 4, "best": 0.5, "zero": -0.0, "long": None, "text": {"more": ["than", 1.5]}}
    state["optimizer"]["param_groups"][0]["lr"] = 1e-5
    state["mixed"]["numbers"] += ["one more", float("inf")]
    state["mixed"]["array"] = numpy.zeros((2, 3))
    state["mixed"]["a"]["b"] = torch.full((2,), 7.0)
    packed = packer(state)
    assert packed._plan is not None and same(packed, state)
    assert "-0.0" in packed.state_literal()
    assert json.loads(json.loads(packed.state_literal()))["progress"]["step"] == 4


def _to_half(state: Any) -> None:
    state["tied"]["one"].data = state["tied"]["one"].data.half()


def _reshape_in_place(state: Any) -> None:
    state["mixed"]["trained"].data = torch.ones(1, 3)


def _rename(state: Any) -> None:
    state["tied"]["another"] = state["tied"].pop("also")


def _reorder(state: Any) -> None:
    state["mixed"]["in order"].move_to_end("b")


def _untie(state: Any) -> None:
    state["tied"]["also"] = state["tied"]["also"].clone()


def _tie(state: Any) -> None:
    state["mixed"]["in order"]["a"][1][3] = state["mixed"]["a.b"]


def _transpose(state: Any) -> None:
    state["mixed"]["channels"] = torch.ones(1, 2, 3, 3)


def _tensor_for_a_number(state: Any) -> None:
    state["progress"]["best"] = torch.ones(1)


def _number_for_a_tensor(state: Any) -> None:
    state["mixed"]["a.b"] = 1.0


def _other_key_type(state: Any) -> None:
    state["mixed"]["in order"]["a"][1]["3"] = state["mixed"]["in order"]["a"][1].pop(3)


def _version_of_a_module(state: Any) -> None:
    state["model"]._metadata["1"]["version"] = 3


def _another_array(state: Any) -> None:
    state["mixed"]["array"] = numpy.zeros(6)


def _longer(state: Any) -> None:
    state["mixed"]["in order"]["a"].append(torch.ones(5))


CHANGES = [
    *(_to_half, _reshape_in_place, _rename, _reorder, _untie, _tie, _transpose, _tensor_for_a_number),
    *(_number_for_a_tensor, _other_key_type, _version_of_a_module, _another_array, _longer),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_state_that_the_plan_does_not_fit_is_packed_without_it(change: Callable[[Any], None]) -> None:
    packer, state = Packer(), a_state()
    packer(state)
    before = file_format.state_literal(pack(state)[0]), tensor_facts(pack(state)[1])
    change(state)
    assert before != (file_format.state_literal(pack(state)[0]), tensor_facts(pack(state)[1]))
    changed = packer(state)
    assert changed._plan is None and same(changed, state)
    assert packer(state)._plan is None  # the next plan is not made at once
    packer(state)
    assert same(packer(state), state)


@pytest.mark.parametrize(
    "value", [torch.ones(2).to_sparse(), torch.nn.UninitializedBuffer(), object()], ids=["sparse", "subclass", "object"]
)
def test_what_cannot_be_saved_is_refused_with_a_plan_too(value: Any) -> None:
    packer, state = Packer(), a_state()
    packer(state)
    for place in (state["mixed"]["a"], state["progress"]):
        broken = copy.copy(state)
        place["b"] = value
        with pytest.raises(CheckpointError, match="cannot save the state of"):
            packer(broken)
        place["b"] = torch.ones(2)


def test_a_state_that_always_changes_gets_fewer_and_fewer_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes several times as long as packing."""
    made: list[int] = []
    make = Plan.of

    def counted(state: Any, layout: Any) -> Plan | None:
        made.append(len(state["grows"]) - 1)
        return make(state, layout)

    monkeypatch.setattr(Plan, "of", counted)
    packer = Packer()
    for number in range(300):
        packer({"grows": [torch.ones(1)] * (number + 1)})
    assert made[:6] == [0, 2, 6, 14, 30, 62]
    assert max(later - earlier for earlier, later in itertools.pairwise(made)) == MOST_WITHOUT + 1


def test_a_plan_takes_no_python_code_per_tensor() -> None:
    counts = []
    for number in (10, 1000):
        state = {"optimizer": {"state": {place: {"step": torch.ones(1)} for place in range(number)}}}
        packer = Packer()
        packer(state)
        with Instructions() as instructions:
            instructions.counting = True
            assert packer(state)._plan is not None
        counts.append(instructions.by_module["checkpoint/save_plan.py"])
    assert 100 < counts[0] <= counts[1] < 1.1 * counts[0]


def bytes_in_snapshot(folder: Path, state: Any, *, together: bool) -> bytes:
    """What a snapshot has after two saves of a state. ``together``: small tensors are copied together, if possible."""
    taken, packer = Snapshot(torch.device("cpu"), folder), Packer()
    for _ in range(2):
        packed = packer(state)
        taken.take(packed.layout, packed.tensors, packed.addresses if together else None)
    return os.pread(taken.file, taken.nbytes, 0)


def small_and_large() -> dict[str, Any]:
    """More small tensors than one system call copies, of several sizes of elements, among large and empty ones."""
    torch.manual_seed(0)
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.int8
    small = [torch.randn(1 + number % 37).to(dtypes[number % 4]) for number in range(3 * client.MOST_VECTORS)]
    return {
        "small": small,
        "large": [torch.randn(20_000) for _ in range(3)],
        "none": torch.ones(0),
        "one": torch.ones(()),
    }


def test_small_tensors_copied_together_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, copied = small_and_large(), []
    copy_all = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda views, *rest, **how: copied.append(len(views)) or copy_all(views, *rest, **how)
    )
    assert bytes_in_snapshot(tmp_path, state, together=True) == bytes_in_snapshot(tmp_path, state, together=False)
    everything = len(state["small"]) + 5
    assert copied == [everything, 3, everything, everything]


def test_what_the_kernel_does_not_copy_is_copied_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as memory of a GPU, of which it says EFAULT."""
    state = small_and_large()
    wanted = bytes_in_snapshot(tmp_path, state, together=False)
    for result in (-1, 5):
        monkeypatch.setattr(client, "_LIBC", type("Libc", (), {"pwritev": lambda *_, result=result: result}))
        assert bytes_in_snapshot(tmp_path, state, together=True) == wanted
    monkeypatch.setattr(client, "_LIBC", object())
    assert bytes_in_snapshot(tmp_path, state, together=True) == wanted


def test_elements_that_are_negated_when_read_are_copied_by_torch(tmp_path: Path) -> None:
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_contiguous() and negated.is_neg()
    state = {"negated": negated}
    assert bytes_in_snapshot(tmp_path, state, together=True) == torch.tensor([-2.0]).numpy().tobytes()
