"""The places of ranks on a real Slurm that are no plain nodes x tasks: compared with where the tasks really are."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster

PLACE = "tests/scripts/place.py"


def places(cluster: Cluster, command: str) -> list[dict[str, Any]]:
    """What the ranks print that ``command`` starts with `python` or `join` (which also makes the process group)."""
    programs = {"python": f"{cluster.python} {PLACE}", "join": f"{cluster.python} {PLACE} --join"}
    line = " ".join(programs.get(word, word) for word in command.split())
    done = cluster.run(["bash", "-c", line], cwd=cluster.source, env=environment(cluster), timeout=180)
    return [json.loads(line) for line in done.stdout.splitlines()]


def environment(cluster: Cluster) -> dict[str, str]:
    """This checkout's clusterddp, whichever the interpreter has."""
    return {"PYTHONPATH": str(cluster.source), "OMP_NUM_THREADS": "1"}


def check_places(ranks: list[dict[str, Any]]) -> None:
    """By the hosts that the tasks are on, in the order of their ranks."""
    ranks = sorted(ranks, key=lambda place: int(place["RANK"]))
    on = defaultdict(list)
    for place in ranks:
        on[place["host"]].append(place["RANK"])
    for number, place in enumerate(ranks):
        together = on[place["host"]]
        expected = {
            "RANK": number,
            "LOCAL_RANK": together.index(place["RANK"]),
            "WORLD_SIZE": len(ranks),
            "LOCAL_WORLD_SIZE": len(together),
            "GROUP_RANK": list(on).index(place["host"]),
            "procid": number,
        }
        assert {name: int(place[name]) for name in expected} == expected, ranks
        assert place["MASTER_ADDR"] == ranks[0]["host"], "the store is where rank 0 is"
        assert place.get("met", len(ranks)) == len(ranks)
    assert len({place["MASTER_PORT"] for place in ranks}) == 1


@pytest.mark.parametrize(
    ("command", "tasks"),
    [
        ("salloc -p low -N3 -n5 srun python", [1, 2, 2]),
        pytest.param(  # unit/test_environment.py has recorded variables of such a job
            "srun -p low -N1 -n2 join : -p low -N2 -n2 join", [1, 1, 2], marks=pytest.mark.product
        ),
    ],
    ids=["uneven", "het"],
)
def test_ranks_of_an_uneven_step_and_of_a_het_job_find_their_numbers_and_each_other(
    cluster: Cluster, command: str, tasks: list[int]
) -> None:
    """Slurm decides where the tasks go, as many on a node as ``tasks`` says."""
    ranks = places(cluster, command)
    hosts = [place["host"] for place in ranks]
    assert sorted(hosts.count(host) for host in set(hosts)) == tasks
    check_places(ranks)


def test_steps_smaller_than_their_job_have_their_own_ranks_masters_and_ports(cluster: Cluster, runs: Path) -> None:
    """On the second node alone, on the last two, and on a part of the first one."""
    steps = ("srun -N1 -n1 -w n2 python", "srun -N2 -n2 -r1 python", "srun -N1 -n2 -w n1 python")
    script = runs / "steps.sh"
    script.write_text(f"{'; echo @; '.join(steps)}\n".replace("python", f"{cluster.python} {PLACE}"))
    command = ["salloc", "-p", "low", "-N3", "-n5", "bash", script]
    done = cluster.run(command, cwd=cluster.source, env=environment(cluster), timeout=180)
    found = [[json.loads(line) for line in part.splitlines() if line] for part in done.stdout.split("@")]
    assert [sorted(place["host"] for place in ranks) for ranks in found] == [["n2"], ["n2", "n3"], ["n1", "n1"]]
    for ranks in found:
        check_places(ranks)
    assert len({ranks[0]["MASTER_PORT"] for ranks in found}) == len(steps)
