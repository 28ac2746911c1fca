"""Launches a submitit callable on Slurm, or waits for its result: ``launching.py launch|result RUN MARKS``."""

import os
import sys
import time
from pathlib import Path

from submitit.helpers import DelayedSubmission

import clusterddp


class Counting:
    """Waits in its first call for the end of the attempt; counts its calls over attempts by its ``checkpoint()``."""

    def __init__(self, marks):
        self.marks, self.calls, self.checkpointed_on = marks, 0, []

    def __call__(self, word):
        import submitit

        self.calls += 1
        if self.calls == 1:
            (self.marks / str(submitit.JobEnvironment().global_rank)).touch()
            while True:
                time.sleep(0.05)
        return word, self.calls, self.checkpointed_on

    def checkpoint(self, word):
        self.checkpointed_on.append(os.environ["RANK"])
        return DelayedSubmission(self, word + " again")


if __name__ == "__main__":
    what, run_dir, marks = sys.argv[1:]
    if what == "launch":
        clusterddp.launch(
            Counting(Path(marks)), "trained", nodes=2, device="cpu", partition="low", time="10", run_dir=run_dir
        )
    else:
        print(clusterddp.Handle(run_dir).result(all_ranks=True))
