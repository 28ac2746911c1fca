"""Which address of a node the others are told, and which interface gloo and NCCL use."""

from __future__ import annotations

import os
import socket

import pytest

from clusterddp.errors import LauncherEnvironmentError, SlurmError
from clusterddp.protocol import INTERFACE
from clusterddp.supervisor import addresses
from clusterddp.supervisor.addresses import reached_at
from clusterddp.supervisor.control_server import listen
from clusterddp.worker import interfaces
from clusterddp.worker.rank import named_interface, use_interface
from tests.fake_slurm import FakeSlurm
from tests.wording import raises

JOB = {"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-3]"}


@pytest.fixture(autouse=True)
def _forget_routes() -> None:
    addresses._route.cache_clear()


@pytest.fixture
def own_address() -> str:
    """An address of this host that others could reach."""
    found = [address for name in interfaces.names() if name != "lo" for address in interfaces.addresses_of(name)]
    if not found:
        pytest.skip("this host has only a loopback interface")
    return found[0]


def test_the_address_is_on_the_route_to_another_node(own_address: str, fake_slurm: FakeSlurm) -> None:
    """Of nodes whose address is unknown, or on this host's loopback, the next one counts."""
    fake_slurm |= {
        "scontrol show node -o n2": "NodeName=n2 NodeAddr=127.0.1.1 NodeHostName=n2",
        "scontrol show node -o n3": f"NodeName=n3 NodeAddr={own_address} NodeHostName=n3",
    }
    assert reached_at(JOB) == own_address
    assert reached_at(JOB) == own_address
    assert fake_slurm.count("scontrol") == 2  # once for each node, and not again for the next attempt


def test_without_another_node_or_a_route_srun_has_to_know(fake_slurm: FakeSlurm) -> None:
    """Also while slurmctld does not answer, and no name server knows the nodes."""
    assert reached_at({}) == reached_at({**JOB, "SLURM_JOB_NODELIST": "n1"}) == ""
    assert fake_slurm.asked == []
    fake_slurm["scontrol"] = SlurmError("slurm_load_node error: Unable to contact slurm controller")
    assert reached_at({**JOB, "SLURM_JOB_NODELIST": "n1,nowhere.invalid"}) == ""


def test_the_first_interface_that_a_node_has_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the supervisor's address, gloo and NCCL. What the user has set stays."""
    assert reached_at(JOB, ("ib7", "lo")) == "127.0.0.1"
    monkeypatch.setenv(INTERFACE, "ib7,lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "user")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    use_interface("192.0.2.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "user")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name)
    use_interface("192.0.2.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_a_node_without_the_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interfaces that it has."""
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    monkeypatch.setattr(interfaces, "names", lambda: ["lo", "eth0"])
    with raises(LauncherEnvironmentError):
        reached_at(JOB, ("ib0", "ib1"))
    monkeypatch.setenv(INTERFACE, "ib0")
    with raises(LauncherEnvironmentError):
        named_interface()
    monkeypatch.setattr(interfaces, "names", lambda: ["lo", "ib0"])
    with raises(LauncherEnvironmentError):
        named_interface()


def test_without_the_key_gloo_uses_the_interface_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 or IPv6. NCCL chooses its own."""
    for address in ("127.0.0.1", *(["::1"] if "::1" in interfaces.addresses_of("lo") else [])):
        for name in (INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.delenv(name, raising=False)
        use_interface(address)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_over_ipv4_and_ipv6_reach_the_supervisor(host: str) -> None:
    """At the same port. On a network without IPv4 there is only the one."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with listen() as listener, socket.create_connection((host, listener.getsockname()[1]), 5):
        connection, address = listener.accept()
        connection.close()
    assert str(address[0]).removeprefix("::ffff:") == host
