"""The address of a job's first node at which its other nodes reach it.

srun tells its tasks an address, SLURM_LAUNCH_NODE_IPADDR: what the node's own name resolves to, or where the task's
connection came from. If the name resolves to 127.0.1.1, which is the default of Debian and cloud-init, the tasks on the
first node get 127.0.0.1, and with rank 0 there all ranks would get it as MASTER_ADDR (seen on 22.05.8).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache

from clusterddp.errors import SlurmError
from clusterddp.hostlist import expand
from clusterddp.slurm import commands as slurm
from clusterddp.worker.interfaces import chosen

#: How many nodes of a large job are tried.
_MOST = 3


def reached_at(environ: Mapping[str, str], interfaces: Sequence[str] = ()) -> str:
    """The address on the first of the ``interfaces`` that this node has, or without any, on the route to another node
    of the job.

    Empty if that is unknown, or the job has one node: what srun tells its tasks then has to do. Raises
    InterfaceMissing for ``interfaces`` that the node lacks.
    """
    if interfaces:
        return chosen(interfaces)[1]
    own = environ.get("SLURMD_NODENAME")
    others = [node for node in expand(environ.get("SLURM_JOB_NODELIST", "")) if node != own]
    return _route(tuple(others[:_MOST]))


@cache
def _route(nodes: tuple[str, ...]) -> str:
    """This node's address on the route to one of the nodes. No packet is sent."""
    for node in nodes:
        for target in _names_of(node):
            with suppress(OSError):
                for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
                    with suppress(OSError), socket.socket(family, kind) as probe:
                        probe.connect(address)
                        own = str(probe.getsockname()[0])
                        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                            return own
    return ""


def _names_of(node: str) -> Iterator[str]:
    """The address that slurmctld has for a node, and its name."""
    with suppress(SlurmError):
        yield slurm.node_address(node)
    yield node
