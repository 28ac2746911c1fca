"""``preflight: true``: before training, the checks of ``doctor --nodes`` that take a second.

A failure raises PreflightError in the rank that found it, on the node at fault, if there is one. The supervisor then
counts it against that node (``supervisor/verdict.py``). All waits are bounded.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch

from clusterddp.checks import node as clock
from clusterddp.checks.node import FAILED, OK, Check, failed, guarded
from clusterddp.distributed.devices import device_thread
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import PreflightError
from clusterddp.history.beginnings import Preflight
from clusterddp.history.event import Reported
from clusterddp.reporter import say
from clusterddp.rundir.files import unlink, write_atomically
from clusterddp.training.settings import Settings

#: Seconds for a device to compute, with the start of CUDA, and for all ranks to meet.
DEVICE_S, GROUP_S = 120.0, 60.0
_CLOCK, _WRONG, _REPORTED, _ALL = "preflight/clock", "preflight/wrong", "preflight/reported", "preflight/all"
#: Errors of a write that are not a node's fault.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: What to do if only all nodes together fail.
FEWER = "To find the node at fault, check fewer nodes at a time with `clusterddp doctor --nodes N`"


def check_node(read: Settings, devices: Sequence[torch.device]) -> float:
    """Before the process group: this rank's devices, and on one rank per node a write to the run directory.

    Returns the seconds that it took.
    """
    started = time.monotonic()
    for device in devices if devices[0].type == "cuda" else ():
        check = bounded("health", partial(clock.health, device), DEVICE_S, device)
        if check.state != OK:
            say(f"health check of node {node_of(read)}: {check.found}")
        if check.state == FAILED:
            raise PreflightError(f"node {node_of(read)} failed the check 'health' on {device}: {check.found}")
    for device in devices:
        check = bounded("compute", partial(clock.multiply, device), DEVICE_S, device)
        if check.state == FAILED:
            raise PreflightError(f"node {node_of(read)} failed the check 'compute' on {device}: {check.found}")
    if read.ranks.local_rank == 0 and read.run_dir is not None:
        path = read.run_dir.private / f"preflight-{read.ranks.node_rank}"
        try:
            write_atomically(path, node_of(read), mode=0o600)
            unlink(path)
        except OSError as error:
            blamed = "" if error.errno in _FULL else f"node {node_of(read)} failed the check 'folder': "
            raise PreflightError(f"{blamed}could not write to {read.run_dir}: {error.strerror}") from error
    return time.monotonic() - started


def node_of(read: Settings) -> str:
    """This node's name, as Slurm has it."""
    return read.ranks.hosts[read.ranks.node_rank] if read.ranks.hosts else socket.gethostname()


def bounded(name: str, check: Callable[[], Check], seconds: float, device: torch.device | None = None) -> Check:
    """The result of a check, or a failed one after this many seconds, because a faulty GPU may never answer."""
    found: list[Check] = []
    work = lambda: found.append(guarded(name, "", check))  # noqa: E731
    thread = device_thread(device, work, name="preflight")
    thread.start()
    thread.join(seconds)
    return found[0] if found else failed(name, f"no result within {seconds:g} s", "")


def check_ranks(read: Settings, group: ProcessGroup) -> list[str]:
    """In the process group: the nodes' clocks, and a sum over all ranks. Collective. Returns warnings, on rank 0."""
    ranks, store = read.ranks, group.store
    server = clock.TimeServer() if ranks.rank == 0 else None
    try:
        if server is not None:
            store.set(_CLOCK, str(server.port))
        if ranks.local_rank == 0:
            store.set(f"{_CLOCK}/{ranks.node_rank}", clock_warning(read, int(store.get(_CLOCK))))
        right = _sum_is_right(group)
        store.add(_WRONG, int(not right))
        if store.add(_REPORTED, 1) == group.world_size:
            store.set(_ALL, "")
        store.wait([_ALL], timedelta(seconds=GROUP_S))
    finally:
        if server is not None:
            server.close()
    if not right:
        raise PreflightError(wrong_sum(read, store.add(_WRONG, 0)))
    nodes = range(group.world_size // ranks.local_world_size) if ranks.rank == 0 else ()
    return [text for node in nodes if (text := store.get(f"{_CLOCK}/{node}").decode())]


def clock_warning(read: Settings, port: int) -> str:
    """A warning if this node's clock differs from the first node's. '' if it does not."""
    if read.ranks.rank == 0:
        return ""
    try:
        ahead_s, trip_s = clock.difference(read.store.host, port)
    except OSError as error:
        return f"could not compare the clock of {node_of(read)}: {error}"
    if abs(ahead_s) <= clock.MOST_S + trip_s / 2:
        return ""
    return f"the clock of {node_of(read)} differs by {ahead_s:+.1f} s from the first node's"


def _sum_is_right(group: ProcessGroup) -> bool:
    try:
        return clock.sum_is_right(group.collective_device, clock.FEW_ELEMENTS, GROUP_S)
    except clock.NoAnswer as error:
        raise PreflightError(f"{error} over {group.world_size} ranks. {FEWER}") from error


def wrong_sum(read: Settings, wrong: int) -> str:
    """The message of a rank with a wrong sum. If all ranks have one (``wrong``), it cannot name a node."""
    ranks = read.ranks
    if wrong < ranks.world_size or ranks.local_world_size == ranks.world_size:
        return f"node {node_of(read)} failed the check 'all-reduce': wrong sum on {wrong} of {ranks.world_size} ranks"
    return f"an all-reduce gave a wrong sum on all {wrong} ranks. {FEWER}"


def run(read: Settings, group: ProcessGroup, report: Callable[[Reported], None], before_s: float) -> None:
    """``check_ranks``, and its result for the history. ``before_s``: the seconds of ``check_node``."""
    started = time.monotonic() - before_s
    warnings = check_ranks(read, group)
    if read.ranks.rank == 0:
        report(Preflight(seconds=round(time.monotonic() - started, 3), warnings=warnings))
