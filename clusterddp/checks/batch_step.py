"""The batch step of ``doctor --nodes``: starts a probe per rank, collects their checks, and writes them to a file.

Probes that do not answer in time are left out of the checks that need several nodes, and the others get a result.
``checks/probe.py`` has the other side, and the messages.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clusterddp import protocol
from clusterddp.checks.node import TimeServer
from clusterddp.checks.probe import JOB_FILE, RESULTS_FILE, START_S, TOGETHER_S, Place
from clusterddp.entry import exit_with
from clusterddp.errors import LauncherEnvironmentError
from clusterddp.failures.exit_status import ExitStatus
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import use_own_cluster
from clusterddp.supervisor.launcher import SlurmLauncher, module_of_ranks, with_python
from clusterddp.supervisor.main import prepare_process
from clusterddp.worker.control_channel import LONGEST_LINE, keep_alive, send_line

#: Seconds within which a connection must send the token.
HELLO_S = 10.0
Message = Mapping[str, Any]


@dataclass
class Probe:
    """The known state of a probe. ``state``: starting, ready, unable, done or gone."""

    rank: int
    host: str
    address: str
    port: int
    connection: Any
    state: str = "starting"
    checks: list[Any] = field(default_factory=list)

    def receive(self, message: Message) -> None:
        """Records what it has sent."""
        if "check" in message:
            self.checks.append(message["check"])
        elif "ready" in message:
            self.state = "ready" if message["ready"] else "unable"
        elif "done" in message:
            self.state = "done"
        elif "gone" in message and self.state in ("starting", "ready"):
            self.state = "gone"


class _Handler(socketserver.StreamRequestHandler):
    """One connection: the token first, then messages."""

    server: ProbeServer

    def handle(self) -> None:
        self.connection.settimeout(HELLO_S)
        with suppress(OSError, ValueError, KeyError, TypeError):
            hello = json.loads(self.rfile.readline(LONGEST_LINE))
            if not hmac.compare_digest(str(hello["token"]), self.server.token):
                return
            self.connection.settimeout(None)
            keep_alive(self.connection)
            rank, host, port = int(hello["rank"]), str(hello["host"]), int(hello["port"])
            self.server.heard.put(Probe(rank, host, self.client_address[0], port, self.connection))
            with suppress(OSError):
                while line := self.rfile.readline(LONGEST_LINE):
                    self.server.heard.put((rank, json.loads(line)))
            self.server.heard.put((rank, {"gone": True}))


class ProbeServer(socketserver.ThreadingTCPServer):
    """Puts what the probes send into a queue. ``heard`` has new probes, and pairs of a rank and its message."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 4096

    def __init__(self) -> None:
        super().__init__(("", 0), _Handler)
        self.token = secrets.token_hex(16)
        self.heard: queue.Queue[Probe | tuple[int, Message]] = queue.Queue()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.1,), name="probes", daemon=True).start()


