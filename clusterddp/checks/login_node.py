"""The checks of ``doctor`` on a login node: the folder for runs, Python, torch and its CUDA, Slurm's commands, its
controller and clock, the user's accounts, and partitions with their preemption.

torch is not imported: its version and CUDA release are read from its files.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from clusterddp.checks import node
from clusterddp.checks.node import GIB, MOUNTS, Check, Mount, failed, guarded, ok, own_place, warning
from clusterddp.errors import SlurmError, SlurmMissing
from clusterddp.jobdef.job import Job
from clusterddp.process import PACKAGE_FOLDER
from clusterddp.reporter import counted
from clusterddp.rundir.run_directory import runs_folder
from clusterddp.slurm import configuration
from clusterddp.slurm.configuration import Association, Configuration, Partition, Preemption, policy

#: Commands that a run needs, and commands that only some features need.
NEEDED, USEFUL = ("sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel"), ("sacct", "sacctmgr", "salloc")
#: Free space below which a check warns.
LITTLE = 10 * GIB
#: Folders of the system, which is usually the same on all nodes.
SYSTEM = ("/usr", "/opt", "/bin", "/lib", "/sw", "/software", "/cvmfs")
_RUNS = "set CLUSTERDDP_RUNS, or --run-dir, to a folder on a file system that all nodes share"


def login_checks(environ: Mapping[str, str]) -> list[Check]:
    """One check after another."""
    table = MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
    runs = runs_folder(environ).absolute()
    return [
        *of_the_runs_folder(runs, table),
        judge_places({"python": Path(sys.executable), "clusterddp": PACKAGE_FOLDER}, table),
        guarded("torch", "reinstall torch", judge_torch),
        judge_driver(Path("/proc/driver/nvidia/version")),
        judge_commands({name: shutil.which(name) for name in (*NEEDED, *USEFUL)}),
    ]


# --- the folder for runs


def of_the_runs_folder(runs: Path, table: str) -> Iterator[Check]:
    """Whether all nodes can see it, how much is free, and how long a durable write takes."""
    there = node.existing(runs)
    made = "" if runs.is_dir() else " (not created yet)"
    yield judge_mount(f"{runs}{made}", node.mount_of(there, table))
    yield guarded("free space", _RUNS, lambda: judge_space(shutil.disk_usage(there).free, os.statvfs(there)))
    yield guarded("writes", _RUNS, lambda: timed_write(there))


def judge_mount(shown: str, mount: Mount | None) -> Check:
    """From the file system that holds the folder."""
    if mount is None:
        return warning("runs folder", f"{shown} is not in the mount table", _RUNS)
    found = f"{shown}: {mount.kind} ({mount.source})"
    values = {"path": shown, "file_system": mount.kind, "source": mount.source, "shared": mount.shared}
    if mount.shared:
        return ok("runs folder", found, **values)
    unsure = "a local file system" if mount.shared is False else "unknown whether other hosts have it"
    advice = f"{_RUNS}. `clusterddp doctor --nodes 2` tests whether nodes share it"
    return warning("runs folder", f"{found}, {unsure}", advice, **values)


def judge_space(free: int, status: os.statvfs_result) -> Check:
    """From the free space. A quota may be smaller, which only a write shows."""
    found = f"{free / GIB:,.1f} GiB free"
    if status.f_files and status.f_favail == 0:
        return failed("free space", f"{found}, but no inodes are left, so files cannot be created", _RUNS, free=free)
    if free < LITTLE:
        return warning("free space", found, "prune old runs, or set CLUSTERDDP_RUNS to a different folder", free=free)
    return ok("free space", found, free=free)


def timed_write(there: Path) -> Check:
    """Writes a small file durably, and deletes it."""
    with tempfile.TemporaryDirectory(prefix=".clusterddp-doctor-", dir=there) as name:
        seconds = node.write_s(Path(name) / "file", "doctor")
    found = f"write, fsync and rename take {1000 * seconds:.1f} ms"
    if seconds > node.SLOW_S:
        advice = "saves will be slow. Check whether the file system is overloaded, or use a faster one"
        return warning("writes", found, advice, write_s=seconds)
    return ok("writes", found, write_s=seconds)


# --- Python and torch


def judge_places(places: Mapping[str, Path], table: str) -> Check:
    """Whether the nodes have this Python and this package at the same paths."""
    found = ", ".join(f"{name} {path}" for name, path in places.items())
    values = {name: str(path) for name, path in places.items()}
    ways = {str(way): path for path in places.values() for way in (path, Path(os.path.realpath(path)))}
    for way, path in ways.items():
        if own := own_place(Path(way)):
            advice = f"install it in a folder that all nodes share. Each node has its own {own}"
            return warning("python", f"{path} leads to {way}" if way != str(path) else found, advice, **values)
    for way, path in ways.items():
        mount = node.mount_of(node.existing(Path(way).parent), table)
        if mount is not None and mount.shared is False and not way.startswith(tuple(f"{top}/" for top in SYSTEM)):
            advice = "`clusterddp doctor --nodes 2` tests whether the nodes also have it"
            return warning("python", f"{path} is on a local file system ({mount.kind})", advice, **values)
    return ok("python", found, **values)


def judge_torch() -> Check:
    """The installed torch, read from its files."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        advice = "install it where the nodes find it, or name their interpreter with `python:` in the job definition"
        return failed("torch", "not installed for this Python", advice)
    build = Path(spec.origin).parent / "version.py"
    return judge_build(build.read_text(), nccl_version(), wanted_torch())


