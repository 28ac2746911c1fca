"""How soon a run continues on a spare node: ``python -m benchmarks.spares``.

On the test cluster, a rank on each of four nodes, and a spare node. In turns:

(a) a rank is killed, and all ranks restart in place: the limit;
(b) a node's network cable is cut, while its ranks live on;
(c) a node loses power, so that it closes no connection;
(d) a node shuts down: its processes and its slurmd are killed, which closes their connections.

Measured from the detection (the event ``node_lost``, and in (a) the rank's broken connection) to the next step that the
run had not completed before. The bar of (b) to (d): 1.3 times the restart in place of the same turn. A table without a
bar has the times of the detection, of the event ``rank_failed``, and of the old ranks' end.

Each run must complete in one job, with the same losses and the same final bits as one without a fault.
``CLUSTERDDP_TEST_RELEASE=sid`` measures on another Slurm, which ``python -m tests.cluster install --release sid``
installs. A round takes two or three minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import common
from benchmarks.runs import cluster, folder_for, in_folders
from benchmarks.sides import in_turns
from clusterddp.hostlist import expand
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.interruptions import power_off
from tests.markdown import table
from tests.trainings import Training, check_same_run, events_of
from tests.waiting import story, wait_for_step

RELEASE = os.environ.get("CLUSTERDDP_TEST_RELEASE")
CLUSTER = ClusterConfig(nodes=5, cpus=2, slurmdbd=False, slurmd_timeout=20, release=RELEASE)
NODES, SPARE, VICTIM = ["n1", "n2", "n3", "n4"], "n5", "n3"
ALLOWED = 1.3
INTERVAL, STEP_BEFORE, PAUSE = 5, 20, "0.4"
OPTIONS = ["--nodes", "4", "--spare-nodes", "1", "--set", f"checkpoint.every={INTERVAL} steps"]
#: In seconds. A rank that is cut off ends once it sees the next attempt.
OLD_RANKS_END_S = 90.0
TEXT = """# A lost node and a spare one

A run of four nodes and a spare one loses a node, in turns with a run that restarts in place because a rank was killed.
`benchmarks/spares.py` says what each row measures. Each run completed in one job, with the same final bits as a run
without a fault, and all ranks of its first attempt ended."""


@dataclass(frozen=True)
class Recovery:
    """After one fault: the seconds from its detection to the next new step, and the steps repeated.

    The others are seconds from the fault: to its detection, the event ``rank_failed``, and the last old rank's end.
    """

    step: float
    repeated: int
    detection: float
    recorded: float
    old_ranks: float


REPLACED = [node for node in [*NODES, SPARE] if node != VICTIM]
#: By kind: what the tables call it, what happens, and the nodes on which the ranks continue.
FAULTS: dict[str, tuple[str, Callable[[Training], None], list[str]]] = {
    "restart": ("a rank is killed", lambda training: training.ranks_on(VICTIM)[0].kill(), NODES),
    "cut": ("a node is cut off", lambda training: training.cluster.cut(VICTIM), REPLACED),
    "dead": ("a node loses power", lambda training: power_off(training.cluster, VICTIM), REPLACED),
    "down": ("a node shuts down", lambda training: training.cluster.kill_node(VICTIM), REPLACED),
}


def recover(kind: str, reference: RunDirectory, up: Cluster, folder: Path) -> Recovery:
    """One run with one fault, checked."""
    _, fail, nodes = FAULTS[kind]
    training = Training.submit(up, folder, "--pause", PAUSE, options=OPTIONS)
    wait_for_step(training.run, STEP_BEFORE)
    old = [rank for node in NODES for rank in training.ranks_on(node)]
    failed = time.time()
    fail(training)
    training.wait(lambda: not any(rank.alive() for rank in old), "the old ranks to end", OLD_RANKS_END_S)
    ended = time.time()
    check(training, reference, nodes)
    detected, step = detection(training.run), next_new_step(training.run)
    recorded = events_of(training.run, "rank_failed")[0]["time"]
    repeated = sum(event["redone"] for event in events_of(training.run, "resumed"))
    found = Recovery(step - detected, repeated, detected - failed, recorded - failed, ended - failed)
    common.say(f"{kind}: {found}")
    if kind == "cut":  # on 26.05.5 the node's slurmstepd is still there a minute after the cable is back
        up.kill_node(VICTIM)
    return found


def check(training: Training, reference: RunDirectory, nodes: Sequence[str]) -> None:
    """The run completes in its job, in two attempts, with the bits of the reference."""
    assert training.finish() == "completed", story(training.run)
    started = events_of(training.run, "started")
    assert {event["job"] for event in started} == {training.job_id}, story(training.run)
    assert [expand(event["nodes"]) for event in started] == [NODES, nodes], story(training.run)
    check_same_run(training.run, reference, redone=True)


def detection(run: RunDirectory) -> float:
    """When the supervisor noticed the fault. It records the failure of a killed rank later, once srun has exited."""
    lost = events_of(run, "node_lost")
    return float(lost[0]["time"] if lost else events_of(run, "rank_failed")[0]["since"])


def next_new_step(run: RunDirectory) -> float:
    """When the first step was completed that the first attempt had not completed."""
    lines = list(read_lines(run.metrics_file))
    done = max(line["step"] for line in lines if line["attempt"] == 0)
    return min(float(line["time"]) for line in lines if line["step"] > done)


def measure(quick: bool, rounds: int | None) -> common.Found:
    with cluster(CLUSTER) as up:
        where = f"Slurm {up.version}, 5 nodes, proctrack/{up.proctrack}"
        release = up.version.rpartition(".")[0]
        reference = Training.submit(up, folder_for(up, "reference"), options=OPTIONS)
        assert reference.finish() == "completed", story(reference.run)
        kinds = {kind: partial(recover, kind, reference.run) for kind in FAULTS}
        found = in_turns(in_folders(up, kinds), rounds or (1 if quick else 5), warm_up=0)
    figures = {kind: [asdict(recovery) for recovery in recoveries] for kind, recoveries in found.items()}
    return common.Found(figures, table_rows(found, release), where, {"Detection": detection_table(found)})


def table_rows(found: dict[str, list[Recovery]], release: str) -> list[common.Row]:
    """For the common table."""
    steps = {kind: [recovery.step for recovery in recoveries] for kind, recoveries in found.items()}
    return [
        common.paired(
            f"{FAULTS[kind][0]}, Slurm {release}: detection to next new step",
            *("s", steps[kind], steps["restart"], "a restart in place"),
            allowed=ALLOWED,
        )
        for kind in found
        if kind != "restart"
    ]


def detection_table(found: dict[str, list[Recovery]]) -> str:
    """As median / largest."""
    columns = {
        "detection": "fault to detection (s)",
        "recorded": "fault to `rank_failed` (s)",
        "old_ranks": "fault to the end of the last old rank (s)",
        "repeated": "repeated steps",
    }
    lines = []
    for kind, recoveries in found.items():
        cells = [
            common.spread([getattr(one, name) for one in recoveries], 2 * (name != "repeated")) for name in columns
        ]
        lines.append([FAULTS[kind][0], *cells])
    return table(["median / largest", *columns.values()], lines)


if __name__ == "__main__":
    name = f"spares-{RELEASE}" if RELEASE else "spares"
    common.main(name, __doc__, TEXT, measure, "1 round", rounds={"type": int, "help": "(default: 5)"})
