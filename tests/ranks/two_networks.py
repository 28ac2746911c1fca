"""``unshare --net python -m tests.ranks.two_networks FOLDER``: a run of two nodes on a network that has only IPv6.

This process's network namespace is the first node, with the supervisor and rank 0. Another one is the second node.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from clusterddp import protocol
from clusterddp.jobdef.load import from_values
from clusterddp.runs.submission import record_local
from clusterddp.slurm import commands
from clusterddp.supervisor.addresses import reached_at
from clusterddp.supervisor.launcher import LocalLauncher
from clusterddp.supervisor.main import supervise_local

ADDRESSES = {"n1": "fd00:8::1", "n2": "fd00:8::2"}
SCRIPT = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""


def ip(words: str, *inside: str) -> None:
    """Runs ip, perhaps inside of the other namespace."""
    subprocess.run([*inside, "ip", *words.split()], check=True)


def connected_node(first: str, second: str) -> tuple[subprocess.Popen[bytes], list[str]]:
    """A process that holds the other namespace, and the command that enters it. Both nodes have an eth0."""
    read, write = os.pipe()
    hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", f"echo >&{write}; exec sleep 600"]
    holder = subprocess.Popen(hold, pass_fds=[write])
    os.read(read, 1)
    inside = ["nsenter", "--net", f"--target={holder.pid}"]
    ip(f"link add eth0 type veth peer name eth0 netns {holder.pid}")
    for address, node in ((first, []), (second, inside)):
        ip("link set lo up", *node)
        ip(f"-6 addr add {address}/64 dev eth0 nodad", *node)
        ip("link set eth0 up", *node)
    return holder, inside


class TwoNodes(LocalLauncher):
    """The ranks of a local run, but rank 1 is on the second node."""

    supervisor_host = ""
    inside: list[str]
    host: str

    def _start_rank(
        self, rank: int, command: list[str], environment: Mapping[str, str], logs: Path
    ) -> subprocess.Popen[bytes]:
        supervisor = f"{self.host}{environment[protocol.SUPERVISOR]}"
        command = [*self.inside, *command] if rank else command
        return super()._start_rank(rank, command, {**environment, protocol.SUPERVISOR: supervisor}, logs)


def main(folder: Path) -> int:
    """Runs the script, and prints what each rank has printed."""
    holder, TwoNodes.inside = connected_node(*ADDRESSES.values())
    try:
        commands.node_address = ADDRESSES.__getitem__  # type: ignore[assignment]
        TwoNodes.host = reached_at({"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-2]"})
        script = folder / "train.py"
        script.write_text(SCRIPT)
        values = {"script": str(script), "device": "cpu", "nodes": 2, "gpus_per_node": 1, "steps": "off"}
        run = record_local(from_values(values), str(folder / "run"), loop=False)
        sys.modules["clusterddp.supervisor.main"].LocalLauncher = TwoNodes  # type: ignore[attr-defined]
        code = supervise_local(str(run), None)
    finally:
        holder.kill()
    for rank in range(2):
        print((run.attempt_logs(0) / f"rank-{rank}.out").read_text(), end="")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
