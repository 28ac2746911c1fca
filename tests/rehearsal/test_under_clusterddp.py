"""``clusterddp rehearse`` of scripts that train with ``ctx.run()``, with and without a fault, and of others that
clusterddp starts again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import FAULT_FOUND, NOT_REPEATABLE
from clusterddp.training.context import Context
from tests import faulty_scripts as scripts
from tests.cli import REPOSITORY, clusterddp

#: The scripts search only their own modules for what they lose, so that this one is a file of its own.
FAULTY = """
import sys
import clusterddp
from tests import faulty_scripts

getattr(faulty_scripts, sys.argv[1])(clusterddp.init(seed=3))
"""


def rehearsed(folder: Path, *words: object, script: str, code: int) -> dict[str, Any]:
    """The certificate of a rehearsal of the script, with one rank."""
    source, output = folder / "source", folder / "certificate"
    source.mkdir()
    output.mkdir()
    (source / "train.py").write_text(script)
    environment = {"PYTHONPATH": str(REPOSITORY)}
    clusterddp("rehearse", "train.py", "--gpus", 1, "-o", output, *words, code=code, cwd=source, env=environment)
    assert [path.name for path in source.iterdir()] == ["train.py"]
    found: dict[str, Any] = json.loads((output / "rehearsal.json").read_text())
    return found


def rehearse(script: Callable[[Context], None], folder: Path, code: int, only: str = "step") -> dict[str, Any]:
    return rehearsed(folder, "--only", only, "--", script.__name__, script=FAULTY, code=code)


@pytest.mark.product
@pytest.mark.parametrize(
    "script",
    [
        scripts.shuffled,
        scripts.external,
        scripts.weighted,
        scripts.with_a_meter,
        scripts.sequential_with_workers,
        scripts.own_optimizer,
    ],
    ids=lambda script: script.__name__,
)
def test_a_script_without_a_fault_survives(script: Callable[[Context], None], tmp_path: Path) -> None:
    found = rehearse(script, tmp_path, 0, "two-notices")
    assert (found["mode"], found["verdict"], found["findings"]) == ("clusterddp", "survives", [])
    assert [(one["repeated_steps"], one["result"]) for one in found["disturbances"]] == [(0, "same")]


@pytest.mark.product
def test_a_script_without_a_fault_passes_every_disturbance_in_one_run(tmp_path: Path) -> None:
    """But those that change the number of ranks or of workers."""
    found = rehearsed(tmp_path, "--", "evaluated", script=FAULTY, code=0)
    tried = {one["name"]: one for one in found["disturbances"] if one["tried"]}
    assert tried.keys() >= {
        "start", "first-steps", "step", "evaluation", "save", "after-save", "two-notices", "short-notice", "kill",
        "full-disk", "workers",
    }  # fmt: skip
    assert {name for name, one in tried.items() if not one["with_others"]} <= {"workers", "last-step"}


#: What is found, and what its sentence names.
FAULTS: dict[Callable[[Context], None], tuple[str, str]] = {
    scripts.forgotten_scheduler: ("scheduler_not_restored", "scheduler, which ctx.run() does not receive"),
    scripts.forgotten_average: ("ema_not_restored", "ema"),
    scripts.dropout_generator: ("generator_not_restored", "generator"),
    scripts.counter_in_a_closure: ("state_not_restored", "count (1 instead of"),
    scripts.running_mean: ("state_not_restored", "mean"),
    scripts.forgotten_logged_value: ("state_not_restored", "the logged best"),
    scripts.generator_of_the_dataset: ("generator_not_restored", "rank 0"),
    scripts.sampler_with_hidden_state: ("position_not_restored", "rank 0"),
    scripts.second_resume_starts_over: ("position_not_restored", "rank 0"),
    scripts.short_epochs: ("position_not_restored", "rank 0"),
}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=() if script is scripts.forgotten_scheduler else pytest.mark.product)
        for script in FAULTS
    ],
    ids=lambda script: script.__name__,
)
def test_a_fault_is_found_and_named(script: Callable[[Context], None], tmp_path: Path) -> None:
    """Some show at the second resume only."""
    cause, words = FAULTS[script]
    only = "step" if script is scripts.forgotten_scheduler else "step,after-save,two-notices"
    found = rehearse(script, tmp_path, FAULT_FOUND, only)["findings"]
    assert cause in [one["cause"] for one in found]
    assert any(words in one["detail"] for one in found), found


@pytest.mark.product
@pytest.mark.parametrize(
    "script", [scripts.unseeded_generator, scripts.time_dependent], ids=lambda script: script.__name__
)
def test_a_script_that_differs_without_a_resume_is_not_repeatable(
    script: Callable[[Context], None], tmp_path: Path
) -> None:
    assert rehearse(script, tmp_path, NOT_REPEATABLE)["verdict"] == "not_repeatable"


#: It saves every five steps, and knows nothing of a notice. An iterable dataset is read from its beginning.
PLAIN = """
import os
import torch

class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(40.0).reshape(40, 1))

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=2))
for _ in range(step if {skips} else 0):
    next(batches)
while step < 20:
    loss = model(next(batches, torch.ones(2, 1))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}, "last.pt")
"""


@pytest.mark.product
def test_an_iterable_dataset_that_is_begun_again_is_found(tmp_path: Path) -> None:
    words = ["--under", "clusterddp", "--only", "after-save"]
    found = rehearsed(tmp_path, *words, script=PLAIN.format(skips=False), code=FAULT_FOUND)
    assert found["findings"][0]["cause"] == "position_not_restored"


@pytest.mark.product
@pytest.mark.parametrize(("under", "cause"), [("slurm", "checkpoint_destroyed"), ("clusterddp", None)])
def test_a_save_that_overwrites_its_file_is_protected_under_clusterddp(
    under: str, cause: str | None, tmp_path: Path
) -> None:
    """A kill in a save leaves half of the file under Slurm alone."""
    words = ["--under", under, "--only", "kill"]
    code = FAULT_FOUND if cause else 0
    found = rehearsed(tmp_path, *words, script=PLAIN.format(skips=True), code=code)
    assert (found["mode"], [one["cause"] for one in found["findings"]]) == (under, [cause] if cause else [])
