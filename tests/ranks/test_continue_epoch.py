"""``clusterddp.continue_epoch()``: a script that resumes at the beginning of an epoch repeats none of its steps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.epoch_items import EpochItems
from tests.waiting import preempt_local, wait_until

SCRIPT = Path(__file__).parents[1] / "scripts" / "resumes_at_epochs.py"
#: It trains on 10 batches of 2 per rank and epoch.
EPOCHS, SAMPLES = 3, 40


def train(folder: Path, *stops: int) -> tuple[RunDirectory, str]:
    """Preempts attempt N after batch ``stops[N]``, counted over all epochs."""
    run = RunDirectory(folder / "run")
    command = [sys.executable, "-m", "clusterddp.submit", str(SCRIPT), "--local", "--run-dir", str(run)]
    command += ["--device", "cpu", "--gpus", "2", "--", str(EPOCHS), *map(str, stops)]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    for attempt in range(len(stops)):
        wait_until(lambda: all("it waits" in output(run, attempt, rank) for rank in (0, 1)), "the batch")  # noqa: B023
        preempt_local(run)
        wait_until(lambda: signalled(run, attempt) == {0, 1}, "the notice")  # noqa: B023
        (folder / f"go-{attempt}").touch()
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    return run, said


def signalled(run: RunDirectory, attempt: int) -> set[int]:
    return {event["rank"] for event in run.events() if event["event"] == "signal" and event["attempt"] == attempt}


def output(run: RunDirectory, attempt: int, rank: int) -> str:
    log = run.attempt_logs(attempt) / f"rank-{rank}.out"
    return log.read_text() if log.exists() else ""


def trained_on(run: RunDirectory) -> list[Counter[tuple[int, int]]]:
    """How often each rank has made a step with each sample of each epoch, over all attempts."""
    found = []
    for rank in (0, 1):
        text = "".join(output(run, attempt, rank) for attempt in run.attempts())
        lines = re.findall(r"epoch (\d+) trained on \[(.*)\]", text)
        found.append(Counter((int(epoch), int(sample)) for epoch, samples in lines for sample in samples.split(", ")))
    return found


def undisturbed() -> list[Counter[tuple[int, int]]]:
    found: list[Counter[tuple[int, int]]] = [Counter(), Counter()]
    for rank in (0, 1):
        sampler: DistributedSampler[int] = DistributedSampler(range(SAMPLES), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            found[rank].update((epoch, sample) for sample in sampler)
    return found


@pytest.mark.product  # the recipes and the tests below have parts of it
@pytest.mark.parametrize("stops", [(4,), (4, 8)])
def test_after_stops_within_epochs_each_sample_was_trained_on_once(tmp_path: Path, stops: tuple[int, ...]) -> None:
    """With and without a context. A batch whose gradients were not part of a step yet is taken again."""
    run, _ = train(tmp_path, *stops)
    assert trained_on(run) == undisturbed()
    assert [event["items"] for event in run.events() if event["event"] == "saved"] == [*stops]


def test_an_epoch_that_was_over_at_the_stop_still_has_an_item() -> None:
    """Scripts divide by the number of batches that they have seen."""
    epoch = EpochItems()
    assert list(epoch.iterate("abc", 3)) == ["c"]
    assert list(epoch.iterate("abc", 2)) == ["c"]
    assert list(epoch.iterate("ab", 3)) == ["b"]
    assert list(epoch.iterate("", 0)) == []


def test_an_evaluation_within_the_epoch_leaves_its_count_alone() -> None:
    epoch, step = EpochItems(), stepping()
    for number, _ in enumerate(epoch.iterate(range(6), 0), 1):
        step()
        assert list(epoch.iterate("ab", 0)) == ["a", "b"]
        assert epoch.done == number
    assert epoch.done is None


def test_two_loops_that_take_turns_have_no_common_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the first loader of the next attempt would skip the items of both."""
    epoch, step = EpochItems(), stepping()
    for _ in zip(epoch.iterate(range(6), 0), epoch.iterate(range(6), 0), strict=True):
        step()
        assert epoch.done is None
    assert "continue_epoch(zip(a, b))" in capsys.readouterr().err


def stepping() -> Callable[[], object]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))])
    return optimizer.step


@pytest.mark.product
def test_nothing_is_skipped_if_the_script_has_not_loaded_what_it_saved(tmp_path: Path) -> None:
    (tmp_path / "forget").touch()
    run, said = train(tmp_path, 13)
    assert {times for (epoch, _), times in trained_on(run)[0].items() if epoch == 0} == {2}
    assert "attempt 1: the script completed its first step without opening" in said
