"""A sharded model whose node dies continues on the spare node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.slurm.test_sharded import check_same, submit
from tests.slurm.test_spares import CLUSTER, die
from tests.trainings import events_of
from tests.waiting import wait_for_step

__all__ = ["CLUSTER"]


@pytest.mark.product
def test_a_sharded_run_whose_node_dies_continues_on_the_spare_one(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    training = submit(cluster, runs, "--pause", 0.2, options="--nodes 2 --spare-nodes 1")
    wait_for_step(training.run, 7)
    die(cluster, "n2")
    training.wait(lambda: 1 in training.run.attempts(), "attempt 1", 60)
    check_same(training, tmp_path, attempts=2)
    assert [event["nodes"] for event in events_of(training.run, "started")] == ["n1,n2", "n1,n3"]
