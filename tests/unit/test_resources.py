"""What a job requests of a cluster, what is refused, and what is only a remark."""

from __future__ import annotations

import pytest

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job
from clusterddp.slurm.commands import Cluster, NodeShape, parse_nodes
from clusterddp.slurm.configuration import policy, preemption
from clusterddp.slurm.resources import check_request, fit_to_cluster, share_of_node
from tests.fake_slurm import SMALL_CLUSTER, FakeSlurm
from tests.wording import raises

#: Two nodes with GPUs, one without, and two that differ from all of them.
NODES = [NodeShape(32, 64000, {"a100": 4}), NodeShape(32, 64000, {"a100": 4}), NodeShape(8, 8000, {})]
OLD = [NodeShape(20, 32000, {"v100": 4}, features=frozenset({"old", "ib"}))] * 2
CLUSTER = Cluster(
    {f"n{number}": node for number, node in enumerate(NODES + OLD)},
    {"gpu": ("n0", "n1", "n2"), "old": ("n3", "n4"), "all": ("n0", "n1", "n2", "n3", "n4")},
    "gpu",
)


def job(**values: object) -> Job:
    named = {"name": "x", "script": "train.py", "gpus_per_node": 4}
    return Job(**{**named, **values})  # type: ignore[arg-type]


def test_of_a_range_the_fewest_nodes_must_be_there() -> None:
    """Slurm adds what it has of the rest. What no node could give is refused."""
    assert check_request(job(nodes=9, min_nodes=3, device="cpu"), CLUSTER, "gpu", certain=True) == []
    assert check_request(job(nodes=9, min_nodes=2), CLUSTER, "gpu", certain=True) == []
    with raises(UsageError):
        check_request(job(nodes=9, min_nodes=4, device="cpu"), CLUSTER, "gpu", certain=True)
    wrong: list[dict[str, object]] = [
        {"nodes": 9, "min_nodes": 3}, {"gpus_per_node": 5}, {"constraint": "ib"}, {"gpu_type": "h100"}
    ]  # fmt: skip
    for values in wrong:
        with pytest.raises(UsageError):
            check_request(job(**values), CLUSTER, "gpu", certain=True)
    fitted, _ = share_of_node(job(nodes=9, min_nodes=2), NODES)
    assert (fitted.cpus_per_task, fitted.mem, fitted.nodes_text) == (8, "64000M", "2-9")


@pytest.mark.parametrize("partition", ["nowhere", "gpu,nowhere"])
def test_an_unknown_partition_is_refused_with_those_that_there_are(partition: str) -> None:
    """Also if it is one of several."""
    with raises(UsageError):
        check_request(job(), CLUSTER, partition, certain=True)


def test_a_doubt_is_a_remark_where_plugins_change_jobs() -> None:
    """They may replace the partition, and what the job requests of it."""
    doubtful: list[dict[str, object]] = [{"nodes": 9}, {"gpus_per_node": 8}, {"constraint": "h100"}]
    for values in doubtful:
        assert len(check_request(job(**values), CLUSTER, "gpu", certain=False)) == 1
    assert len(check_request(job(), CLUSTER, "nowhere", certain=False)) == 1


def test_without_a_partition_all_nodes_count() -> None:
    """If only the default partition has too few, sbatch may still take the job, and a remark names the others."""
    assert check_request(job(nodes=2), CLUSTER, None, certain=True) == []
    (remark,) = check_request(job(nodes=2, gpu_type="v100"), CLUSTER, None, certain=True)
    assert remark.endswith("old, all")
    assert check_request(job(nodes=2, gpu_type="v100"), CLUSTER, None, certain=False) == []
    with raises(UsageError):
        check_request(job(nodes=5), CLUSTER, None, certain=True)


def test_gpus_that_slurm_does_not_know_are_not_requested_by_accident() -> None:
    """sbatch would refuse any option for them. The error names the key."""
    bare = Cluster({"n": NODES[2]}, {"all": ("n",)}, "all")
    with raises(UsageError):
        check_request(job(), bare, None, certain=True)
    assert check_request(job(gpu_request="none"), bare, None, certain=True) == []


@pytest.mark.parametrize(
    ("constraint", "may"),
    [
        (None, True), ("ib", True), ("ib&old", True), ("ib,old", True), ("ib&new", False), ("new|ib", True),
        ("new|h100", False), ("[new|old]", True), ("old*2&new*1", True), ("(new|old)&ib", True),
    ],
)  # fmt: skip
def test_the_features_of_a_node_are_compared_with_the_constraint(constraint: str | None, may: bool) -> None:
    """With alternatives and counts, a node that has one of them may be a node of the job."""
    assert OLD[0].may_satisfy(constraint) is may


def share(*nodes: NodeShape, alike: bool = False, **values: object) -> tuple[int | None, str | None, int]:
    """CPUs and memory that are requested, and the number of remarks."""
    fitted, remarks = share_of_node(job(**values), nodes, alike)
    return fitted.cpus_per_task, fitted.mem, len(remarks)


def test_nodes_in_any_partition_give_the_size_only_if_they_agree() -> None:
    """In a given partition, the smallest node does."""
    assert share(*NODES[:2], alike=True) == (8, "64000M", 1)
    assert share(NODES[0], OLD[0], alike=True) == (None, None, 1)
    assert share(NODES[0], OLD[0]) == (5, "32000M", 1)
    large = NodeShape(32, 128000, {"a100": 4})
    assert share(NODES[0], large, alike=True) == (8, None, 2)
    assert share() == (None, None, 1)


