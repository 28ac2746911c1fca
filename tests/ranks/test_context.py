"""What a script passes to ``ctx.run()`` and ``run.log()``, and the errors for what cannot be saved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clusterddp
from clusterddp.rundir.files import finite
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training import logged_values as logged
from tests import cli, ddp
from tests.wording import raises

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

ctx = clusterddp.init(device="cpu")
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.ones(8, 1)), batch_size=1)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, ema=None, best=eval(sys.argv[1]))
for _ in run.steps(1):
    run.log(confusion=torch.ones(2, 2))
"""


FREEZES = """
import gc
import clusterddp
assert gc.get_freeze_count() == 0
print(gc.get_threshold()[0], "allocations before")
clusterddp.init(device="cpu")
print(gc.get_freeze_count(), "objects frozen")
print(gc.get_threshold()[0], "allocations after")
"""


def test_init_takes_the_objects_of_imported_modules_out_of_garbage_collection(tmp_path: Path) -> None:
    """Every full collection would traverse them. There are few while they are imported."""
    script = tmp_path / "freezes.py"
    script.write_text(FREEZES)
    cli.clusterddp("submit", script, "--local", "--device", "cpu", "--run-dir", tmp_path / "run")
    said = RunDirectory(tmp_path / "run").attempt_logs(0).joinpath("rank-0.out").read_text()
    (frozen,) = re.findall(r"(\d+) objects frozen", said)
    assert int(frozen) > 100_000
    usual = int(subprocess.check_output([sys.executable, "-c", "import gc; print(gc.get_threshold()[0])"]))
    before, after = (int(re.findall(rf"(\d+) allocations {when}", said)[0]) for when in ("before", "after"))
    assert before > usual == after


@pytest.mark.parametrize(
    ("best", "words"),
    [
        ("1.5", "run(best=1.5): expected a metric, such as 'accuracy', or '-score' for the smallest, or a part with"),
        ("None", "run.log(confusion=...): expected a number or a tensor of one element, got 4 elements (Tensor)"),
    ],
)
def test_a_part_or_a_value_that_cannot_be_saved_is_refused_by_name(tmp_path: Path, best: Any, words: str) -> None:
    script = tmp_path / "gives.py"
    script.write_text(SCRIPT)
    ranks = ddp.start(script, best, ranks=1, folder=tmp_path / "out").expect(1)
    assert words in ranks.output(0)


CHANGING = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

ctx = clusterddp.init(device="cpu", run_dir=sys.argv[2])
model = ctx.wrap(torch.nn.Linear(2, 3 if sys.argv[1] == "wide" else 1))
groups = [{"params": [parameter]} for parameter in model.parameters()]
optimizer = torch.optim.SGD(groups if sys.argv[1] == "groups" else model.parameters(), lr=0.1)
others = {"ema": model} if sys.argv[1] == "ema" else {}
loader = ctx.loader(TensorDataset(torch.ones(8, 2)), batch_size=1)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, **others)
for _ in run.steps(1):
    pass
"""


def test_a_checkpoint_that_does_not_fit_is_an_error_that_names_the_part_and_the_remedy(tmp_path: Path) -> None:
    script, run = tmp_path / "changing.py", tmp_path / "run"
    script.write_text(CHANGING)
    ddp.run(script, "as it was", run, ranks=1, folder=tmp_path / "out")
    for change, words in {
        "wide": "the checkpoint does not fit model: Error(s) in loading state_dict",
        "groups": "the checkpoint does not fit optimizer: loaded state dict has a different number",
        "ema": "the checkpoint has no ema, only model, optimizer",
    }.items():
        said = ddp.start(script, change, run, ranks=1, folder=tmp_path / "out").expect(1).output(0)
        assert f"CheckpointMismatch: {words}" in said
        assert "Pass ctx.run() the parts that the run started with, or start a new run" in said


PRINTING = """
import sys
import torch
import clusterddp

class Copied:
    def write(self, text):
        sys.__stdout__.write(text)

ctx = clusterddp.init(device="cpu")
sys.stdout = Copied()
ctx.print("printed")
sys.stdout = sys.__stdout__
ctx.run(model=torch.nn.Linear(1, 1))
"""


def test_a_script_without_a_run_directory_is_told_that_nothing_is_saved(tmp_path: Path) -> None:
    """Also: ``ctx.print`` takes a stream that can only write."""
    (script := tmp_path / "alone.py").write_text(PRINTING)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "printed\n"), done.stderr
    assert "run_dir=" in done.stderr


@pytest.mark.parametrize(
    "value",
    [np.ones(3), torch.ones(0), object(), {"loss": torch.ones(1)}, {1, 2}, [1.0], "text", None, 1j, torch.tensor(1j),
     np.complex64(1j), np.str_("x"), np.datetime64("2026-01-01"), np.array(None), torch.ones(1, device="meta")],
)  # fmt: skip
def test_a_value_that_cannot_be_recorded_is_refused_at_the_call(value: Any) -> None:
    with raises(TypeError):
        logged.check("loss", value)


@pytest.mark.parametrize(
    ("value", "kept"),
    [(1, 1), (True, True), (0.5, 0.5), (np.float32(0.5), 0.5), (np.ones(1), 1.0), (torch.ones(1, 1), 1.0),
     (np.longdouble(0.5), 0.5), (np.uint64(2**64 - 1), 2**64 - 1), (torch.tensor(2, dtype=torch.int8), 2),
     (float("nan"), "NaN"), (torch.tensor(-torch.inf, dtype=torch.bfloat16), "-Infinity")],
)  # fmt: skip
def test_a_number_in_any_form_is_logged(value: Any, kept: Any) -> None:
    logged.check("loss", value)
    assert finite(logged.number("loss", value)) == kept


def test_too_large_or_too_many_values_are_refused_at_the_call() -> None:
    with raises(ValueError):
        logged.check("n", 2**100)
    values = logged.Values()
    for _ in range(100_000):  # the same name: it is merged
        values.add({"loss": 1.0})
    values.add({f"gradient norm of layer {layer}": 1.0 for layer in range(10_000)})
    with raises(ValueError):
        values.add({f"a{number}": 1.0 for number in range(20_000)})
    assert len(values.take().values) == 10_001 and values.take().values == {}


TRYING = """
import torch
import clusterddp

