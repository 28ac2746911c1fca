"""The client of a supervisor: one TCP connection, JSON lines, standard library only.

``python -m clusterddp.runs.client RUN ATTEMPT KIND VALUES`` sends a request from the supervisor's own node, for
a login node that cannot reach it, and prints the answers.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from clusterddp.entry import exit_with
from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.claims import Address, read_address
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.control_channel import keep_alive, send_line

#: Seconds for a connection to be accepted. Behind a firewall there is no answer.
CONNECT_S = 3.0


def ask(address: Address, host: str, kind: str, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Sends a request to the supervisor at ``host``, and yields its answers as they come.

    Ends after the last one, or when the supervisor has exited. OSError if the connection cannot be opened or breaks.
    """
    with socket.create_connection((host, address.port), timeout=CONNECT_S) as connection:
        keep_alive(connection)
        connection.settimeout(None)
        send_line(connection, {"token": address.token, "request": kind, "values": values})
        with connection.makefile("rb") as lines:
            for line in lines:
                if isinstance(answer := json.loads(line), dict):
                    yield answer


def relay(run_directory: str, attempt: int, kind: str, values: str) -> int:
    """Prints the answers to a request, from the supervisor's own node."""
    address = read_address(RunDirectory(run_directory), attempt)
    if address is None:
        raise RunDirectoryError(f"attempt {attempt} of {run_directory} has no supervisor that accepts requests")
    try:
        for answer in ask(address, "127.0.0.1", kind, json.loads(values)):
            print(json.dumps(answer), flush=True)
    except OSError as error:
        raise RunDirectoryError(f"no answer at port {address.port} of this node: {error.strerror or error}") from error
    return 0


if __name__ == "__main__":
    exit_with(lambda: relay(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