def test_memory_that_slurm_does_not_know_is_not_requested() -> None:
    """RealMemory is 1 where the site sets none. Nor is any for ``mem: none``."""
    shown = "NodeName=n CPUTot=8 RealMemory=1 ThreadsPerCore=2 Sockets=1 CoresPerSocket=4 \n"
    assert parse_nodes(shown)["n"].memory_mib is None
    assert share(NodeShape(32, None, {"a100": 4})) == (8, None, 2)
    assert share(NODES[0], mem="none") == (8, "none", 1)


def test_where_slurm_knows_no_gpus_a_job_takes_those_of_the_node() -> None:
    """Such a site gives jobs whole nodes."""
    assert share(NODES[2], gpu_request="none") == (2, "8000M", 1)


@pytest.mark.parametrize(
    ("options", "variables", "cpus"),
    [
        ({}, {}, 16),
        ({"hint": "nomultithread"}, {}, 8),
        ({"threads-per-core": "1"}, {}, 8),
        ({"threads-per-core": "2"}, {}, 16),
        ({}, {"SBATCH_HINT": "nomultithread"}, 8),
    ],
)
def test_with_one_thread_per_core_the_cpus_are_cores(
    options: dict[str, str], variables: dict[str, str], cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else sbatch would refuse the job: all CPUs of the node would be twice its cores."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert share(NodeShape(128, 64000, {"": 8}, threads=2), gpus_per_node=8, sbatch=options)[0] == cpus


def test_cores_may_count_as_cpus_on_nodes_with_several_threads() -> None:
    """As with CPUs=64 in slurm.conf: the hint then changes nothing."""
    shown = "NodeName=n CPUTot=64 RealMemory=9000 ThreadsPerCore=2 Sockets=2 CoresPerSocket=32 CoreSpecCount=8 \n"
    node = parse_nodes(shown)["n"]
    assert (node.cpus, node.threads) == (56, 1)


def test_a_rank_with_several_gpus_gets_the_cpus_that_go_with_all_of_them() -> None:
    """The node's share is the same, in half as many tasks."""
    fitted, _ = share_of_node(job(gpus_per_rank=2), NODES)
    assert (fitted.cpus_per_task, fitted.mem) == (16, "64000M")


def test_the_remark_names_only_what_the_user_has_not_requested() -> None:
    assert share_of_node(job(gpus_per_node=1), [NodeShape(1, 8000, {"": 1})])[1] == [
        "requesting 1 CPU per rank and 8000M of memory per node, in proportion to the GPUs"
    ]
    remark = ["requesting 8 CPUs per rank, in proportion to the GPUs"]
    assert share_of_node(job(sbatch={"mem-per-cpu": "2G"}), NODES)[1] == remark
    assert share_of_node(job(cpus_per_task=2, mem="9G"), NODES)[1] == []


def test_what_is_reserved_on_a_node_is_not_for_jobs() -> None:
    """Releases before 22.05 print no CPUEfctv; CoreSpecCount counts cores."""
    size = "RealMemory=9000 CoreSpecCount=1 MemSpecLimit=1000 ThreadsPerCore=2"
    old, new = f"NodeName=old CPUTot=8 {size} Reason=a CPUTot=1\nb\n", f"NodeName=new-1 CPUEfctv=6 CPUTot=8 {size}\n"
    nodes = parse_nodes(old + new)
    assert {name: (node.cpus, node.memory_mib) for name, node in nodes.items()} == {
        "old": (6, 8000),
        "new-1": (6, 8000),
    }


@pytest.mark.parametrize("allowed", [True, False])
def test_an_expedited_requeue_is_requested_only_where_the_site_allows_it(fake_slurm: FakeSlurm, allowed: bool) -> None:
    """sbatch refuses it elsewhere."""
    fake_slurm |= SMALL_CLUSTER
    if allowed:
        fake_slurm["scontrol show config"] += "SlurmctldParameters     = enable_expedited_requeue\n"
    fitted, remarks = fit_to_cluster(job(device="cpu", expedite_requeue=True), required=True)
    assert fitted.expedite_requeue is allowed
    assert any("this cluster does not allow it" in remark for remark in remarks) is not allowed
    assert ("held for 121 s" in remarks[-1]) is not allowed


# --- Preemption in one of several partitions, or by a QOS that is not known

CONFIG = "KillWait = 30 sec\nPreemptType = preempt/{}\nPreemptMode = REQUEUE\n"


def test_of_several_partitions_the_shortest_notice_counts(fake_slurm: FakeSlurm) -> None:
    """A run cannot know which one it gets."""
    rows = {"a": "REQUEUE GraceTime=120", "b": "REQUEUE GraceTime=60", "c": "OFF GraceTime=0"}
    lines = "\n".join(f"PartitionName={name} PreemptMode={row}" for name, row in rows.items())
    fake_slurm |= {"scontrol show config": CONFIG.format("partition_prio"), "scontrol show partition": lines}
    found = preemption("a,b,c", None)
    assert (found.partition, found.grace_s, found.mode) == ("a or b", 60, "REQUEUE")
    for names in ("internal", "internal,hidden"):  # for which a plugin may have another name
        unknown = preemption(names, None)
        assert (unknown.known, unknown.mode, unknown.notice_s) == (False, "REQUEUE", 30)
    fake_slurm["sinfo"] = "a\nb\nc\n"
    assert preemption(None, None) == found  # no partition is default


def test_the_grace_period_of_an_unknown_qos_is_unknown(fake_slurm: FakeSlurm) -> None:
    """Sites replace a QOS by another. The shortest notice is assumed, and the plan says that it is unknown."""
    fake_slurm["sacctmgr"] = "\n"
    found = policy(CONFIG.format("qos"), "", "", "regular")
    assert (found.known, found.grace_s, found.notice_s, found.mode) == (False, 0, 30, "REQUEUE")
    assert "unknown" in found.sentence(job())
