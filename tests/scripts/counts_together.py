"""Ranks count together over rank 0's port, without torch: ``counts_together.py FILE STEPS STOP``.

It does not use clusterddp. FILE has the next step. In the first attempt, all ranks wait before step STOP until a signal
ends them. Each rank prints its host, the address of rank 0, and what ``GREETING`` says.
"""

import os
import socket
import sys
import time
from pathlib import Path

file, steps, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print(socket.gethostname(), store[0], os.environ.get("GREETING"), flush=True)


def connected():
    """To rank 0, which may start later."""
    while True:
        try:
            return socket.create_connection(store, timeout=20)
        except ConnectionRefusedError:
            time.sleep(0.1)


first = int(file.read_text()) if file.exists() else 0
if rank == 0:
    server = socket.create_server(("", store[1]))
    peers = [server.accept()[0] for _ in range(world_size - 1)]
else:
    peers = [connected()]
for step in range(first, steps):
    if step == stop and int(os.environ["CLUSTERDDP_ATTEMPT"]) == 0:
        time.sleep(600)
    for peer in peers:
        peer.sendall(bytes([step]))
    assert [peer.recv(1) for peer in peers] == [bytes([step])] * len(peers)
    if rank == 0:
        file.write_text(str(step + 1))
