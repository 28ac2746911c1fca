"""Whether the slurmd of a node answers, at once and without slurmctld, which notices that only after SlurmdTimeout."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from clusterddp.errors import SlurmUnavailable
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.configuration import fields

#: How long a connection may take, in seconds: the kernel sends its request three times.
CONNECT_S = 5.0
#: Errors of a connection to a node whose slurmd, or system, does not run. Others may be this node's, or temporary.
_DOWN = (errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN)


def unanswering(nodes: Sequence[str]) -> list[str]:
    """Those of the nodes whose slurmd does not answer. Asks all at once. Raises SlurmError.

    srun connects to slurmd in the same way to start a step. slurmd logs that it got no message.
    """
    known, down = addresses(nodes), set[str]()

    def ask(node: str) -> None:
        if _is_down(known[node]):
            down.add(node)

    asking = [threading.Thread(target=ask, args=(node,), daemon=True) for node in known]
    deadline = time.monotonic() + 2 * CONNECT_S  # a name server may not answer
    for thread in asking:
        try:
            thread.start()
        except RuntimeError as error:  # too many processes at the moment
            raise SlurmUnavailable(f"could not ask slurmd: {error}") from error
    for thread in asking:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [node for node in nodes if node in down]


def addresses(nodes: Sequence[str]) -> Mapping[str, tuple[str, int]]:
    """Address and port of the slurmd of each node. Without those that are unknown."""
    text = slurm.run("scontrol", "show", "node", "-o", ",".join(nodes))
    # Slurm shows a node's port only if it is not SlurmdPort, which all nodes have unless several share a host.
    line = r"^NodeName=(\S+) .*? NodeAddr=(\S+) NodeHostName=\S+ (?:BcastAddr=\S+ )?(?:Port=(\d+) )?"
    found = re.findall(line, text, re.MULTILINE)
    usual = ""
    if not all(port for *_, port in found):
        usual = fields(slurm.run("scontrol", "show", "config")).get("SlurmdPort", "")
    ports = {node: (address, port or usual) for node, address, port in found}
    return {node: (address, int(port)) for node, (address, port) in ports.items() if port.isdecimal()}


def _is_down(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, CONNECT_S).close()
    except TimeoutError:
        return True
    except OSError as error:  # also if the name is unknown
        return error.errno in _DOWN
    return False
