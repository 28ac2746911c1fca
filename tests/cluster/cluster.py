"""A real Slurm on this machine, as an object."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import machine, network, release
from .config import USER, ClusterConfig
from .daemons import START_TIMEOUT, Daemons
from .errors import ClusterError
from .install import SEARCH_PATH, unavailable
from .state import ROOT, Lock, State
from .system import MARK, Process, kill_all, network_processes, tail, uninterrupted, wait_until

Output = subprocess.CompletedProcess[str]


class Cluster:
    """Slurm with N nodes on this machine, from `Cluster.up()` to `down()` or the end of a `with` block.

    The partitions: `low` (the default; its jobs are requeued when `high` needs the nodes), `high`, `cancel` (its jobs
    are cancelled instead) and `off` (its jobs are never preempted).
    """

    def __init__(self, state: State, lock: Lock | None) -> None:
        self._state = state
        self._lock = lock
        self._daemons = Daemons(state)

    # ---- up and down

    @classmethod
    def up(cls, config: ClusterConfig | None = None) -> Cluster:
        """Brings it up, after what an earlier one left has been cleared.

        Raises ClusterError when there can be none here, when another one is up, or when a daemon does not start; in
        the last case everything is taken down again and the daemon's log is in the message.
        """
        config = config or ClusterConfig()
        reason = unavailable() or (config.release and release.missing(config.release))
        if reason:
            raise ClusterError(reason)
        lock = Lock()
        try:
            clear_leftovers(State.load(ROOT))
            cluster = cls(State(machine.new_site(ROOT, config), config), lock)
        except BaseException:
            lock.release()
            raise
        try:
            cluster._make()
        except BaseException:
            cluster.down()
            raise
        return cluster

    @classmethod
    def attach(cls) -> Cluster | None:
        """The cluster that is up, started by any process, for queries and commands; None if there is none."""
        state = State.load(ROOT)
        cluster = cls(state, None) if state and state.ready else None
        return cluster if cluster and cluster.living() else None

    def _make(self) -> None:
        state, daemons = self._state, self._daemons
        state.cgroups_before = [str(path) for path in machine.node_cgroups(self.nodes)]
        machine.make_folders(state)
        machine.write_configuration(state)
        machine.make_commands(state)
        if state.config.slurmdbd:
            daemons.make_database()
        machine.make_user(state)
        machine.make_devices(state)
        machine.show_source(state)
        machine.show_python(state)
        network.lay(state.config, state.site)
        daemons.start_munged()
        for node in self.nodes:
            daemons.start_slurmd(node)
        if state.config.slurmdbd:
            daemons.start_mariadb()
            daemons.start_slurmdbd()
            daemons.register()
        daemons.start_slurmctld(fresh=True)
        self._await_nodes()
        state.ready = True
        state.save()

    def _await_nodes(self) -> None:
        # A slurmd that started before the controller tries to register again after a second or more.
        if wait_until(self._are_idle, START_TIMEOUT / 3):
            return
        # A slurmd of 22.05.8 may stand still while it starts, before it loads the plugin for munge.
        for node, state in self._node_states().items():
            if state != "idle":
                self.restart_slurmd(node)
        if wait_until(self._are_idle, START_TIMEOUT):
            return
        logs = "\n".join(f"slurmd-{node}: {tail(self._daemons.log(f'slurmd-{node}'))}" for node in self.nodes)
        raise ClusterError(f"the nodes are {self._node_states()}, not idle:\n{logs}")

    def _are_idle(self) -> bool:
        return set(self._node_states().values()) == {"idle"}

    def _node_states(self) -> dict[str, str]:
        lines = self.root(["sinfo", "--noheader", "--Node", "--format=%N %T"]).stdout.splitlines()
        return dict(line.split() for line in lines)

    def down(self) -> None:
        """Ends every process of the cluster and removes all that it created on this machine."""
        with uninterrupted():
            try:
                machine.clear(self._state)
                self._daemons.reap()
            finally:
                if self._lock:
                    self._lock.release()

    def detach(self) -> None:
        """Leaves it up when this process ends; `python -m tests.cluster down` ends it."""
        self._state.detached = True
        self._state.save()
        if self._lock:
            self._lock.release()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def living(self) -> list[str]:
        """The names of the running daemons."""
        return [name for name in self._state.daemons if self._daemons.alive(name)]

    # ---- what it is

    @property
    def config(self) -> ClusterConfig:
        return self._state.config

    @property
    def user(self) -> str:
        """The ordinary user who submits; no other may."""
        return USER

    @property
    def uid(self) -> int:
        return self._state.uid

    @property
    def conf(self) -> Path:
        """slurm.conf, for SLURM_CONF."""
        return self._state.site.root / "etc" / "slurm.conf"

    @property
    def scratch(self) -> Path:
        """A folder of the user's, the same on all nodes."""
        return self._state.site.root / "scratch"

    @property
    def source(self) -> Path:
        """The checkout as the user sees it (read-only where it is not its own path)."""
        return Path(self._state.source)

    @property
    def python(self) -> Path:
        """This interpreter with its packages, as the user can run it; `python` on the user's PATH is the same."""
        return Path(self._state.python)

    @property
    def version(self) -> str:
        year, month, patch = self._state.site.version
        return f"{year}.{month:02}.{patch}"

    @property
    def nodes(self) -> list[str]:
        return self.config.node_names

    @property
    def proctrack(self) -> str:
        return self._state.site.proctrack

    def address(self, node: str) -> str:
        """The node's; its name resolves on the nodes alone."""
        return self._state.site.address(node)

    def in_network(self, node: str, argv: Sequence[str]) -> Output:
        """Runs a program as root in the node's network."""
        return self.root(["nsenter", f"--net={network.namespace(self._state.site.root, node)}", *argv])

    def in_mounts(self, node: str, argv: Sequence[str]) -> Output:
        """Runs a program as root where it sees, and mounts, what the node's jobs see."""
        slurmd = self._state.daemons[f"slurmd-{node}"].pid
        return self.root(["nsenter", f"--mount=/proc/{slurmd}/ns/mnt", *argv])

    def rank_address(self, node: str) -> str:
        """That on its second network."""
        return self._state.site.rank_address(node)

    def cable(self, node: str) -> str:
        """The host's end of the node's network cable, for `tc`."""
        return network.cable(node)

    def processes(self, node: str) -> list[Process]:
        """All that runs on the node: slurmd, its stepds, the tasks."""
        return network_processes(network.namespace(self._state.site.root, node))

    @property
    def search_path(self) -> str:
        """The user's PATH: Slurm's programs where they are not the machine's own, `python`, the machine's programs."""
        programs = self._state.site.programs
        own = [str(self._state.site.root / "bin")] if self.config.conf_elsewhere else []
        return ":".join([*own, *([programs] if programs else []), str(self.python.parent), SEARCH_PATH])

    @property
    def environment(self) -> dict[str, str]:
        """The user's environment: no variable of the caller leaks into a job."""
        root, libraries = self._state.site.root, self._state.library_path
        return {
            **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
            "PATH": self.search_path,
            "HOME": str(root / "home"),
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TMPDIR": str(root / "tmp"),
            **({} if self.config.conf_elsewhere else {"SLURM_CONF": str(self.conf)}),
            MARK: self._state.mark,
        }

    def log(self, name: str) -> str:
        """The end of a daemon's log: slurmctld, slurmdbd, slurmd-n1, munged, mariadbd."""
        return tail(self._daemons.log(name))

    # ---- commands

    def run(
        self,
        argv: Sequence[object],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
    ) -> Output:
        """Runs a program on the host as the ordinary user; with `check` a failure shows what it wrote."""
        done = subprocess.run(
            [str(word) for word in argv],
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            **self._as_user(cwd, env),
        )
        return _checked(done) if check else done

    def popen(
        self,
        argv: Sequence[object],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Starts a program on the host as the ordinary user; `more` goes to subprocess.Popen."""
        return subprocess.Popen([str(word) for word in argv], text=True, **self._as_user(cwd, env), **more)

    def _as_user(self, cwd: str | Path | None, env: Mapping[str, str] | None) -> dict[str, Any]:
        identity = {"user": self._state.uid, "group": self._state.gid, "extra_groups": [], "umask": 0o022}
        return {"cwd": cwd or self.scratch, "env": {**self.environment, **(env or {})}, **identity}

    def root(self, argv: Sequence[str], *, check: bool = True, timeout: float = 60) -> Output:
        """Runs a program on the host as root, who is Slurm's administrator."""
        environment = self._daemons.environment
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout)
        return _checked(done) if check else done

    # ---- jobs

    def job(self, jobid: str | int) -> dict[str, str]:
        """The fields of `scontrol show job`; empty when Slurm does not know the job (any more)."""
        done = self.root(["scontrol", "show", "job", "--oneliner", str(jobid)], check=False)
        if "Invalid job id" in done.stderr:
            return {}
        return parse_fields(_checked(done).stdout.splitlines()[0])

    def wait_job(self, jobid: str | int, states: Collection[str], timeout: float = 60) -> dict[str, str]:
        """Waits until the job's state is one of `states`; an AssertionError tells the last one."""
        return self.wait_for(jobid, lambda job: job.get("JobState") in states, f"to be {'/'.join(states)}", timeout)

    def wait_for(
        self, jobid: str | int, condition: Callable[[dict[str, str]], object], what: str, timeout: float = 60
    ) -> dict[str, str]:
        """Waits until the job's fields satisfy `condition`."""
        deadline = time.monotonic() + timeout
        while not condition(job := self.job(jobid)):
            if time.monotonic() > deadline:
                last = {name: job.get(name) for name in ("JobState", "Reason", "Restarts", "ExitCode", "NodeList")}
                waited = f"job {jobid}: waited {timeout:g} s for it {what}; it is {last}"
                raise AssertionError(f"{waited}\nslurmctld's log ends with:\n{self.log('slurmctld')}")
            time.sleep(0.1)
        return job

    def preempt(self, seconds: float = 30, nodes: int | None = None) -> str:
        """Submits a job to `high` that takes whole nodes (all by default) and sleeps; returns its id."""
        size = [f"--nodes={nodes or len(self.nodes)}", "--exclusive", "--output=/dev/null"]
        size += ["--qos=high"] if self.config.qos else []
        command = ["sbatch", "--parsable", "--partition=high", *size, f"--wrap=sleep {seconds:g}"]
        return self.run(command).stdout.strip()

    def set_grace(self, seconds: int) -> None:
        self.root(["scontrol", "update", "partitionname=low", f"gracetime={seconds}"])
        if self.config.qos:
            self.root(["sacctmgr", "--immediate", "--quiet", "modify", "qos", "low", "set", f"gracetime={seconds}"])

    def drain_jobs(self, timeout: float = 60) -> None:
        """Between two tests: undoes cuts and stops, ends every job, and waits until all nodes are idle.

        A node that was cut off is idle before slurmstepd has done with the job that it had.
        """
        dead = self._repair()
        deadline = time.monotonic() + timeout
        if dead:  # Slurm would ask a node that has died and is back about its job again only minutes later
            self._cancel_all()
            for node in dead:
                self._update_node(node, "state=down", "reason=drained")
        while not (self._cancel_all() and self._are_idle() and not self._steps()):
            if time.monotonic() > deadline:
                left = "\n".join([self.root(["squeue", "--all"]).stdout, *self._steps()])
                raise AssertionError(f"after {timeout:g} s: nodes {self._node_states()}, jobs:\n{left}")
            if time.monotonic() > deadline - timeout / 2:
                self._update_nodes("completing", "state=down", "reason=drained")
            self._update_nodes("down|drain|fail", "state=resume")
            time.sleep(0.1)

    def _steps(self) -> list[str]:
        """What nodes have of jobs, ended or not."""
        commands = [process.command() for node in self.nodes for process in self.processes(node)]
        return [command for command in commands if command.startswith("slurmstepd:")]

    def _cancel_all(self) -> bool:
        """True when there is nothing left to cancel. KILL first: a job may ignore TERM for as long as KillWait."""
        jobs = self.root(["squeue", "--noheader", "--format=%A"]).stdout.split()
        if jobs:
            self.root(["scancel", "--quiet", "--full", "--signal=KILL", *jobs], check=False)
            self.root(["scancel", "--quiet", *jobs], check=False)
        return not jobs

    def _update_nodes(self, states: str, *values: str) -> None:
        """Sets the values of all nodes in one of the states, a regular expression."""
        lines = self.root(["sinfo", "--noheader", "--Node", "--format=%N %T"]).stdout.split("\n")
        for node in {line.split()[0] for line in lines if re.search(states, line)}:
            self._update_node(node, *values)

    def _update_node(self, node: str, *values: str) -> None:
        self.root(["scontrol", "update", f"nodename={node}", *values], check=False)

    # ---- faults

    def cut(self, node: str) -> None:
        """Pulls the node's network cable; its processes keep running."""
        network.set_cable(node, up=False)

    def heal(self, node: str) -> None:
        network.set_cable(node, up=True)

    def kill_node(self, node: str) -> None:
        """Power off: slurmd, its stepds and every task of the node are killed at once; `restart_slurmd` boots it."""
        kill_all(lambda: self.processes(node))
        self._daemons.stop(f"slurmd-{node}")

    def stop_controller(self) -> None:
        self._daemons.stop("slurmctld")

    def start_controller(self) -> None:
        """It finds its jobs again."""
        self._daemons.start_slurmctld()

    def restart_slurmd(self, node: str) -> None:
        """Its jobs keep running meanwhile."""
        self._daemons.stop(f"slurmd-{node}")
        self._daemons.start_slurmd(node)

    def _repair(self) -> list[str]:
        """The nodes that were dead."""
        dead = [node for node in self.nodes if not self._daemons.alive(f"slurmd-{node}")]
        for node in self.nodes:
            self.heal(node)
        for node in dead:
            self.restart_slurmd(node)
        if not self._daemons.alive("slurmctld"):
            self.start_controller()
        return dead


def clear_leftovers(state: State | None, *, force: bool = False) -> None:
    """Clears what a killed run left; a cluster that is up on its own only with `force`. The lock must be held."""
    if state is None:
        machine.remove_folder(ROOT)
        return
    if state.detached and not force and Cluster(state, None).living():
        since = time.strftime("%H:%M", time.localtime(state.since))
        raise ClusterError(f"a test cluster was left up at {since}; `python -m tests.cluster down` ends it")
    with uninterrupted():
        machine.clear(state)


def parse_fields(line: str) -> dict[str, str]:
    """`A=1 B=two words C=x=y` as a dict; a value may hold blanks and equal signs."""
    pairs: Iterable[str] = re.split(r" +(?=[A-Z][\w/:-]*=)", line.strip())
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _checked(done: Output) -> Output:
    if done.returncode != 0:
        words = " ".join(done.args)
        raise ClusterError(f"`{words}` ended with {done.returncode}:\n{done.stderr.strip()}\n{done.stdout.strip()}")
    return done
