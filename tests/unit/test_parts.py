"""The parts of a run: their names, what is refused, and a run without a loader."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from clusterddp.checkpoint.state_dict import load_state, state_of
from clusterddp.data.external_loader import NoLoader
from clusterddp.distributed.wrapping import optimizers
from clusterddp.errors import CheckpointError
from clusterddp.training.script_state import by_name


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(1, 1)


def test_members_of_lists_tuples_and_dicts_are_parts_by_their_place() -> None:
    """Nested ones too; modules that hold modules are one part, and None is left out."""
    a, b, c, whole = layer(), layer(), layer(), torch.nn.ModuleDict({"x": layer()})
    named = by_name({"nets": [a, {"b": b}], "pair": (c, None), "whole": whole, "scheduler": None})
    assert named == {"nets.0": a, "nets.1.b": b, "pair.0": c, "whole": whole}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"env": 3},
            r"run\(env=3\): expected an object with state_dict\(\) and load_state_dict\(\), got int. Keep numbers",
        ),
        ({"nets": [layer(), "b"]}, r"run\(nets.1=...\): expected an object .*, got str"),
        ({"nets": {1: layer()}}, r"run\(nets=...\): expected a dict of parts by name, got the key 1"),
        ({"nets": {"a.b": layer()}}, "got the key 'a.b'"),
    ],
)
def test_a_part_without_a_state_or_a_name_is_refused(given: dict[str, Any], message: str) -> None:
    """The message names it."""
    with pytest.raises(TypeError, match=message):
        by_name(given)


def test_without_a_loader_steps_are_numbers_and_epochs_are_not_available() -> None:
    """Each error says what to use instead."""
    none = NoLoader()
    assert list(itertools.islice(none.batches(7), 3)) == [7, 8, 9]
    for what in (lambda: none.epoch(0), lambda: none.ends_epoch(0), lambda: none.steps_in(2)):
        with pytest.raises(TypeError, match="not available without a loader. Give ctx.run.. a loader=, or count"):
            what()


@pytest.mark.parametrize("progress", [{"dataset_length": 5}, {"loaders": []}])
def test_a_run_that_started_with_a_loader_needs_it(progress: dict[str, Any]) -> None:
    """The order of its samples would be lost silently."""
    with pytest.raises(CheckpointError, match="the run started with a loader, but ctx.run.. received no loader"):
        NoLoader().restore(progress)


def test_optimizers_of_other_libraries_are_recognized() -> None:
    """They step and zero gradients; schedulers only step, and modules may have methods of any name."""

    class Foreign:
        def step(self) -> None: ...
        def zero_grad(self) -> None: ...

    optimizer = torch.optim.SGD(layer().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module = layer()
    module.step = Foreign().step  # type: ignore[assignment]
    parts = {"a": Foreign(), "b": optimizer, "c": scheduler, "d": module, "optimizer": scheduler}
    assert list(optimizers(parts)) == ["a", "b", "optimizer"]


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    """torch takes it, with the hyperparameters of the other kind. One option more or less is a version's."""
    parameters = [torch.nn.Parameter(torch.ones(2))]
    adam, sgd = torch.optim.Adam(parameters, lr=0.5), torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(adam, 1.0, total_steps=9)
    with pytest.raises(
        ValueError, match="has the state of an optimizer with amsgrad, betas, .*, but SGD has dampening, m"
    ):
        load_state(sgd, adam.state_dict())
    state = adam.state_dict()
    del state["param_groups"][0]["amsgrad"]
    fresh = torch.optim.Adam(parameters)
    load_state(fresh, state)
    assert fresh.param_groups[0]["lr"] == adam.param_groups[0]["lr"]


def test_the_state_of_a_scaler_that_is_off_is_empty() -> None:
    """As of a script that has an option for float16: the scaler has no tensors then, and torch 2.13's no such names."""
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    assert state_of(scaler) == {}
    load_state(scaler, {})
