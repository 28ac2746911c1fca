"""A rank of ``doctor --nodes``: ``python -m clusterddp.checks.probe FOLDER``, started by srun.

It checks its device and its node alone, and then, with the others, what needs several nodes. It reports each check
at once to the batch step (``checks/batch_step.py``), over one TCP connection with a JSON object per line:

- it sends the job's token with its rank, host and a reserved port. Then checks. Then whether it can take part;
- it gets its place among those that can (``Place``). It sends more checks, and that it is done;
- it exits when the connection is closed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import environment, protocol
from clusterddp.checks import node as clock
from clusterddp.checks.node import FAILED, Check, failed, guarded, ok, warning
from clusterddp.reporter import counted
from clusterddp.worker.control_channel import keep_alive, send_line
from clusterddp.worker.interfaces import interface_of
from clusterddp.worker.rank import named_interface, reserve_port, use_interface

if TYPE_CHECKING:
    import torch

    from clusterddp.environment import RankEnvironment

#: The job definition and the results, in the job's folder.
JOB_FILE, RESULTS_FILE = "doctor.yaml", "results.json"
#: Timeouts in seconds for the checks of single nodes (with Python and torch on a slow disk) and of several.
START_S, TOGETHER_S = 120.0, 90.0
CONNECT_S, VISIBLE_S, GROUP_S = 60.0, 40.0, 60.0
NETWORK = "check the network between the nodes, and choose the interface that the ranks use with --set interface=NAME"
_LOOPBACK = (
    "other nodes cannot reach this address, to which the node probably resolves its own name. Choose an interface with "
    "--set interface=NAME, or ask the administrator to remove the name from the line with 127.0.1.1 in /etc/hosts"
)
_NO_GPU = (
    "CUDA_VISIBLE_DEVICES is {}. If that is right, check that torch is built with CUDA or ROCm, and that nvidia-smi or "
    "rocm-smi works on the node"
)
FOLDER = "set CLUSTERDDP_RUNS, or --run-dir of submit, to a folder that this node can write to"


@dataclass(frozen=True)
class Place:
    """A rank's place among those that take part, where rank 0's store and the clock are, and which nodes take part."""

    rank: int
    world_size: int
    store_host: str
    store_port: int
    clock_port: int
    nodes: Sequence[str]


def main() -> None:
    """Checks, reports, waits for the others, exits."""
    where, ranks = Path(sys.argv[1]), environment.read(os.environ)
    named_interface()  # the last line of its error explains why this rank does not answer
    host, _, port = os.environ[protocol.SUPERVISOR].rpartition(":")
    host, token = host or os.environ["SLURM_LAUNCH_NODE_IPADDR"], os.environ[protocol.TOKEN]
    connection = socket.create_connection((host, int(port)), CONNECT_S)
    connection.settimeout(None)
    keep_alive(connection)
    held = reserve_port(None)
    hello = {"token": token, "rank": ranks.rank, "host": socket.gethostname(), "port": held.getsockname()[1]}
    send_line(connection, hello)
    address = connection.getsockname()[0]
    use_interface(address)  # as clusterddp.worker does

    def report(checks: Iterable[Check]) -> bool:
        states = []
        for check in checks:
            send_line(connection, {"check": check.as_json()})
            states.append(check.state)
        return FAILED not in states

    report(of_the_node(ranks, where, address))
    send_line(connection, {"ready": report([imported()]) and report(of_the_device(ranks))})
    lines = connection.makefile("rb")
    if line := lines.readline():
        report(together(ranks, Place(**json.loads(line)), where, host))
        send_line(connection, {"done": True})
        lines.readline()  # rank 0's store lives until all are done
    os._exit(0)  # a process group may hang or abort after others have exited


def of_the_node(ranks: RankEnvironment, where: Path, address: str) -> Iterator[Check]:
    """The checks of one rank per node, without torch."""
    if ranks.local_rank != 0:
        return
    yield guarded("network", NETWORK, lambda: network(address, len(ranks.hosts)))
    yield guarded("folder", FOLDER, lambda: write(where, ranks.hosts[ranks.node_rank]))


def write(where: Path, node: str) -> Check:
    """Writes a file that the other nodes then look for."""
    seconds = clock.write_s(_mark(where, node), node)
    found = f"durable write {1000 * seconds:.1f} ms"
    if seconds > clock.SLOW_S:
        return warning("folder", found, "saves will be slow. Use a faster file system", write_s=seconds)
    return ok("folder", found, write_s=seconds)


def _mark(where: Path, node: str) -> Path:
    return where / f"seen-{node}"


def network(address: str, nodes: int) -> Check:
    """The address and the interface that the ranks of this node use."""
    name = interface_of(address)
    speed = _link_speed(Path("/sys/class/net") / (name or "?") / "speed")
    found = f"{address} on {name or 'an unknown interface'}{f' ({speed} Gb/s)' if speed else ''}"
    cards = _names(Path("/sys/class/infiniband"))
    found += f", InfiniBand {', '.join(cards)}" if cards else ""
    values = {"address": address, "interface": name, "infiniband": cards}
    if nodes > 1 and (address.startswith("127.") or address == "::1"):
        return warning("network", found, _LOOPBACK, **values)
    return ok("network", found, **values)


def _link_speed(file: Path) -> str:
    """The speed in Gb/s, or '' if the kernel has none (-1), as for virtual interfaces."""
    try:
        speed = int(file.read_text())
    except (OSError, ValueError):
        return ""
    return f"{speed / 1000:g}" if speed > 0 else ""


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def imported() -> Check:
    """Imports torch: seconds on a shared disk."""
    advice = "install torch in the environment that the nodes use, or name its interpreter with `python:`"

    def load() -> Check:
        started = time.monotonic()
        import torch

        seconds = time.monotonic() - started
        return ok("torch", f"torch {torch.__version__}", version=str(torch.__version__), import_s=round(seconds, 3))

    return guarded("torch", advice, load)


def _device(ranks: RankEnvironment) -> torch.device:
    from clusterddp.distributed.devices import devices_of

    return devices_of(ranks, os.environ[protocol.DEVICE], 1)[0]


def of_the_device(ranks: RankEnvironment) -> Iterator[Check]:
    """The checks of every rank's device."""
    try:
        device = _device(ranks)
    except Exception as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        yield failed("device", str(error), _NO_GPU.format(visible))
        return
    yield guarded("device", clock.REPLACE, lambda: clock.identify(device))
    if device.type == "cuda":
        yield guarded("health", clock.REPLACE, lambda: clock.health(device))
        yield guarded("locality", clock.REPLACE, lambda: clock.locality(device))
    yield guarded("compute", clock.REPLACE, lambda: clock.multiply(device))


