"""Several models and optimizers in one process: whose gradients wait, what counts as a step, and pieces of a batch."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clusterddp.checkpoint.gradients import Gradients
from clusterddp.data.training_loader import MicroBatches
from clusterddp.training.step_state import OptimizerSteps
from tests.wording import raises


class Foreign:
    """An optimizer of another library, which tells nothing of its parameters."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.steps = 0

    def step(self, closure: Any = None) -> str:
        self.steps += 1
        return "done"

    def zero_grad(self) -> None: ...


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    return {"a": a, "b": b, "of_a": torch.optim.SGD(a.parameters(), lr=1.0), "of_b": torch.optim.SGD(b.parameters())}


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def saved(gradients: Gradients, before_step: bool = False) -> list[str]:
    found = gradients.progress(before_step)
    return [name for name, of in found.get("gradients", {}).items() if of] + ["lost"] * ("gradients_lost" in found)


def test_only_gradients_whose_optimizer_has_not_stepped_are_saved() -> None:
    """Of models that have had a backward since."""
    given = parts()
    gradients = Gradients(given, world_size=1)
    backward(given["a"])
    backward(given["b"])
    gradients.stepped(given["of_a"])
    assert saved(gradients) == ["b"]
    gradients.begin_step()
    backward(given["a"])
    gradients.stepped(given["of_a"])
    assert saved(gradients) == ["b"]
    assert saved(gradients, before_step=True) == ["b"]  # the step's own backward was another model's
    backward(given["b"])
    assert saved(gradients, before_step=True) == ["lost"]  # the step's backward was added to what waited
    gradients.stepped(given["of_b"])
    assert saved(gradients) == []


def test_restored_gradients_wait_until_their_optimizer_steps() -> None:
    """Also over a step of the loop that has no backward."""
    given, others = parts(), parts()
    gradients = Gradients(given, world_size=1)
    backward(given["b"])
    restored = Gradients(others, world_size=1)
    assert restored.restore(gradients.progress(before_step=False)) == []
    assert torch.equal(others["b"].weight.grad, given["b"].weight.grad) and others["a"].weight.grad is None
    restored.begin_step()
    assert saved(restored) == ["b"]
    restored.stepped(others["of_b"])
    assert saved(restored) == []


def test_gradients_of_a_part_whose_modules_the_script_calls_itself_are_saved() -> None:
    """The part's own forward never runs. A forward of one of them without a backward changes no gradient."""
    both = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1) for name in "ab"})
    optimizer = torch.optim.SGD(both.parameters())
    gradients = Gradients({"both": both, "optimizer": optimizer}, world_size=1)
    for _ in range(2):
        gradients.begin_step()
        backward(both["a"])
    gradients.begin_step()
    both["a"](torch.ones(1, 2))
    assert gradients.unchanged() and saved(gradients, before_step=True) == ["both"]
    backward(both["b"])  # had none before
    assert gradients.unchanged() and [*gradients.progress(True)["gradients"]["both"]] == ["a.weight", "a.bias"]
    backward(both["a"])
    assert not gradients.unchanged() and saved(gradients, before_step=True) == ["lost"]
    gradients.stepped(optimizer)
    assert saved(gradients) == []