ctx = clusterddp.init(device="cpu")
net, samples = torch.nn.Linear(1, 1), torch.ones(8, 1)
model = ctx.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(samples, batch_size=1)
parts = {"model": model, "optimizer": optimizer}


def tried(text):
    try:
        eval(text)
    except (TypeError, ValueError) as error:
        print(f"{text} -> {type(error).__name__}: {error}", flush=True)
    else:
        print(f"{text} is accepted", flush=True)


for text in CALLS:
    tried(text)
    if text.startswith("ctx.run"):
        run = ctx.run(**parts, loader=loader)
list(run.steps(2.0))
"""
REFUSED = {
    "ctx.wrap('net')": "TypeError: wrap() received an object of type str, expected a torch.nn.Module",
    "ctx.wrap(model)": "TypeError: wrap() received a module of type DistributedDataParallel, which is or",
    "ctx.wrap(torch.compile(model))": "TypeError: wrap() received a module of type OptimizedModule, which is",
    "ctx.wrap(torch.nn.ModuleDict({'a': model}))": "TypeError: wrap() received a module of type ModuleDict, which",
    "ctx.wrap(net)": "TypeError: this Linear is already wrapped. Use what the first wrap() returned",
    "ctx.loader(samples, 1, num_worker=2)": "TypeError: 'num_worker' is not an option of the loader or of torch's "
    "DataLoader. Did you mean num_workers?",
    "ctx.eval_loader(samples, batch_size=1, foo=1)": "TypeError: 'foo' is not an option of the loader or of",
    "ctx.loader(samples, batch_size=1, num_workers=-1)": "ValueError: num_workers option should be non-negative",
    "ctx.loader(samples, batch_size=1, prefetch_factor=2)": "ValueError: prefetch_factor option could only",
    "ctx.loader(samples, batch_size=2.5)": "TypeError: batch_size is 2.5, expected an integer",
    "ctx.eval_loader(samples, batch_size=0)": "ValueError: batch_size is 0, expected the number of samples",
    "ctx.run(**parts, loader=loader, rng='steps')": "ValueError: run(rng='steps'): expected one of 'step', 'user'",
    "run.steps(-1)": "ValueError: run.steps(-1): expected a whole number of steps, 0 or more",
    "run.steps(2.5)": "ValueError: run.steps(2.5)",
    "run.steps(float('nan'))": "ValueError: run.steps(nan)",
    "run.steps('9')": "ValueError: run.steps('9')",
    "run.steps()": "TypeError: run.steps() needs a number of steps",
    "run.epochs(-0.5)": "ValueError: run.epochs(-0.5): expected a number of epochs, 0 or more",
}


def test_an_argument_that_cannot_work_is_refused_at_the_call(tmp_path: Path) -> None:
    script = tmp_path / "trying.py"
    script.write_text(TRYING.replace("CALLS", repr(list(REFUSED))))
    said = ddp.run(script, ranks=1, folder=tmp_path / "out").output(0)
    for call, words in REFUSED.items():
        assert f"{call} -> {words}" in said


def test_a_checkpoint_folder_refuses_a_part_without_a_state_and_an_invalid_step(tmp_path: Path) -> None:
    with clusterddp.CheckpointFolder(tmp_path) as folder:
        with raises(TypeError):
            folder.restore(best=1.5)  # type: ignore[arg-type]
        folder.restore(model=torch.nn.Linear(1, 1))
        for step in (-1, 1.5, "3"):
            with raises(ValueError):
                folder.save(step, model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_schedule_over_steps_in_ends_with_the_last_epoch() -> None:
    """Where epochs are not whole steps, `epochs * len(loader)` is more."""
    with clusterddp.init(device="cpu") as ctx:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(10, 1)), batch_size=4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=loader.steps_in(2))
        run = ctx.run(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
        for (batch,) in run.epochs(2):
            model(batch).sum().backward()
            optimizer.step()
            scheduler.step()
    assert (run.step, 2 * len(loader)) == (5, 6)
    assert scheduler.get_last_lr() == [0.0]