class Conductor:
    """Leads the probes through their checks. ``ended``: the ranks that exited badly, all of them once srun has exited.

    ``save`` is called after the first part.
    """

    def __init__(
        self,
        server: ProbeServer,
        nodes: Sequence[str],
        per_node: int,
        ended: Callable[[], Collection[int]],
        save: Callable[[], Any],
    ) -> None:
        self._server, self._nodes, self._per_node, self._ended, self._save = server, nodes, per_node, ended, save
        self.probes: dict[int, Probe] = {}

    def conduct(self, clock_port: int, start_s: float = START_S, together_s: float = TOGETHER_S) -> None:
        """Runs until all are done, have exited, or are too late."""
        ranks = set(range(len(self._nodes) * self._per_node))
        self._hear(lambda: ranks - {probe.rank for probe in self.probes.values() if probe.state != "starting"}, start_s)
        self._save()
        able = sorted((probe for probe in self.probes.values() if probe.state == "ready"), key=lambda probe: probe.rank)
        nodes = list(dict.fromkeys(self._nodes[probe.rank // self._per_node] for probe in able))
        for number, probe in enumerate(able):
            first = able[0]
            place = Place(number, len(able), first.address, first.port, clock_port, nodes)
            with suppress(OSError):
                send_line(probe.connection, asdict(place))
        self._hear(lambda: {probe.rank for probe in able if probe.state == "ready"}, together_s)

    def _hear(self, awaited: Callable[[], set[int]], seconds: float) -> None:
        """Reads messages until no rank is awaited. All messages of ranks that have ended are here by then."""
        deadline, ended = time.monotonic() + seconds, set[int]()
        while awaited() - ended and time.monotonic() < deadline:
            known = set(self._ended())
            try:
                heard = self._server.heard.get(timeout=0.2)
            except queue.Empty:
                ended = known
                continue
            if isinstance(heard, Probe):
                self.probes[heard.rank] = heard
            else:
                self.probes[heard[0]].receive(heard[1])


def results(
    nodes: Sequence[str],
    per_node: int,
    probes: Mapping[int, Probe],
    over: bool,
    ended: Collection[int] = (),
    why: Callable[[int], str] = lambda _: "",
) -> dict[str, Any]:
    """The results for the login node. ``ended``, ``why``: the ranks that exited badly, and why."""
    ranks: dict[str, Any] = {}
    for rank in range(len(nodes) * per_node):
        probe = probes.get(rank)
        known: dict[str, Any] = (
            {"host": probe.host, "state": probe.state, "checks": probe.checks} if probe else {"state": "missing"}
        )
        if over and known["state"] not in ("done", "unable"):
            known |= {"why": why(rank), "exited": rank in ended}
        ranks[str(rank)] = known
    return {"over": over, "nodes": list(nodes), "per_node": per_node, "ranks": ranks}


def check_nodes(folder: RunDirectory) -> int:
    """The whole batch step. 0 once the results are written."""
    prepare_process()
    use_own_cluster()
    job = with_python(load_resolved(folder.path / JOB_FILE), os.environ)
    nodes = expand(os.environ["SLURM_JOB_NODELIST"])
    launcher = SlurmLauncher(job)
    if launcher.failure is not None:  # this node lacks the interface, and no probe could reach it
        raise LauncherEnvironmentError(launcher.failure.error)
    server, clock, exited = ProbeServer(), TimeServer(), threading.Event()
    file = folder.path / RESULTS_FILE

    def save(over: bool = False) -> None:
        statuses = launcher.exit_statuses() if over else {}
        why = lambda rank: how_ended(folder.logs / f"rank-{rank}.err", statuses.get(rank))  # noqa: E731
        write_json(file, results(nodes, job.ranks_per_node, conductor.probes, over, statuses, why), mode=0o600)

    def wait() -> None:
        launcher.wait()
        exited.set()

    def ended() -> Collection[int]:
        return range(job.world_size) if exited.is_set() else launcher.exit_statuses().keys()

    conductor = Conductor(server, nodes, job.ranks_per_node, ended, save)
    save()
    launcher.start(command(job, folder), _environment(job, server), folder.logs)
    threading.Thread(target=wait, name="launcher", daemon=True).start()
    conductor.conduct(clock.port)
    save(over=True)
    launcher.kill()
    exited.wait(5.0)
    return 0


def command(job: Job, folder: RunDirectory) -> list[str]:
    """The command of every probe."""
    return [*module_of_ranks("clusterddp.checks.probe", job, folder.package_file), str(folder)]


def _environment(job: Job, server: ProbeServer) -> dict[str, str]:
    return {
        **os.environ,
        **job.env,
        protocol.DEVICE: job.device,
        protocol.LAUNCHER: SlurmLauncher.name,
        protocol.SUPERVISOR: f":{server.port}",
        protocol.TOKEN: server.token,
    }


def how_ended(log: Path, status: ExitStatus | None) -> str:
    """How the probe ended according to srun, and the last line of its error output."""
    ended = "" if status is None else status.words() if status.exit_code is None else f"exit code {status.exit_code}"
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return ", ".join(filter(None, [ended, lines[-1][:300] if lines else ""]))


if __name__ == "__main__":
    exit_with(lambda: check_nodes(RunDirectory(sys.argv[-1])))
