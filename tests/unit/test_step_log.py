"""``steps: {log: REGEX}``: the steps that rank 0 prints become the run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.history.beginnings import Training
from clusterddp.history.codec import encode
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.attempt_state import RankEvent
from clusterddp.supervisor.step_log import StepLog


class Unread(StepLog):
    read_interval_s = 3600.0


class Followed:
    """A run's output, which is read when the test says so."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.run = RunDirectory(folder / "run")
        self.run.create()
        self.run.create_attempt()
        self.output = self.run.attempt_logs(0)
        self.events: list[RankEvent] = []
        self._log = Unread(self.run, 0, pattern, self.events.append)
        self._log.close()

    def prints(self, text: str, name: str = "out") -> list[int]:
        """The steps in metrics.jsonl after rank 0 has printed this."""
        with open(self.output / f"rank-0.{name}", "a") as file:
            file.write(text)
        self._log.look()
        return [line["step"] for line in read_lines(self.run.metrics_file)]

    def has_matched(self) -> bool:
        """Whether there was a step."""
        return self._log.has_matched


def test_the_newest_step_of_each_look_is_recorded_as_the_number_of_steps_done(tmp_path: Path) -> None:
    """Lines may come in pieces, with carriage returns, and on standard error; metrics count from 0."""
    followed = Followed(tmp_path, r"iter ([\d,]+)")
    assert followed.prints("loading data\niter 0: loss 3\n") == []
    assert followed.prints("iter 1: loss 3\niter 2: loss 2\niter 99") == [1]
    assert followed.prints("8: loss\n") == [1, 997]
    assert followed.prints(" 50%|  | iter 1,200 [00:01\r 51%| | iter 1,210 [00:02\r", "err") == [1, 997, 1209]
    assert followed.prints("evaluating\niter 1210 again\n") == [1, 997, 1209, 1209]
    (event,) = followed.events
    assert event.report == Training(rank=0, step=0, log=0)
    assert [*encode(replace(event.report, redone=3))][3:] == ["rank", "step", "log", "redone"]


def test_a_number_that_starts_over_is_told_once_and_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    followed = Followed(tmp_path, r"\[(\d+)/100\]")
    assert followed.prints("Epoch: [0][90/100]\n") == [89]
    assert followed.prints("Epoch: [1][10/100]\nEpoch: [1][20/100]\n") == [89]
    assert followed.prints("Epoch: [1][30/100]\nEpoch: [1][95/100]\n") == [89, 94]
    said = capfd.readouterr().err
    assert said.count("went back from 90 to 10. Smaller numbers are ignored. Make `steps: {log: ...}` match") == 1


@pytest.mark.parametrize(("line", "steps"), [("step x", []), (f"step {'9' * 30}", []), ("step 5", [4])])
def test_what_is_no_number_is_left_out(tmp_path: Path, line: str, steps: list[Any]) -> None:
    assert Followed(tmp_path, r"step (\S+)").prints(f"{line}\n") == steps


def test_it_is_known_whether_there_was_a_step(tmp_path: Path) -> None:
    followed = Followed(tmp_path, r"iter (\d+)")
    followed.prints("step 5\n")
    assert not followed.has_matched()
    followed.prints("iter 0\n")
    assert followed.has_matched()
