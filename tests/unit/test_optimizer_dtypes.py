"""The dtypes of an optimizer's state after a resume: torch casts it to the dtype of the parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clusterddp
from clusterddp.checkpoint.state_dict import changed_dtypes, load_state, pack, recast_parameters, state_of, unpack
from clusterddp.training.run_state import load

GROUP: Any = SimpleNamespace(rank=0, world_size=1, collective_device=torch.device("cpu"))


class InFloat32(torch.optim.Optimizer):
    """Keeps float32 moments and weights, and more that a cast to bfloat16 would change."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["nested"] = {"weights": [parameter.float().clone()]}
                    state["count"] = torch.tensor(1000)  # bfloat16 has no 1001
                state["moment"].lerp_(parameter.grad.float(), 0.1)
                state["count"] += 1
                parameter.copy_(state["nested"]["weights"][0].sub_(state["moment"], alpha=group["lr"]))


class Cloned(InFloat32):
    """A ``state_dict`` of its own that changes no dtype."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


class Halved(InFloat32):
    """Saves its moments in half precision, and relies on torch's cast."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        state = {number: {**of, "moment": of["moment"].half()} for number, of in found["state"].items()}
        return {**found, "state": state}


class Holder:
    """Not an optimizer of torch, but it holds several."""

    def __init__(self, parameters: Any) -> None:
        first, *others = parameters
        self.main, self.more = InFloat32([first]), [InFloat32(others)]
        self.state: dict[Any, Any] = self.main.state
        self.param_groups = self.main.param_groups

    def step(self) -> None:
        self.main.step()
        self.more[0].step()

    def zero_grad(self) -> None:
        for one in (self.main, *self.more):
            one.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"main": self.main.state_dict(), "more": self.more[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.main.load_state_dict(state["main"])
        self.more[0].load_state_dict(state["more"])


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: a subclass of torch's without its attributes."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = InFloat32(parameters)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


def adafactor(parameters: Any) -> Any:
    module = pytest.importorskip("transformers.optimization")
    return module.Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=False)


def made(kind: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(dtype)
    return model, kind(model.parameters())


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 8).to(model.weight.dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(**parts: Any) -> Any:
    """The parts' states, as they are read from a file."""
    plain, tensors = pack({name: state_of(part) for name, part in parts.items()})
    return unpack(plain, {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    "kind",
    [InFloat32, Cloned, Holder, torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW, Wrapped, adafactor],
)
def test_an_optimizer_continues_with_the_saved_state(kind: Any) -> None:
    model, optimizer = made(kind)
    train(model, optimizer, range(5))
    states = saved(model=model, optimizer=optimizer)
    resumed, its_optimizer = made(kind)
    load_state(resumed, states["model"])
    load_state(its_optimizer, states["optimizer"])
    assert changed_dtypes(its_optimizer, states["optimizer"]) == []
    (_, one), (_, other) = pack(state_of(optimizer)), pack(state_of(its_optimizer))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    train(model, optimizer, range(5, 15))
    train(resumed, its_optimizer, range(5, 15))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_the_tensors_that_keep_their_dtype_are_copies() -> None:
    """The ranks of a host share the memory from which they load."""
    model, optimizer = made(InFloat32)
    train(model, optimizer, range(2))
    states = saved(optimizer=optimizer)
    load_state(made(InFloat32)[1], states["optimizer"])
    resumed, its_optimizer = made(InFloat32)
    load_state(its_optimizer, states["optimizer"])
    before = copy.deepcopy(states)
    train(resumed, its_optimizer, range(2))
    (_, one), (_, other) = pack(before), pack(states)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_optimizer_that_converts_its_state_itself_is_left_alone() -> None:
    model, optimizer = made(Halved, torch.float32)
    train(model, optimizer, range(2))
    _, its_optimizer = made(Halved, torch.float32)
    load_state(its_optimizer, saved(optimizer=optimizer)["optimizer"])
    assert {state["moment"].dtype for state in its_optimizer.state.values()} == {torch.float32}
    assert changed_dtypes(its_optimizer, state_of(optimizer)) == []


def test_the_state_of_parameters_in_another_dtype_than_before_is_cast(tmp_path: Path) -> None:
    """As in torch: AdamW's step refuses a moment in float32 for a parameter in bfloat16."""
    model, optimizer = made(torch.optim.AdamW, torch.float32)
    train(model, optimizer, range(2))
    states = saved(model=model, optimizer=optimizer)
    torch.save(states, tmp_path / "all.pt")
    with clusterddp.CheckpointFolder(tmp_path / "folder") as folder:
        folder.restore(model=model, optimizer=optimizer)
        folder.save(2, model=model, optimizer=optimizer)
    for how in ("folder", "init_from", "run"):
        now, its_optimizer = made(torch.optim.AdamW)
        parts = {"optimizer": its_optimizer, "model": now}
        if how == "folder":
            with clusterddp.CheckpointFolder(tmp_path / "folder") as folder:
                folder.restore(**parts)
        elif how == "init_from":
            load(dict.fromkeys(parts, tmp_path / "all.pt"), True, parts, GROUP)
        else:
            recast = recast_parameters(parts, states)
            for name, part in parts.items():
                load_state(part, states[name], recast)
        assert {state["exp_avg"].dtype for state in its_optimizer.state.values()} == {torch.bfloat16}
        assert changed_dtypes(now, states["model"]) == ["weight", "bias"]
        train(now, its_optimizer, range(2, 4))
