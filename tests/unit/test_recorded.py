"""What several releases of Slurm really print about jobs of every kind: see ``tests/record.py``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

import pytest

from clusterddp.slurm import commands as slurm
from clusterddp.slurm import configuration
from clusterddp.slurm.commands import JobInfo, NodeShape
from clusterddp.slurm.configuration import largest_array, preemption, qos_preemption
from clusterddp.slurm.queue import is_hold, queued_jobs, why_waiting
from tests import record
from tests.transcript import Transcript

RELEASES = ("22.05", "24.11", "26.05")
OVER = {"PREEMPTED", "NODE_FAIL", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
#: A job in one of them has nodes.
WITH_NODES = {"RUNNING", "COMPLETING", "SUSPENDED"}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release of Slurm."""
    return str(request.param)


@pytest.fixture
def ids(release: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The job ids by name; Slurm's commands answer as on the release."""
    folder = record.RECORDED / release
    monkeypatch.setattr(subprocess, "run", Transcript.read(folder).replay)
    monkeypatch.setattr(slurm, "require", lambda *_: None)
    return record.parts(json.loads((folder / "jobs.json").read_text()))


@pytest.fixture
def jobs(ids: dict[str, str]) -> Mapping[str, JobInfo]:
    """What is read of each job, by its name."""
    found = {name: slurm.show_job(job_id) for name, job_id in ids.items()}
    return {name: job for name, job in found.items() if job is not None}


def test_state_and_reason_of_each_job_are_read(jobs: Mapping[str, JobInfo]) -> None:
    """Whatever its name, comment, script and arguments imitate."""
    wanted = record.expected()
    assert {name: job.state for name, job in jobs.items()} == {name: state for name, (state, _) in wanted.items()}
    with_reason = {name: reason for name, (_, reason) in wanted.items() if reason}
    assert {name: jobs[name].reason for name in with_reason} == with_reason
    assert {name for name, job in jobs.items() if not job.live} == {
        name for name, (state, _) in wanted.items() if state in OVER
    }


def test_a_jobs_id_is_that_of_the_task_alone(ids: dict[str, str], jobs: Mapping[str, JobInfo]) -> None:
    """With the id of its array, all tasks would be requeued or cancelled. Components of a het job are jobs, too."""
    single = {name: job_id for name, job_id in ids.items() if "+" not in job_id}
    assert {name: jobs[name].job_id for name in single} == single
    assert all(jobs[name].job_id.isdecimal() for name in ids.keys() - single.keys())


def test_restarts_and_preemptions_are_read(jobs: Mapping[str, JobInfo]) -> None:
    """They tell a preemption from a scancel, and a requeue's hold from a time that the user chose."""
    assert {name for name, job in jobs.items() if job.restarts} == {"requeued", "requeue hold"}
    assert {name for name, job in jobs.items() if job.preempt_time is not None} == {"preempted", "in grace"}
    assert {name for name, job in jobs.items() if job.ran_out} == {"timed out"}


def test_nodes_are_read_of_jobs_that_have_some(jobs: Mapping[str, JobInfo]) -> None:
    """Not the node that one waits for."""
    assert {name for name, job in jobs.items() if job.live and job.nodes} == {
        name for name, (state, _) in record.expected().items() if state in WITH_NODES
    }
    assert jobs["in grace"].nodes == "n2"


def test_a_job_that_slurm_never_had_or_has_forgotten_is_none(ids: dict[str, str]) -> None:
    """Its commands fail then."""
    assert ids
    assert slurm.show_job(record.FORGOTTEN) is None


def test_the_queue_has_each_job_with_its_state_and_reason(ids: dict[str, str]) -> None:
    """One call of squeue for all of them; what is not there is left out, and no name of the user's matters."""
    jobs = queued_jobs([*ids.values(), record.FORGOTTEN])
    assert jobs.keys() == set(ids.values())
    wanted = record.expected()
    assert {name: jobs[job_id].state for name, job_id in ids.items()} == {name: wanted[name][0] for name in ids}
    with_reason = {name: reason for name, (_, reason) in wanted.items() if reason}
    assert {name: jobs[ids[name]].reason for name in with_reason} == with_reason
    assert {name for name, job_id in ids.items() if jobs[job_id].live and jobs[job_id].nodes} == {
        name for name in ids if wanted[name][0] in WITH_NODES
    }
    assert all((jobs[ids[name]].start is not None) for name in ids if wanted[name][0] in WITH_NODES)
    assert queued_jobs([record.FORGOTTEN]) == {}


def test_each_reason_to_wait_is_explained(ids: dict[str, str]) -> None:
    """In other words than Slurm's."""
    jobs = queued_jobs([*ids.values(), record.FORGOTTEN])
    waiting = {name: jobs[job_id] for name, job_id in ids.items() if jobs[job_id].state in ("PENDING", "REQUEUE_HOLD")}
    assert [job.reason for job in waiting.values() if why_waiting(job, False).words == job.reason] == []


@pytest.mark.usefixtures("ids")
def test_partitions_and_usable_nodes_are_read() -> None:
    """One of the five nodes is drained and one is down."""
    assert slurm.default_partition() == "low"
    for partition in (None, "low", "off"):
        # Of 8 CPUs and 1,000,000 MiB, what CoreSpecCount and MemSpecLimit leave.
        assert slurm.read_cluster().of(partition) == [NodeShape(7, 999_000, {"": 2})] * 5
        assert slurm.usable_nodes(partition) == ["n1", "n2", "n3"]


def test_a_hold_is_told_from_a_place_in_the_queue(ids: dict[str, str]) -> None:
    """Its owner's, an administrator's or that of requeuehold; after a requeue also the begin time that Slurm sets."""
    jobs = queued_jobs([*ids.values(), record.FORGOTTEN])
    held = {name for name, (_, reason) in record.expected().items() if reason.startswith("JobHeld")} | {"requeue hold"}
    waiting = {name for name in ids if jobs[ids[name]].state in ("PENDING", "REQUEUE_HOLD")}
    assert {name for name in waiting if is_hold(jobs[ids[name]], False)} == held
    assert is_hold(jobs[ids["requeued"]], True)


def test_a_script_leads_to_its_job(ids: dict[str, str]) -> None:
    """Also one whose path has spaces, and imitates fields; the others came on standard input."""
    script = f"/shared/{record.ODD_FOLDER}/job.sbatch"
    with_arguments = " ".join([script, *record.ODD_ARGUMENTS])  # as 22.05 prints it
    found = slurm.jobs_by_script()
    assert found.get(script, found.get(with_arguments)) == ids["script"]
    assert found.keys() <= {script, with_arguments, "(null)"}
    assert largest_array() == 1001


@pytest.mark.usefixtures("ids")
def test_the_cluster_is_described(release: str) -> None:
    """Its release, partitions and accounts."""
    config = configuration.read_configuration()
    assert config.release.startswith(release) and config.tested and config.accounting and config.enforced
    assert config.time is not None and config.controllers == "login"
    partitions = {one.name: one for one in configuration.read_partitions()}
    assert {name: (one.default, one.state, one.nodes, one.gpus) for name, one in partitions.items()} == {
        "low": (True, "UP", 5, 10),
        "high": (False, "UP", 5, 10),
        "cancel": (False, "DOWN", 5, 10),
        "off": (False, "UP", 5, 10),
    }
    assert partitions["low"].most_time == "UNLIMITED" and partitions["low"].default_time == "00:30:00"
    (association,) = configuration.read_associations("ddp")
    assert (association.account, association.partition, set(association.qos)) == ("ddp", "", {"limited", "normal"})
    assert configuration.read_default_account("ddp") == "ddp"
    assert slurm.node_address("n1").count(".") == 3


@pytest.mark.usefixtures("ids")
def test_what_a_preemption_does_is_read() -> None:
    """Of partitions and of a QOS."""
    found = {name: preemption(name, None) for name in ("low", "high", "cancel", "off")}
    assert {name: (policy.mode, policy.grace_s) for name, policy in found.items()} == {
        "low": ("REQUEUE", 600),
        "high": ("REQUEUE", 0),
        "cancel": ("CANCEL", 0),
        "off": ("OFF", 0),
    }
    assert (found["low"].kill_wait_s, found["low"].hold_s) == (600, 601)
    assert preemption(None, None) == found["low"]
    assert qos_preemption("limited", "CANCEL") == ("REQUEUE", 90)
    assert qos_preemption("normal", "CANCEL") == ("CANCEL", 0)
