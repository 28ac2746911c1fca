"""Starts and stops the daemons: munged, MariaDB, slurmdbd and slurmctld on the host, one slurmd per node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from . import network
from .config import ACCOUNT, CLUSTER, DBD_PORT, USER
from .errors import ClusterError
from .install import PACKAGES
from .state import State
from .system import MARK, Process, command, tail, wait_until

START_TIMEOUT = 90.0
MACHINES_OWN = "/usr/bin"
#: A folder for a copy of MariaDB's, as it is before the server's first start, if this process starts several clusters.
filled_database: Path | None = None


class Daemons:
    """The daemons of one cluster; each is in the state file from its start to its end."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.root = state.site.root
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": self.state.site.search_path,
            "LANG": "C.UTF-8",
            "SLURM_CONF": f"{self.root}/etc/slurm.conf",
            MARK: self.state.mark,
        }

    def log(self, name: str) -> Path:
        return self.root / "log" / f"{name}.out"

    def spawn(self, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C at the terminal does not reach it before `down` does."""
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                argv,
                env={**self.environment, **(env or {})},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(child)
        process = Process.of(child.pid)
        if process:
            self.state.daemons[name] = process
            self.state.save()
        return child

    def alive(self, name: str) -> bool:
        process = self.state.daemons.get(name)
        return process is not None and process.alive()

    def await_ready(self, name: str, ready: Callable[[], bool]) -> None:
        wait_until(lambda: ready() or not self.alive(name), START_TIMEOUT)
        if not self.alive(name) or not ready():
            raise ClusterError(f"{name} does not come up; its log ends with:\n{tail(self.log(name))}")

    def stop(self, name: str, number: int = signal.SIGTERM, timeout: float = 10) -> None:
        process = self.state.daemons.get(name)
        if process:
            process.kill(number)
            if not wait_until(lambda: not process.alive(), timeout):
                process.kill()
                wait_until(lambda: not process.alive(), timeout)
        self.state.daemons.pop(name, None)
        self.state.save()

    def reap(self) -> None:
        """After `down`: no zombie stays in a process that keeps running."""
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)

    def start_munged(self) -> None:
        root = self.root
        key = root / "etc" / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key-file": key, "socket": root / "run/munge.sock", "pid-file": root / "run/munged.pid"}
        files |= {"log-file": root / "log/munged.log", "seed-file": root / "etc/munged.seed"}
        self.spawn("munged", ["munged", "--foreground", *(f"--{name}={path}" for name, path in files.items())])
        self.await_ready("munged", lambda: _connects(root / "run/munge.sock"))

    def make_database(self) -> None:
        """Starts to fill MariaDB's folder: the slowest part of `up`, so it runs beside the others."""
        if filled_database is not None and (filled_database / "db").exists():
            shutil.copytree(filled_database / "db", self.root / "db", dirs_exist_ok=True)
            return
        options = ["--auth-root-authentication-method=socket", "--auth-root-socket-user=root", "--skip-test-db"]
        self.spawn("mariadb-install", ["mariadb-install-db", f"--defaults-file={self.root}/etc/my.cnf", *options])

    def start_mariadb(self) -> None:
        if "mariadb-install" in self.state.daemons:
            if self._children_named("mariadb-install").wait(60) != 0:
                raise ClusterError(f"mariadb-install-db failed:\n{tail(self.log('mariadb-install'))}")
            self.state.daemons.pop("mariadb-install")
            if filled_database is not None:
                shutil.copytree(self.root / "db", filled_database / "db")
        self.spawn("mariadbd", ["mariadbd", f"--defaults-file={self.root}/etc/my.cnf"])
        self.await_ready("mariadbd", lambda: _connects(self.root / "run/mysql.sock"))

    def _children_named(self, program: str) -> subprocess.Popen[bytes]:
        return next(child for child in self._children if str(child.args).find(program) >= 0)

    def start_slurmdbd(self) -> None:
        # With StorageHost=localhost the client library takes the socket from MYSQL_UNIX_PORT.
        self.spawn("slurmdbd", ["slurmdbd", "-D"], {"MYSQL_UNIX_PORT": f"{self.root}/run/mysql.sock"})
        self.await_ready("slurmdbd", lambda: _listens(self.state.site.bridge_address, DBD_PORT))

    def register(self) -> None:
        """The cluster must be known to slurmdbd before slurmctld starts, or its first records are lost."""
        for what in (["cluster", CLUSTER], ["account", ACCOUNT], ["user", USER, f"account={ACCOUNT}"]):
            self._account("add", *what)
        if self.state.config.qos:
            grace = f"gracetime={self.state.config.grace}"
            self._account("add", "qos", "low", "preemptmode=requeue", grace)
            self._account("add", "qos", "high", "preempt=low", "priority=10")
            self._account("modify", "user", USER, "set", "qos+=low,high")

    def _account(self, *words: str) -> None:
        command(["sacctmgr", "--immediate", "--quiet", *words], env=self.environment)

    def start_slurmctld(self, *, fresh: bool = False) -> None:
        command = ["slurmctld", "-D", "-i", *(["-c"] if fresh else [])]
        if self.state.config.loopback_names:  # which this host need not know
            inside = f"mount --bind {self.root}/etc/hosts /etc/hosts && exec {' '.join(command)}"
            command = ["unshare", "--mount", "sh", "-c", inside]
        self.spawn("slurmctld", command)
        self.await_ready("slurmctld", self._controller_answers)

    def _controller_answers(self) -> bool:
        done = subprocess.run(["scontrol", "ping"], env=self.environment, capture_output=True, text=True)
        return " is UP" in done.stdout

    def start_slurmd(self, node: str) -> None:
        """A host name and an /etc/hosts of its own; /sys/fs/cgroup stays, without which slurmd refuses to start."""
        slurmd = f"slurmd -D -N {node}{self._stepd()}"
        hosts = f"{self.root}/etc/hosts"
        if self.state.config.loopback_names:
            lines = [line.split() for line in Path(hosts).read_text().splitlines()]
            hosts += f"-{node}"
            own = [["127.0.1.1", *names] if node in names else [address, *names] for address, *names in lines]
            Path(hosts).write_text("\n".join(map(" ".join, own)) + "\n")
        inside = f"hostname {node} && mount --bind {hosts} /etc/hosts"
        if programs := self.state.site.programs:  # for jobs without the user's PATH
            mounts = f"mount --bind {programs}/$name {MACHINES_OWN}/$name"
            inside += f" && for name in {' '.join(PACKAGES['slurm-client'][0])}; do {mounts}; done"
        if self.state.config.private_home:
            inside += f" && mount -t tmpfs -o mode=755 none {self.root}/home"
        inside += f" && exec {slurmd}"
        # slave: what a test mounts below the state folder later (a small disk, say) is seen on the nodes too.
        unshare = ["unshare", "--uts", "--mount", "--propagation", "slave", "sh", "-c", inside]
        enter = ["nsenter", f"--net={network.namespace(self.root, node)}"]
        self.spawn(f"slurmd-{node}", [*enter, *unshare])

    def _stepd(self) -> str:
        """slurmd does not look for slurmstepd on PATH, nor beside itself."""
        programs = self.state.site.programs
        return f" -d {programs}/slurmstepd" if programs else ""


def _connects(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as client:
        return client.connect_ex(str(path)) == 0


def _listens(address: str, port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as client:
        client.settimeout(1)
        return client.connect_ex((address, port)) == 0
