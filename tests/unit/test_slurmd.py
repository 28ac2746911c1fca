"""Which nodes do not answer: the address of slurmd, and what a connection to it says."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import slurmd
from clusterddp.supervisor.controller import SlurmController
from tests.fake_slurm import FakeSlurm

#: As 22.05 shows them; n2 and n3 share a host, where each slurmd has a port.
NODE = (
    "NodeName={} Arch=x86_64 Gres=gpu:2 NodeAddr={} NodeHostName=host {}Version=22.05.8 OS=Linux Reason=Port=1 [root]"
)


@pytest.fixture
def nodes(fake_slurm: FakeSlurm) -> dict[str, str]:
    """What Slurm knows: lines by node, and its configuration."""
    known = {"config": "Configuration data as of 2026-11-27T02:00:00\nSlurmdPort              = 6818\n"}

    fake_slurm["scontrol show config"] = lambda *_: known["config"]
    fake_slurm["scontrol show node -o"] = lambda *words: "".join(f"{known[node]}\n" for node in words[4].split(","))
    return known


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of a slurmd that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_node_has_the_port_that_all_have_unless_slurm_shows_its_own(nodes: dict[str, str]) -> None:
    nodes |= {"n1": NODE.format("n1", "10.0.0.1", ""), "n2": NODE.format("n2", "10.0.0.2", "Port=17002 ")}
    nodes["n3"] = NODE.format("n3", "fd00::3", "BcastAddr=fd00::4 Port=17003 ")
    known = {"n1": ("10.0.0.1", 6818), "n2": ("10.0.0.2", 17002), "n3": ("fd00::3", 17003)}
    assert slurmd.addresses(["n1", "n2", "n3"]) == known


def test_a_port_is_unknown_if_slurm_shows_a_range(nodes: dict[str, str]) -> None:
    nodes |= {"config": "SlurmdPort = 6818-6820\n", "n1": NODE.format("n1", "127.0.0.1", "")}
    assert slurmd.addresses(["n1"]) == {}
    assert slurmd.unanswering(["n1"]) == []


def test_only_a_node_whose_slurmd_refuses_the_connection_does_not_answer(nodes: dict[str, str], listening: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = closed.getsockname()[1]
    for node, port in {"n1": listening, "n2": refusing}.items():
        nodes[node] = NODE.format(node, "127.0.0.1", f"Port={port} ")
    assert slurmd.unanswering(["n1", "n2"]) == ["n2"]


@pytest.mark.parametrize(
    ("error", "down"),
    [
        (TimeoutError("timed out"), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), False),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_node_that_cannot_be_looked_up_or_asked_from_here_may_answer(
    nodes: dict[str, str], monkeypatch: pytest.MonkeyPatch, error: OSError, down: bool
) -> None:
    """A node without power gives no answer to this host's search for its network address."""

    def fail(*_: object) -> socket.socket:
        raise error

    nodes["n1"] = NODE.format("n1", "n1.cluster", "")
    monkeypatch.setattr(slurmd.socket, "create_connection", fail)
    assert slurmd.unanswering(["n1"]) == (["n1"] if down else [])


def test_a_supervisor_does_not_ask_its_own_node(nodes: dict[str, str], run: RunDirectory) -> None:
    """Not even Slurm, if there is no other."""
    environ = {"SLURM_JOB_ID": "41", "SLURMD_NODENAME": "n1"}
    controller = SlurmController(environ, run, Job(name="x", module="x"))
    assert controller.unanswering(["n1"]) == ()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nodes["n2"] = NODE.format("n2", "127.0.0.1", f"Port={closed.getsockname()[1]} ")
    assert controller.unanswering(["n1", "n2"]) == ["n2"]
