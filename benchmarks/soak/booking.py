"""Whether each second of an interrupted run is booked to what the run was doing, and each interruption has its cause.

``python -m benchmarks.soak.booking`` (``make soak-booking``). On the test cluster one run is preempted, killed, hung,
requeued, held, stopped and cut off in the order of ``booking_faults.SCHEDULE``. Its script writes down when it does
what, the injector when it did what, slurmctld's log and /proc tell of jobs and processes. ``booking_truth.py`` adds
these up without any code or record of clusterddp, and the sums are compared with ``clusterddp report --json``: each
category within 2% or 1 s, at most 2% unknown, and the cause of each interruption.

The report is OUT/booking.md. --keep FOLDER keeps the history and the independent records. It takes about 11 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.runs import cluster, folder_for, until, write_definition
from benchmarks.soak.booking_faults import CAUSES, SCHEDULE, Injector, Observer, by_slurm, said, tell_requests
from benchmarks.soak.booking_truth import Record, faults, seconds, spans
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.trainings import Training

#: Batch hosts that die cost this many seconds until Slurm notices; a dead node is noticed earlier by the supervisor.
SLURMD_TIMEOUT_S = 40
CONFIG = ClusterConfig(nodes=8, cpus=2, slurmd_timeout=SLURMD_TIMEOUT_S)
#: A category is right within this share of its seconds, or within so many seconds.
SHARE, LEAST_S = 0.02, 1.0
#: The most of the time that may be unknown.
UNKNOWN = 0.02
SEED = 1
#: Steps that an attempt makes before it is interrupted: at least one checkpoint is among them.
STEPS = (25, 70)


@dataclass
class Soaked:
    """The run, as clusterddp reports it and as it was."""

    reported: Mapping[str, Any]
    records: Sequence[Record]
    slurm: str = ""
    truth: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.spans = spans(self.records)
        self.truth = seconds(self.spans)

    def categories(self) -> list[tuple[str, float, float, bool]]:
        """Of each category: what it took, what is booked, whether that is right."""
        booked = self.reported["time"]["seconds"]
        found = []
        for name in dict.fromkeys([*booked, *self.truth]):
            was, says = self.truth.get(name, 0.0), booked.get(name, 0.0)
            found.append((name, was, says, abs(says - was) <= max(LEAST_S, SHARE * was)))
        return found

    def interruptions(self) -> list[tuple[str, int, str, bool]]:
        """Of each fault: its kind, its attempt, what the timeline says, whether that is its cause, at its time."""
        lanes = {lane["attempt"]: lane for lane in self.reported["attempts"]}
        found = []
        for fault in faults(self.records):
            lane = lanes.get(fault.attempt, {"how": "missing", "begin": 0.0, "end": 0.0})
            right = re.search(CAUSES[fault.kind], lane["how"]) is not None
            # Of one without a record of its end, the lane ends with its last sign.
            timely = lane["begin"] <= fault.time <= lane["end"] + LEAST_S
            found.append((fault.kind, fault.attempt, lane["how"], right and timely))
        return found

    def unknown(self) -> float:
        """The share of the time that is booked as unknown."""
        time = self.reported["time"]
        return float(time["seconds"]["unknown"] / time["total_s"])

    def met(self) -> bool:
        """Whether all is right."""
        right = [one[-1] for one in (*self.categories(), *self.interruptions())]
        return all(right) and self.unknown() <= UNKNOWN and len(self.reported["attempts"]) > len(faults(self.records))

    def differences(self) -> list[str]:
        """For a post-mortem: the attempts whose booked seconds differ by more than a quarter of a second."""
        found = []
        for lane in self.reported["attempts"]:
            was = seconds(self.spans, lane["begin"], lane["end"])
            for name in {**was, **lane["seconds"]}:
                says, took = lane["seconds"].get(name, 0.0), was.get(name, 0.0)
                if abs(says - took) > 0.25:
                    found.append(f"attempt {lane['attempt']} ({lane['how']}): {name} {took:.2f}, booked {says:.2f}")
        return found


def soak(up: Cluster, seed: int) -> tuple[RunDirectory, Soaked]:
    """Makes the run."""
    folder = folder_for(up, "booking")
    (folder / "said").mkdir()
    os.chown(folder / "said", up.uid, -1)
    training = Training(up, folder, RunDirectory(folder / "run"))
    script = up.source / "benchmarks" / "scripts" / "known_times.py"
    write_definition(folder, script, str(folder), time="1:00:00")
    observer, injector, draw = Observer(), Injector(training), random.Random(seed)
    observer.start()
    injector.submit()
    for kind in SCHEDULE:
        common.say(f"{kind} at attempt {training.run.newest_attempt()}")
        injector.make(kind, draw.randint(*STEPS))
    injector.finish()
    until(lambda: up.job(training.job_id)["JobState"] == "COMPLETED", "the job's end", 60)
    observer.close()
    records = [*said(folder / "said"), *observer.records, *injector.records, *by_slurm(up, injector.jobs)]
    command = [up.python, "-m", "clusterddp", "report", training.run.path, "--json"]
    reported = json.loads(up.run(command, cwd=up.source).stdout)["runs"][0]
    return training.run, Soaked(reported, sorted(records, key=lambda record: record[0]), up.version)


def keep(run: RunDirectory, soaked: Soaked, folder: Path) -> None:
    """The history and the independent records, as tests/soaked has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (run.events_file, run.timing_file):
        shutil.copy(file, folder / file.name)
    used = [one for one in soaked.records if not one[1].endswith("-1") or one[2] in ("slow", "usual", "crash")]
    lines = [json.dumps([round(time, 3), *rest], separators=(",", ":")) for time, *rest in used]
    (folder / "independent.jsonl").write_text("\n".join(lines) + "\n")


def write(out: Path, soaked: Soaked, seed: int) -> None:
    """The page and the raw figures."""
    time, interruptions, categories = soaked.reported["time"], soaked.interruptions(), soaked.categories()
    names = ("kind", "attempt", "how", "met"), ("name", "took_s", "booked_s", "met")
    figures = {
        "slurm": soaked.slurm,
        "seed": seed,
        "interruptions": [dict(zip(names[0], one, strict=True)) for one in interruptions],
        "categories": [dict(zip(names[1], one, strict=True)) for one in categories],
        "time": time,
        "differences": soaked.differences(),
        "met": soaked.met(),
    }
    text = f"""# Booked time of an interrupted run

One run is interrupted {len(interruptions)} times in {time["total_s"] / 60:.1f} minutes. "Took" is recomputed from the
records of the script, the fault injector, slurmctld and /proc, "booked" is what `clusterddp report --json` says.
Seconds; right is within 2% or 1 s."""
    tables = {
        "Categories": common.table(["category", "took", "booked", "right"], categories),
        "Interruptions": common.table(["injected", "attempt", "on the timeline", "right"], interruptions),
    }
    where = f"Slurm {soaked.slurm}, seed {seed}"
    common.write(out, "booking", text, common.Found(figures, where=where, tables=tables))


def main() -> None:
    """The command line; exit code 1 if anything is booked wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep", type=Path, help="a folder for the run's history and the independent records")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    with cluster(CONFIG) as up:
        up.set_grace(20)
        tell_requests(up)
        run, soaked = soak(up, options.seed)
        if options.keep:
            keep(run, soaked, options.keep)
    print("\n".join(soaked.differences()), file=sys.stderr)
    write(options.out, soaked, options.seed)
    sys.exit(0 if soaked.met() else 1)


if __name__ == "__main__":
    main()
