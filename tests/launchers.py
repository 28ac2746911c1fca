"""The commands of the guide's tables of launchers, made ready to run, and what the jobs must come to under them."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import torch

from tests.trained_alone import trained_alone

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKPOINT_STEPS = 20
#: The jobs and their arguments; FOLDER is the test's own.
ARGUMENTS = {
    "basic": ["--steps", "10"],
    "digits": ["--steps", "60"],
    "checkpoint": ["--steps", str(CHECKPOINT_STEPS), "--folder", "FOLDER"],
}


def commands(section: str) -> dict[str, str]:
    """The command in each launcher's row of the section's table."""
    text = (REPOSITORY / "docs" / "guide" / "launchers.md").read_text()
    table = re.search(rf"^\*\*{section}\*\*\n\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, f"no table below {section!r}"
    return dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \|", table[1], re.MULTILINE))


def cases(section: str) -> list[tuple[str, str]]:
    """The launchers of a section with the jobs to run: one each, in turn, or all of them for the full product."""
    jobs, names = list(ARGUMENTS), list(commands(section))
    if "CLUSTERDDP_TEST_PRODUCT" in os.environ:
        return [(name, job) for name in names for job in jobs]
    return [(name, jobs[number % len(jobs)]) for number, name in enumerate(names)]


def words(command: str, job: str, folder: Path, programs: dict[str, list[str]]) -> list[str]:
    """The command for a job; ``programs`` replace words that stand for more than themselves."""
    arguments = [str(folder) if word == "FOLDER" else word for word in ARGUMENTS[job]]
    programs = {"SCRIPT.py": [f"jobs/{job}.py"], "ARGS": arguments, **programs}
    return [made for word in command.split() for made in programs.get(word, [word])]


def check_result(job: str, ranks: int, said: str) -> None:
    """What rank 0 has printed at the end."""
    if job == "basic":
        assert f"10 steps: the gradients of {ranks} ranks were equal, and those of the joined batch" in said, said
    elif job == "digits":
        result = re.search(rf"test accuracy (\S+), macro-F1 (\S+), 359 images, {ranks} ranks", said)
        assert result is not None and 0.7 < float(result[1]) <= 1 and 0.7 < float(result[2]) <= 1, said
    else:
        # Of two ranks on one terminal: one's next line may begin before the other's line ends.
        result = re.search(r"rank 0 is done: weights sum to (-?[\d.]+)", said)
        assert result is not None and abs(float(result[1]) - sum_of_weights(ranks)) < 2e-5, said


@functools.cache
def sum_of_weights(ranks: int) -> float:
    """The result of jobs/checkpoint.py's model, trained in this process on the joined batches of so many ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(10, 5)
    trained_alone(model, CHECKPOINT_STEPS, ranks, momentum=0.9)
    return float(sum(parameter.detach().sum() for parameter in model.parameters()))
