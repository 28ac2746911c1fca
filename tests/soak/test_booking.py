"""Whether each second of an interrupted run is booked to what the run was doing, and each interruption has its cause.

``make soak-booking``, about 11 minutes. On the test cluster one run is preempted, killed, hung, requeued, held, stopped
and cut off in the order of ``booking_faults.SCHEDULE``. Its script writes down when it does what, the injector when it
did what, slurmctld's log and /proc tell of jobs and processes. ``booking_truth.py`` adds these up without any code or
record of clusterddp, and the sums are compared with ``clusterddp report --json``: each category within 2% or 1 s, at
most 2% unknown, and the cause of each interruption.

build/soak/booking has the history and the independent records, as tests/soaked has those of an earlier run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.interruptions import keep, until, write_definition
from tests.soak.booking_faults import SCHEDULE, Injector, Observer, by_slurm, said, tell_requests
from tests.soak.booking_judging import UNKNOWN, Soaked
from tests.soak.booking_truth import faults
from tests.trainings import Training
from tests.waiting import story

#: Batch hosts that die cost this many seconds until Slurm notices; a dead node is noticed earlier by the supervisor.
SLURMD_TIMEOUT_S = 40
CLUSTER = ClusterConfig(nodes=8, cpus=2, slurmd_timeout=SLURMD_TIMEOUT_S)
#: Steps that an attempt makes before it is interrupted: at least one checkpoint is among them.
STEPS = (25, 70)
KEPT = Path("build", "soak", "booking")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_second_of_an_interrupted_run_is_booked_to_what_it_was_doing(
    cluster: Cluster, runs: Path, request: pytest.FixtureRequest
) -> None:
    cluster.set_grace(20)
    tell_requests(cluster)
    seed = request.config.getoption("--seed")
    training = Training(cluster, runs, RunDirectory(runs / "run"))
    try:
        soaked = soak(training, seed)
    except Exception:
        keep(training, KEPT)
        raise
    record(training.run, soaked, KEPT)
    known = "\n".join([f"seed {seed}", *soaked.differences(), story(training.run)])
    assert soaked.wrong() == [], known
    assert soaked.unknown() <= UNKNOWN, known
    assert len(soaked.reported["attempts"]) > len(faults(soaked.records)), known


def soak(training: Training, seed: int) -> Soaked:
    """Makes the run."""
    up, folder = training.cluster, training.folder
    (folder / "said").mkdir()
    os.chown(folder / "said", up.uid, -1)
    script = up.source / "tests" / "scripts" / "known_times.py"
    write_definition(folder, script, str(folder), time="1:00:00")
    observer, injector, draw = Observer(), Injector(training), random.Random(seed)
    observer.start()
    injector.submit()
    for kind in SCHEDULE:
        print(f"{kind} at attempt {training.run.newest_attempt()}")
        injector.make(kind, draw.randint(*STEPS))
    injector.finish()
    until(lambda: up.job(training.job_id)["JobState"] == "COMPLETED", "the job's end", 60)
    observer.close()
    records = [*said(folder / "said"), *observer.records, *injector.records, *by_slurm(up, injector.jobs)]
    command = [up.python, "-m", "clusterddp", "report", training.run.path, "--json"]
    reported = json.loads(up.run(command, cwd=up.source).stdout)["runs"][0]
    return Soaked(reported, sorted(records, key=lambda record: record[0]))


def record(run: RunDirectory, soaked: Soaked, folder: Path) -> None:
    """The history and the independent records, as tests/soaked has them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in (run.events_file, run.timing_file):
        shutil.copy(file, folder / file.name)
    used = [one for one in soaked.records if not one[1].endswith("-1") or one[2] in ("slow", "usual", "crash")]
    lines = [json.dumps([round(time, 3), *rest], separators=(",", ":")) for time, *rest in used]
    (folder / "independent.jsonl").write_text("\n".join(lines) + "\n")