def test_a_backward_after_the_optimizers_step_waits_until_the_next_one() -> None:
    """In the same step of the loop. The forward of a frozen model, or one without gradients, is followed by none."""
    given = parts()
    gradients = Gradients(given, world_size=1)
    gradients.begin_step()
    for name in "ab":
        backward(given[name])
        gradients.stepped(given[f"of_{name}"])
    backward(given["a"])
    with torch.no_grad():
        given["b"](torch.ones(1, 2))
    given["b"].requires_grad_(False)(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert saved(gradients) == ["a"]


def test_an_optimizer_that_does_not_tell_its_parameters_may_train_all() -> None:
    """Its step uses the gradients of all models."""
    given = parts()
    given = {"a": given["a"], "b": given["b"], "optimizer": Foreign(given["a"].parameters())}
    gradients = Gradients(given, world_size=1)
    backward(given["b"])
    assert saved(gradients) == ["b"]
    gradients.stepped(given["optimizer"])
    assert saved(gradients) == []


def test_steps_of_each_optimizer_are_noticed() -> None:
    """Of another library's too, and of one that a GradScaler skips; what such a step returns is not changed."""
    given = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    seen: list[Any] = []
    groups: list[str] = []
    steps = OptimizerSteps({**given, "foreign": Foreign([]), "scaler": scaler}, seen.append, groups.append)
    foreign = Foreign([])
    assert steps.any and not OptimizerSteps({"a": given["a"]}, seen.append, groups.append).any
    steps = OptimizerSteps({**given, "foreign": foreign, "scaler": scaler}, seen.append, groups.append)
    assert foreign.step(closure=print) == "done" and seen[-1] is foreign
    before = given["a"].weight.clone()
    scaler.scale(given["a"](torch.full((1, 2), 1e9)).sum()).backward()
    scaler.step(given["of_a"])
    assert seen[-1] is given["of_a"] and torch.equal(given["a"].weight, before)
    steps.begin_step()
    assert sorted(steps.missing()) == ["foreign", "of_a"]
    given["of_a"].step()
    scaler.step(torch.optim.SGD(given["a"].parameters()))  # of no part
    assert steps.missing() == ["foreign"]
    steps.begin_step()
    steps.begin_step()  # a step without any
    assert steps.missing() == ["of_a"]


def test_copies_of_optimizers_and_scalers_are_the_scripts_own() -> None:
    """Their steps are no steps of the run's, and a file with them can be read without clusterddp."""
    given = {"foreign": Foreign([]), "scaler": torch.amp.GradScaler("cpu"), **parts()}
    seen: list[Any] = []
    OptimizerSteps(given, seen.append, seen.append)
    for part in given.values():
        pickled = pickle.dumps(part)
        for other in (copy.deepcopy(part), pickle.loads(pickled)):
            if isinstance(other, Foreign):
                other.step()
                assert other.steps == 1
            elif isinstance(other, torch.optim.Optimizer):
                other.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        assert b"clusterddp" not in pickled.replace(Foreign.__module__.encode(), b"")
    assert seen == [] and given["foreign"].steps == 0
    given["foreign"].step()
    assert seen == [given["foreign"]]


def micro(given: dict[str, Any], share: int) -> MicroBatches:
    loader: Any = SimpleNamespace(share=share, batch_size=2)
    return MicroBatches(given, loader)


@pytest.mark.parametrize("share", [2, 4, 5])
def test_pieces_add_to_what_earlier_steps_accumulated(share: int) -> None:
    """With the weight that it has without pieces; gradients of other models stay as they are."""
    given, joined = parts(), parts()
    batch, pieces = torch.randn(share, 2), micro(given, share)
    backward(given["b"])
    other = given["b"].weight.grad.clone()
    for number in range(2):  # steps of the loop
        joined["a"](batch + number).mean().backward()
        for piece in pieces.pieces(batch + number):
            given["a"](piece).mean().backward()
    torch.testing.assert_close(given["a"].weight.grad, joined["a"].weight.grad)
    torch.testing.assert_close(given["b"].weight.grad, other)


def test_zeroing_the_gradients_of_any_model_inside_the_loop_is_an_error() -> None:
    """Not only of the first one."""
    given = parts()
    with raises(RuntimeError):
        for piece in micro(given, 4).pieces(torch.randn(4, 2)):
            given["of_b"].zero_grad()
            given["b"](piece).mean().backward()


def test_gradients_that_were_used_are_restored_as_zeros() -> None:
    """``zero_grad(set_to_none=False)`` keeps them. Those that are None stay None, and sparse ones are left out."""

    def made() -> dict[str, Any]:
        of_c = torch.nn.Embedding(3, 2, sparse=True)
        given = {**parts(), "c": of_c, "of_c": torch.optim.SGD(of_c.parameters(), lr=1.0)}
        return {**given, "of_both": torch.optim.SGD([*given["a"].parameters(), *of_c.parameters()], lr=1.0)}

    given = made()
    gradients = Gradients(given, world_size=1)
    backward(given["a"])
    given["c"](torch.tensor([1])).sum().backward()
    for name in ("of_a", "of_c", "of_both"):
        gradients.stepped(given[name])
    progress = gradients.progress(before_step=False)
    assert progress == {"gradients_used": {"of_a": True, "of_both": [True, True, False]}}
    resumed = made()
    assert Gradients(resumed, world_size=1).restore(progress) == []
    for parameter in resumed["a"].parameters():
        assert parameter.grad is not None and not parameter.grad.any()
    assert all(parameter.grad is None for name in ("b", "c") for parameter in resumed[name].parameters())