# --- with all others


def together(ranks: RankEnvironment, place: Place, where: Path, first_host: str) -> Iterator[Check]:
    """The checks that need several nodes."""
    if ranks.local_rank == 0:
        yield guarded("visible", FOLDER, lambda: visible(where, place.nodes))
        yield guarded("clock", NETWORK, lambda: judge_clock(*clock.difference(first_host, place.clock_port)))
    yield guarded("all-reduce", NETWORK, lambda: reduced(ranks, place, _device(ranks)))


def visible(where: Path, nodes: Sequence[str], within_s: float = VISIBLE_S) -> Check:
    """Whether the files that the other nodes have written appear here in time."""
    started = time.monotonic()
    missing = clock.unseen({_mark(where, node): node for node in nodes}, within_s)
    seconds = time.monotonic() - started
    if missing:
        names = ", ".join(node for node in nodes if _mark(where, node) in missing)
        found = f"files that {names} wrote into {where.parent} did not appear within {within_s:g} s"
        return failed("visible", found, "set CLUSTERDDP_RUNS to a folder that all nodes share")
    return ok("visible", f"sees the files of {counted(len(nodes), 'node')}", seconds=round(seconds, 4))


def judge_clock(ahead_s: float, trip_s: float) -> Check:
    """From the difference to the first node's clock."""
    found = f"clock {round(1000 * ahead_s, 1) + 0.0:+.1f} ms"  # + 0.0: no -0.0
    values = {"ahead_s": round(ahead_s, 6), "round_trip_s": round(trip_s, 6)}
    if abs(ahead_s) > clock.MOST_S + trip_s / 2:
        found = f"clock differs by {ahead_s:+.1f} s from the first node's"
        return warning("clock", found, "report it to the administrator. chrony or NTP must run on all nodes", **values)
    return ok("clock", found, **values)


def reduced(ranks: RankEnvironment, place: Place, device: torch.device) -> Check:
    """An all-reduce over all ranks that take part."""
    from clusterddp.distributed.process_group import (
        AttemptStore,
        ProcessGroup,
        StoreAddress,
        backend_of,
        choose_backend,
    )

    own = dataclasses.replace(ranks, rank=place.rank, world_size=place.world_size)
    backend = choose_backend(None, device)
    address = StoreAddress(place.store_host, place.store_port, os.environ[protocol.TOKEN])
    group = ProcessGroup(own, device, backend, AttemptStore(own, address, GROUP_S))
    elements = clock.GPU_ELEMENTS if group.over_nccl else clock.CPU_ELEMENTS
    used = backend_of(backend, device.type)
    right = clock.sum_is_right(group.collective_device, elements, GROUP_S)
    if not right:
        return failed("all-reduce", f"wrong sum over {place.world_size} ranks ({used})", clock.REPLACE)
    if place.world_size == 1:
        return ok("all-reduce", f"correct sum, one rank ({used})")
    speed = clock.bandwidth(group.collective_device, elements)
    found = f"correct sum over {place.world_size} ranks, {speed / 1e9:.2f} GB/s ({used})"
    return ok("all-reduce", found, bus_bytes_per_s=round(speed), ranks=place.world_size)


if __name__ == "__main__":
    main()
