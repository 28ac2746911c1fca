"""``submit --check-resume``: normal scripts pass, and seeded faults are named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import clusterddp
from clusterddp.protocol import CHECK_RESUME
from clusterddp.rundir.step_records import Recording, Trial, read_trial
from clusterddp.runs import resume_check
from clusterddp.runs.resume_check import compare
from clusterddp.training.context import Context
from tests import cli
from tests import faulty_scripts as scripts
from tests.wording import says

REPOSITORY = Path(__file__).resolve().parents[2]


class TrialsHere:
    """Trials of a function in this process: each attempt has a context and objects of its own."""

    def __init__(
        self, function: Callable[[Context], None], folder: Path, patch: pytest.MonkeyPatch, device: str = "cpu"
    ) -> None:
        self._function, self._folder, self._patch, self._device = function, folder, patch, device

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        records = self._folder / f"{name}-steps"
        records.mkdir()
        for until in untils:
            self._patch.setenv(CHECK_RESUME, str(Recording(until, records)))
            with (
                suppress(clusterddp.Stopped),
                clusterddp.init(run_dir=self._folder / name, device=self._device, seed=3) as ctx,
            ):
                self._function(ctx)
        return read_trial(records)

    def inexact(self, name: str) -> list[str]:
        return []


def check(function: Callable[[Context], None], folder: Path, patch: pytest.MonkeyPatch) -> resume_check.Check:
    return compare(TrialsHere(function, folder, patch), scripts.STEPS - 1)


@pytest.mark.parametrize(
    "script",
    [
        scripts.shuffled,
        scripts.external,
        *(
            pytest.param(script, marks=pytest.mark.product)
            for script in (scripts.weighted, scripts.with_a_meter, scripts.sequential_with_workers)
        ),
    ],
    ids=lambda script: script.__name__,
)
def test_a_script_without_a_fault_passes(
    script: Callable[[Context], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = check(script, tmp_path, monkeypatch)
    assert not made.differs, str(resume_check.failure(made))
    said = resume_check.success(made)
    assert said.startswith("no difference in 13 steps, across an epoch's end and two resumes (after 6 and 8 steps)")
    assert "Compared batches, loss and the state of model, optimizer, scheduler" in said.replace("ema, ", "")


def test_a_script_that_ends_before_the_wanted_step_is_checked_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compare(TrialsHere(scripts.shuffled, tmp_path, monkeypatch), 10 * scripts.STEPS)
    assert not made.differs
    assert resume_check.success(made).startswith(f"no difference in {scripts.STEPS} steps, across an epoch's end")


FAULTS: dict[Callable[[Context], None], tuple[int, str]] = {
    scripts.unseeded_generator: (4, "the batch in step 0 on rank 0 differed"),
    scripts.generator_of_the_dataset: (3, "the batch in step 6 on rank 0 differed"),
    scripts.sampler_with_hidden_state: (3, "the batch in step 6 on rank 0 differed"),
    scripts.second_resume_starts_over: (3, "after the second resume (from step 8): the batch in step 8 on rank 0"),
    scripts.short_epochs: (3, "the batch in step 10 on rank 0 differed"),
    scripts.forgotten_average: (3, "a resume loses the state of ema, which ctx.run() did not receive"),
    scripts.forgotten_scheduler: (3, "a resume loses the state of parts.scheduler, which ctx.run() did not receive"),
    scripts.time_dependent: (4, "the logged loss in step 0 on rank 0 differed"),
    scripts.counter_in_a_closure: (3, "count (0 instead of 6)"),
    scripts.running_mean: (3, "When this attempt began, these also differed: mean"),
    scripts.dropout_generator: (3, "a resume loses the state of model.1.generator, which ctx.run() did not receive"),
}
#: One of each kind: without a resume, the batches after the first and the second one, a part, a value, a generator.
TYPICAL = {
    scripts.unseeded_generator,
    scripts.sampler_with_hidden_state,
    scripts.second_resume_starts_over,
    scripts.forgotten_scheduler,
    scripts.counter_in_a_closure,
}


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[] if script in TYPICAL else pytest.mark.product) for script in FAULTS],
    ids=lambda script: script.__name__,
)
def test_a_seeded_fault_is_named(
    script: Callable[[Context], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, words = FAULTS[script]
    made = check(script, tmp_path, monkeypatch)
    assert made.differs
    error = resume_check.failure(made)
    assert (error.exit_code, words in str(error)) == (code, True), str(error)


SCRIPT = """
import sys
import torch
import clusterddp
from tests.descent import Descent

ctx = clusterddp.init()
words = {word: 1.0 * number for number, word in enumerate("one two three four five six seven eight nine ten".split())}
values = torch.tensor([words[word] for word in (set(words) if "--set" in sys.argv else words)]).reshape(-1, 1)
model = torch.nn.Linear(1, 1)
optimizer = Descent(model, lr=0.001)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(torch.utils.data.TensorDataset(values), 2))
for (batch,) in run.steps(1000):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def submit(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Checks 12 steps of the script, on one rank, in its folder."""
    words = ["--local", "--device", "cpu", "--check-resume", 12, script, *arguments]
    return cli.clusterddp("submit", *words, cwd=script.parent, code=None)


def test_the_command_certifies_a_script_in_fresh_processes_and_leaves_nothing(script: Path) -> None:
    done = submit(script)
    assert done.returncode == 0, done.stderr
    assert "no difference in 12 steps, across an epoch's end and two resumes (after 6 and 8 steps)" in done.stderr
    assert "resumed from step 8" in done.stderr
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


@pytest.mark.product  # `unseeded_generator` differs without a resume, too
def test_the_command_says_that_a_run_depends_on_the_order_of_a_set(script: Path) -> None:
    """Which only fresh processes show. Without a resume there is the same difference."""
    done = submit(script, "--", "--set")
    assert done.returncode == 4, done.stderr
    assert "the run is not repeatable even without a resume. When it ran again, the batch in step 0" in done.stderr
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


PLAIN = """
import time
import torch

weights = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weights], lr=0.1)
for step in range(1000):
    weights.sum().backward()
    optimizer.step()
    time.sleep(0.05)
print("trained to the end")
"""


def test_a_script_without_clusterddp_is_named_before_the_check_and_ended_after_its_first_step(script: Path) -> None:
    script.write_text(PLAIN)
    done = submit(script)
    assert done.returncode == 1, done.stderr
    says("\n".join(done.stderr.splitlines()[1:]))
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


#: Steps of the example jobs, across the end of an epoch, and arguments that bring it near.
JOBS = {
    "basic": "12",
    "charlm": "12",
    "digits": "12",
    "weighted_digits": "30",
    "bucketed_text": "40 -- --lines 392 --global-batch 16",
    "gan": "40",
    "early_stopping": "110",
    "hf_streaming": "14 -- --files 2",
}


@pytest.mark.product
@pytest.mark.parametrize("job", JOBS)
def test_the_example_jobs_pass(job: str, tmp_path: Path) -> None:
    """On two ranks."""
    shape = ["--local", "--device", "cpu", "--nodes", "1", "--gpus", "2", "--check-resume", *JOBS[job].split()]
    command = [sys.executable, "-m", "clusterddp", "submit", f"jobs/{job}.yaml", *shape]
    environment = {**os.environ, "CLUSTERDDP_RUNS": str(tmp_path / "runs"), "HF_HOME": str(tmp_path / "hf")}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "no difference in " in done.stderr) == (0, True), done.stderr
    assert "across an epoch's end" in done.stderr or JOBS[job] == "12", done.stderr
    assert not any((tmp_path / "runs").glob("*"))