def judge_build(text: str, nccl: str, wanted: str) -> Check:
    """From the text of torch/version.py."""
    known = dict(re.findall(r"^(\w+)(?::[^=\n]+)?\s*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE))
    release = known.get("__version__", "unknown version")
    cuda, hip = known.get("cuda"), known.get("hip")
    values = {"version": release, "cuda": cuda, "rocm": hip, "nccl": nccl or None, "tested": wanted}
    if not cuda and not hip:
        advice = "for GPUs, install a build with CUDA (pytorch.org/get-started). --device cpu does not need one"
        return warning("torch", f"{release}, built without CUDA", advice, **values)
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}"
    found = f"{release}, {built}{f', NCCL {nccl}' if nccl else ''}"
    if wanted and not in_range(release, wanted):
        return warning("torch", found, f"clusterddp is tested with torch {wanted}", **values)
    return ok("torch", found, **values)


def nccl_version() -> str:
    """The version of the NCCL that pip installed with torch, or '' if torch includes its own."""
    for release in (13, 12, 11):
        with suppress(PackageNotFoundError):
            return version(f"nvidia-nccl-cu{release}")
    return ""


def wanted_torch() -> str:
    """The range of torch releases in this package's metadata, such as ``<2.16,>=2.4.1``, or '' if not installed."""
    try:
        lines = requires("clusterddp") or []
    except PackageNotFoundError:
        return ""
    return next((line[len("torch") :].strip(" ()") for line in lines if re.match(r"torch\s*[(<>=]", line)), "")


def in_range(release: str, wanted: str) -> bool:
    """Whether a release such as 2.9.1+cu128 is in a range such as ``<2.16,>=2.4.1``."""
    own = _numbers(release)
    for sign, limit in re.findall(r"(<=|>=|<|>)\s*([\d.]+)", wanted):
        other = _numbers(limit)
        if not {"<": own < other, "<=": own <= other, ">": own > other, ">=": own >= other}[sign]:
            return False
    return True


def _numbers(release: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", release)
    return [int(part) for part in match[0].split(".")] if match else []


def judge_driver(file: Path) -> Check:
    """NVIDIA's driver on this host, which does not need one."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ok("driver", "no NVIDIA driver on this host, which does not need one. `doctor --nodes` checks the nodes")
    match = re.search(r"\b(\d{3,4}\.\d+(\.\d+)?)\b", text)
    return ok("driver", f"NVIDIA {match[1] if match else '(unknown release)'} on this host")


def judge_commands(found: Mapping[str, str | None]) -> Check:
    """Which of Slurm's commands are on PATH."""
    missing = [name for name, path in found.items() if path is None]
    if needed := [name for name in missing if name in NEEDED]:
        return failed("commands", f"not on PATH: {', '.join(needed)}", "load the site's Slurm module")
    if missing:
        return ok("commands", f"all required commands are on PATH. Missing optional ones: {', '.join(missing)}")
    return ok("commands", f"{', '.join(found)} are on PATH")


#: scontrol prints the controller's time in whole seconds.
RESOLUTION_S = 1.0


def slurm_checks(partition: str | None, qos: str | None) -> tuple[list[Check], str]:
    """The checks of Slurm, and what a preemption in the partition (None: the default one) does."""
    started = time.time()
    try:
        config = configuration.read_configuration()
    except SlurmError as error:
        missing = isinstance(error, SlurmMissing)
        remedy = "load the site's Slurm module" if missing else "ask the administrator whether slurmctld is running"
        found = "scontrol is not on PATH" if missing else str(error)
        return [failed("slurm", found, f"{remedy}. To run on this machine, use `submit --local`")], f"unknown: {found}"
    checks = [judge_release(config), judge_clock(config.time, started, time.time())]
    associations: list[Association] | None = None
    try:
        associations, default = read_accounts(config)
        checks.append(judge_accounts(config, associations, default))
    except SlurmError as error:
        advice = "submit with -A ACCOUNT if the cluster needs an account"
        checks.append(warning("accounts", f"unknown: {error}", advice))
    try:
        partitions = configuration.read_partitions()
        of_qos = policy(config.text, "", "", qos) if config.values.get("PreemptType") == "preempt/qos" else None
        checks += [judge_partition(one, config, of_qos, associations) for one in partitions]
        return checks, sentence(partition, of_qos, partitions, config)
    except SlurmError as error:
        return [*checks, failed("partitions", str(error), "choose a partition with -p")], f"unknown: {error}"


def judge_release(config: Configuration) -> Check:
    """The release of Slurm, and whether it is one of those that are tested."""
    oldest, newest = (f"{year}.{month:02}" for year, month in configuration.TESTED)
    where = f" on {config.controllers}" if config.controllers else ""
    cluster = config.values.get("ClusterName", "")
    values = {"release": config.release, "cluster": cluster}
    found = f"{config.release or 'unknown release'}{where}, cluster {cluster or 'without a name'}"
    if not config.tested:
        advice = f"clusterddp is tested with Slurm {oldest} to {newest}. Try `clusterddp rehearse -p PARTITION` first"
        return warning("slurm", found, advice, **values)
    return ok("slurm", f"{found} (tested: {oldest} to {newest})", **values)


def judge_clock(theirs: float | None, before: float, after: float) -> Check:
    """The controller's clock, which was read between two moments of this host's."""
    if theirs is None:
        return warning("clock", "scontrol does not print the controller's time", "compare the clocks by hand")
    ahead = max(0.0, theirs - after) + min(0.0, theirs + RESOLUTION_S - before)
    if abs(ahead) > node.MOST_S:
        found = f"the controller's clock differs from this host's by {ahead:+.0f} s"
        advice = "report it to the administrator. chrony or NTP must run on both hosts"
        return warning("clock", found, advice, ahead_s=ahead)
    return ok("clock", "this host and the controller agree to the second", ahead_s=ahead)


def read_accounts(config: Configuration) -> tuple[list[Association], str]:
    """The user's associations and default account, or none without accounting."""
    if not config.accounting:
        return [], ""
    try:
        user = getpass.getuser()
    except (KeyError, OSError) as error:  # KeyError before Python 3.13
        raise SlurmError(f"user {os.getuid()} has no name on this host") from error
    return configuration.read_associations(user), configuration.read_default_account(user)


def judge_accounts(config: Configuration, associations: Sequence[Association], default: str) -> Check:
    """Which accounts and QOS the user may submit with."""
    if not config.accounting:
        return ok("accounts", "no accounting on this cluster, so jobs need no account and sacct has no past jobs")
    if not associations:
        found = "this user has no account"
        if config.enforced:
            return failed("accounts", found, "ask the administrator for an account. Slurm refuses jobs without one")
        return ok("accounts", f"{found}, and the cluster requires none")
    accounts = list(dict.fromkeys(one.account for one in associations))
    qos = list(dict.fromkeys(name for one in associations for name in one.qos))
    listed = f"{_listed(accounts)} (QOS {_listed(qos) or 'none'})"
    values = {"accounts": accounts, "qos": qos, "default": default}
    if default:
        return ok("accounts", f"{listed}, default account {default}", **values)
    advice = "name one with -A, or in a configuration file"
    return warning("accounts", f"{listed}, no default account", advice, **values)


def judge_partition(
    one: Partition, config: Configuration, of_qos: Preemption | None, associations: Sequence[Association] | None
) -> Check:
    """A partition: its size, limits, and what it does to jobs that it preempts."""
    known = of_qos or policy(config.text, one.line, one.name, None)
    name = f"partition {one.name}{' (default)' if one.default else ''}"
    size = counted(one.nodes, "node") + (f", {counted(one.gpus, 'GPU')}" if one.gpus else "")
    limit = f"limit {one.most_time}" + ("" if one.default_time == "NONE" else f", default {one.default_time}")
    found = f"{size}, {limit}, {_preempts(known)}"
    values = {
        "partition": one.name, "default": one.default, "state": one.state, "nodes": one.nodes, "gpus": one.gpus,
        "max_time": one.most_time, "default_time": one.default_time, "preempt_mode": known.mode,
        "grace_s": known.grace_s, "kill_wait_s": known.kill_wait_s, "hold_s": known.hold_s,
    }  # fmt: skip
    if one.state != "UP":
        return warning(name, f"{one.state}, {found}", "choose a different partition with -p", **values)
    if associations and not one.open_to([association.account for association in associations]):
        return warning(name, f"not open to your accounts, {found}", "choose a different partition with -p", **values)
    return ok(name, found, **values)


def _preempts(known: Preemption) -> str:
    if known.mode == "OFF":
        return "no preemption"
    grace = f"{known.grace_s} s grace period" if known.grace_s else f"no grace period, KillWait {known.kill_wait_s} s"
    held = f", held {known.hold_s} s" if known.mode == "REQUEUE" else ""
    return f"preempts ({known.mode}, {grace}{held})"


def sentence(
    partition: str | None, of_qos: Preemption | None, partitions: Sequence[Partition], config: Configuration
) -> str:
    """What a preemption in the partition, each of several, or else the default one, does to a run."""
    wanted = (partition or "").split(",")
    chosen = [one for one in partitions if (one.name in wanted if partition else one.default)]
    if partition and len(chosen) < len(wanted) and not config.reroutes:
        missing = next(name for name in wanted if name not in {one.name for one in chosen})
        names = _listed([one.name for one in partitions]) or "none"
        raise SlurmError(f"no partition {missing!r} on this cluster. Available: {names}")
    if not chosen and of_qos is None:
        return (
            "the partition is chosen by this site" if config.reroutes else "choose a partition with -p. None is default"
        )
    known = [of_qos] if of_qos else [policy(config.text, one.line, one.name, None) for one in chosen]
    job = Job(name="doctor", device="cpu")
    return ". ".join(dict.fromkeys(one.sentence(job) for one in known))


def _listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
