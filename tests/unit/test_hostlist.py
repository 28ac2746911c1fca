"""Slurm's compressed notations read as scontrol reads them, and malformed ones are refused."""

import os
import shutil
import subprocess

import pytest

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.hostlist import expand, tasks_per_node
from tests.wording import raises

ACCEPTED_BY_SCONTROL = {
    "n7": ["n7"],
    "a1,b2,c[3-4]": ["a1", "b2", "c3", "c4"],
    "rack[1-2]node[01-02]": ["rack1node01", "rack1node02", "rack2node01", "rack2node02"],
    "x[1,3-4]y[2]": ["x1y2", "x3y2", "x4y2"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[09-11]": ["n09", "n10", "n11"],
    "n[099-101]": ["n099", "n100", "n101"],
    "n[1-010]": [f"n{number}" for number in range(1, 11)],
    "b[2,1]": ["b2", "b1"],
    "a1,a1": ["a1", "a1"],
    "n[1-2]-[3-4]": ["n1-3", "n1-4", "n2-3", "n2-4"],
    "a[1-2][3-4]": ["a13", "a14", "a23", "a24"],
    "[1-3]": ["1", "2", "3"],
    "a[1-2]b[3-4],c[5-6]d[7-8]": ["a1b3", "a1b4", "a2b3", "a2b4", "c5d7", "c5d8", "c6d7", "c6d8"],
    "a[1-2]b[1-2]c[1-2]": ["a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2"],
}

WITH_A_SUFFIX = {
    "cn[1-2]-ib0": ["cn1-ib0", "cn2-ib0"],
    "gpu-a-[001-002].cluster.local": ["gpu-a-001.cluster.local", "gpu-a-002.cluster.local"],
    "n[1-2]x,m": ["n1x", "n2x", "m"],
}


@pytest.mark.parametrize(("hostlist", "hosts"), [*ACCEPTED_BY_SCONTROL.items(), *WITH_A_SUFFIX.items(), ("", [])])
def test_a_host_list_expands_in_slurms_order(hostlist: str, hosts: list[str]) -> None:
    """Padding, several brackets and text after the last one come out as names in order."""
    assert expand(hostlist) == hosts


@pytest.mark.parametrize(
    "hostlist",
    [
        *("n[1", "n1]", "n[[1-2]]", "n[3-1]", "n[a-b]", "n[]", "n[1,,2]", "n[1-]", "n[-1]", "n[1-2-3]", "n[ 1-2]"),
        *("n[1-70000]", "a,,b", "a,", ",a", ",", "a b", "a;b", "a,b[1,c", "n[1-2],m]", "n[\u0661]", "a\n"),
    ],
)
def test_a_malformed_host_list_is_an_error_that_quotes_it(hostlist: str) -> None:
    """A malformed list is never read as a host name."""
    with pytest.raises(LauncherEnvironmentError) as caught:
        expand(hostlist)
    assert repr(hostlist) in str(caught.value)


@pytest.mark.skipif(not shutil.which("scontrol"), reason="no Slurm commands here")
@pytest.mark.parametrize("hostlist", [*ACCEPTED_BY_SCONTROL, "a[1-2]b[1-3]c[1-2]d[01-02]", "p[1-2]q[3]r[4-6,8]"])
def test_expansion_agrees_with_scontrol(hostlist: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """``scontrol show hostnames`` needs a configuration to read, but no controller."""
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n")
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", hostlist],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert expand(hostlist) == shown.stdout.split()


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("3,1(x2)", [3, 1, 1]), ("10(x1)", [10])]
)
def test_tasks_per_node_are_run_length_decoded(text: str, counts: list[int]) -> None:
    """One number per node."""
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "2,,1", "-1", "a", "2(x3),"])
def test_malformed_tasks_per_node_are_an_error_that_quotes_them(text: str) -> None:
    """A count that cannot be read is not guessed."""
    with pytest.raises(LauncherEnvironmentError) as caught:
        tasks_per_node(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["n[1-65536][1-65536]", "n[1-65536,1-65536]", "n[1-65536],m[1-2]", f"n[{'9' * 5000}]", f"n[1-{'9' * 19}]"]
)
def test_a_host_list_of_more_than_any_cluster_has_is_refused_at_once(text: str) -> None:
    """Four billion names would take all memory."""
    with raises(LauncherEnvironmentError):
        expand(text)


@pytest.mark.parametrize("text", ["2(x999999999)", f"{'9' * 5000}", f"1(x{'9' * 5000})"])
def test_tasks_on_more_nodes_than_any_cluster_has_are_refused_at_once(text: str) -> None:
    """A list of a billion numbers, or a number that Python does not read."""
    with raises(LauncherEnvironmentError):
        tasks_per_node(text)
