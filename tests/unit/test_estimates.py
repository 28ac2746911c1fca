"""What ``submit --when`` asks Slurm, and what it makes of the answers."""

from __future__ import annotations

import time

import pytest

from clusterddp.errors import SlurmError
from clusterddp.jobdef.job import Job
from clusterddp.slurm.estimates import PAUSE_S, Estimate, estimates, parse_estimate
from tests.fake_slurm import FakeSlurm
from tests.wording import raises

#: As 22.05.8 prints it.
ANSWER = "sbatch: Job 41 to start at 2026-01-31T12:00:00 using 4 processors on nodes n[1-2] in partition low\n"
NOON = time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))


def job(**values: object) -> Job:
    return Job(name="x", module="x", **values)  # type: ignore[arg-type]


def test_each_partition_and_limit_is_one_question_a_second(fake_slurm: FakeSlurm) -> None:
    """A partition that refuses the job does not end the answers."""
    refused = SlurmError("`sbatch` failed: allocation failure: Requested time limit is invalid")
    fake_slurm |= {"sbatch --test-only --partition=low": ANSWER, "sbatch --test-only --partition=high": refused}
    pauses: list[float] = []
    asked = job(partition="low,high", time_s=7200, time_min_s=3600)
    found = list(estimates(asked, "#!/bin/bash\n", pauses.append))
    limits = ("0-02:00:00", "0-01:00:00")
    assert [line.rpartition(" ")[0] for line in fake_slurm.asked] == [
        f"sbatch --test-only --partition={name} --time={limit}" for name in ("low", "high") for limit in limits
    ]
    assert pauses == [PAUSE_S] * 3
    assert found[:2] == [Estimate("low", limit, NOON, "n[1-2]") for limit in limits]
    assert [(one.partition, one.start, one.refusal) for one in found[2:]] == [("high", None, str(refused))] * 2


def test_without_a_partition_and_a_limit_slurm_says_which_partition_it_is(fake_slurm: FakeSlurm) -> None:
    fake_slurm["sbatch --test-only /"] = ANSWER
    assert list(estimates(job(), "#!/bin/bash\n", lambda _: pytest.fail("one question"))) == [
        Estimate("low", "", NOON, "n[1-2]")
    ]


def test_an_answer_in_an_unknown_form_is_an_error() -> None:
    for text in ("", "sbatch: Job 41 to start soon\n", ANSWER.replace("2026-01-31T12:00:00", "N/A")):
        with raises(SlurmError):
            parse_estimate(text)
