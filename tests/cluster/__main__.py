"""python -m tests.cluster up|down|status|run|install"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from . import install, release
from .cluster import Cluster, clear_leftovers
from .config import RELEASES, ClusterConfig
from .errors import ClusterError
from .machine import REPOSITORY
from .state import ROOT, Lock, State, lock_holder

IS_DOWN = 3


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return int(options.act(options))
    except ClusterError as error:
        print(f"tests.cluster: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.cluster", description="A real Slurm on one machine, for tests.")
    commands = top.add_subparsers(required=True, metavar="up|down|status|run|install")
    add = commands.add_parser("up", help="bring it up, and leave it up")
    _add_config(add)
    add.set_defaults(act=up)
    commands.add_parser("down", help="take it down, with all it made").set_defaults(act=down)
    commands.add_parser("status", help=f"exit code 0: up, {IS_DOWN}: down").set_defaults(act=status)
    add = commands.add_parser("run", help="bring it up, run a command as the ordinary user, take it down")
    _add_config(add)
    add.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD ...")
    add.set_defaults(act=run)
    add = commands.add_parser("install", help="install Slurm on Debian or Ubuntu, services off")
    add.add_argument("--release", choices=RELEASES, help="and the Slurm of this Debian release, beside the machine's")
    add.set_defaults(act=get)
    return top


def _add_config(add: argparse.ArgumentParser) -> None:
    default = ClusterConfig()
    numbers = "nodes gpus cpus threads reserved_cores reserved_mib grace slurmd_timeout kill_wait cred_expire"
    for name in (*numbers.split(), "max_array_size"):
        add.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(default, name), metavar="N")
    add.add_argument("--proctrack", choices=("cgroup", "linuxproc"), help="default: cgroup where cgroup v1 is mounted")
    add.add_argument("--user-signal", action="store_true", help="preemption sends the job's --signal instead of TERM")
    add.add_argument("--memory-limits", action="store_true", help="jobs are held to their --mem; needs cgroup v1")
    add.add_argument("--qos", action="store_true", help="preemption goes by QOS, `high` over `low`")
    add.add_argument("--loopback-names", action="store_true", help="nodes resolve their own names to 127.0.1.1")
    add.add_argument("--domain", default="", help="of the nodes' names, such as site.example")
    add.add_argument("--rules", action="store_true", help="a plugin chooses partitions and refuses many options")
    add.add_argument(
        "--rank-network", action="store_true", help="ranks reach other nodes only on a second network, ib0"
    )
    add.add_argument("--conf-elsewhere", action="store_true", help="only Slurm's own commands know slurm.conf")
    add.add_argument("--private-home", action="store_true", help="nodes do not have the user's home directory")
    add.add_argument("--expedite", action="store_true", help="allow --requeue=expedite; needs Slurm 25.11 or newer")
    add.add_argument("--release", choices=RELEASES, help="this Debian release's Slurm; default: the machine's")
    add.add_argument("--no-slurmdbd", dest="slurmdbd", action="store_false", help="no accounting")


def configuration(options: argparse.Namespace) -> ClusterConfig:
    try:
        return ClusterConfig(**{name: getattr(options, name) for name in ClusterConfig.__dataclass_fields__})
    except ValueError as error:
        raise ClusterError(str(error)) from error


def get(options: argparse.Namespace) -> int:
    code = install.main()
    if code == 0 and options.release:
        release.install(options.release)
    return code


def up(options: argparse.Namespace) -> int:
    _interrupt_on_term()
    cluster = Cluster.up(configuration(options))
    cluster.detach()
    print(describe(cluster))
    print(f"\nSubmit as {cluster.user} from {cluster.scratch}:")
    path = f"PATH={cluster.search_path}"
    print(f"  su {cluster.user} -c 'cd {cluster.scratch}; {path} SLURM_CONF={cluster.conf} bash'")
    print(f"Look on as root:\n  export {path} SLURM_CONF={cluster.conf}")
    print("End it:\n  python -m tests.cluster down")
    return 0


def describe(cluster: Cluster) -> str:
    config = cluster.config
    accounting = "accounting" if config.slurmdbd else "no accounting"
    return (
        f"Slurm {cluster.version} is up: {config.nodes} nodes x {config.gpus} fake GPUs, {config.cpus} CPUs per node; "
        f"proctrack/{cluster.proctrack}, {accounting}, grace of `low` {config.grace} s"
    )


def down(_: argparse.Namespace) -> int:
    lock = Lock()
    try:
        state = State.load(ROOT)
        clear_leftovers(state, force=True)
    finally:
        lock.release()
    print("down" if state else "there was none")
    return 0


def status(_: argparse.Namespace) -> int:
    cluster, holder = Cluster.attach(), lock_holder()
    if cluster is None:
        print(f"down, but {holder} holds the lock" if holder else "down")
        return IS_DOWN
    print(describe(cluster))
    print(f"options: {cluster.config}")
    print(f"SLURM_CONF={cluster.conf}, user {cluster.user}, held by {holder or 'nobody: it was left up'}")
    print(f"daemons: {', '.join(cluster.living())}")
    print(cluster.root(["sinfo"], check=False).stdout, end="")
    return 0


def run(options: argparse.Namespace) -> int:
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        raise ClusterError("run: no command given")
    _interrupt_on_term()
    try:
        with Cluster.up(configuration(options)) as cluster:
            runs = f"{cluster.scratch}/runs"  # the checkout may belong to another user
            print(f"{describe(cluster)}\nCLUSTERDDP_RUNS={runs}", file=sys.stderr)
            user = cluster.popen(words, cwd=_folder_of(cluster), env={"CLUSTERDDP_RUNS": runs})
            return _exit_code(user.wait())
    except KeyboardInterrupt:
        return 130


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _folder_of(cluster: Cluster) -> Path:
    """Where the user sees the caller's folder, when it is in the checkout; else the scratch folder."""
    here = Path.cwd()
    return cluster.source / here.relative_to(REPOSITORY) if here.is_relative_to(REPOSITORY) else cluster.scratch


def _interrupt_on_term() -> None:
    """TERM and HUP take the cluster down, as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


if __name__ == "__main__":
    sys.exit(main())
