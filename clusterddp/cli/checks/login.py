"""What a login node shows without Slurm: the folder for runs, Python, torch and its CUDA, Slurm's commands.

torch is not imported: its version and CUDA release are read from its files.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from clusterddp.checks import folder
from clusterddp.checks.check import Check, failed, guarded, ok, warning
from clusterddp.checks.compute import GIB
from clusterddp.checks.folder import Mount
from clusterddp.process import PACKAGE_FOLDER
from clusterddp.rundir.find import runs_folder

#: What a run needs, and what only some commands need.
NEEDED, USEFUL = ("sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel"), ("sacct", "sacctmgr", "salloc")
#: Free space below which a check warns.
LITTLE = 10 * GIB
#: Folders that every host has for itself.
OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root")
#: Folders of the system, which is usually the same on all nodes.
SYSTEM = ("/usr", "/opt", "/bin", "/lib", "/sw", "/software", "/cvmfs")
MOUNTS = Path("/proc/self/mountinfo")
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
    there = folder.existing(runs)
    made = "" if runs.is_dir() else " (not created yet)"
    yield judge_mount(f"{runs}{made}", folder.mount_of(there, table))
    yield guarded("free space", _RUNS, lambda: judge_space(shutil.disk_usage(there).free, os.statvfs(there)))
    yield guarded("writes", _RUNS, lambda: timed_write(there))


def judge_mount(shown: str, mount: Mount | None) -> Check:
    """From the file system that holds the folder."""
    if mount is None:
        return warning("runs folder", f"{shown}: not in the table of mounts", _RUNS)
    found = f"{shown}: {mount.kind} ({mount.source})"
    values = {"path": shown, "file_system": mount.kind, "source": mount.source, "shared": mount.shared}
    if mount.shared:
        return ok("runs folder", found, **values)
    unsure = "a local file system" if mount.shared is False else "unknown whether other hosts have it"
    advice = f"{_RUNS}; `clusterddp doctor --nodes 2` tests whether they do"
    return warning("runs folder", f"{found}, {unsure}", advice, **values)


def judge_space(free: int, status: os.statvfs_result) -> Check:
    """From what is free; a quota may be smaller, and only a write shows that."""
    found = f"{free / GIB:,.1f} GiB free"
    if status.f_files and status.f_favail == 0:
        return failed("free space", f"{found}, but no file can be created: no inodes are left", _RUNS, free=free)
    if free < LITTLE:
        return warning("free space", found, "prune old runs, or choose another folder: CLUSTERDDP_RUNS", free=free)
    return ok("free space", found, free=free)


def timed_write(there: Path) -> Check:
    """Writes a small file durably, and deletes it."""
    with tempfile.TemporaryDirectory(prefix=".clusterddp-doctor-", dir=there) as name:
        seconds = folder.write_s(Path(name) / "file", "doctor")
    found = f"write, fsync and rename take {1000 * seconds:.1f} ms"
    if seconds > folder.SLOW_S:
        advice = "saves will be slow: is the file system overloaded, or is there a faster one?"
        return warning("writes", found, advice, write_s=seconds)
    return ok("writes", found, write_s=seconds)


def unseen(places: Mapping[str, Path]) -> list[str]:
    """Warnings about paths that probably only this host has; ``places``: by what they are."""
    table = MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
    found: dict[str, list[str]] = {}
    for what, path in places.items():
        mount = folder.mount_of(folder.existing(Path(os.path.realpath(path))), table)
        if (own := _own(path)) and (mount is None or not mount.shared):
            found.setdefault(own, []).append(f"{what} ({path})")
    return [
        f"{', '.join(names)}: usually each node has its own {own}, and then the job fails at once; "
        "use a folder that all nodes share"
        for own, names in found.items()
    ]


def _own(path: Path) -> str | None:
    """The folder that every host has for itself and that a path is in, by its name or where it leads."""
    ways = (str(path), os.path.realpath(path))
    return next((top for top in OWN for way in ways if way.startswith(f"{top}/")), None)


# --- Python and torch


def judge_places(places: Mapping[str, Path], table: str) -> Check:
    """Whether the nodes have this Python and this package at the same paths."""
    found = "; ".join(f"{name} {path}" for name, path in places.items())
    values = {name: str(path) for name, path in places.items()}
    ways = {str(way): path for path in places.values() for way in (path, Path(os.path.realpath(path)))}
    for way, path in ways.items():
        if own := _own(Path(way)):
            advice = f"install it in a folder that all nodes share: each node has its own {own}"
            return warning("python", f"{path} leads to {way}" if way != str(path) else found, advice, **values)
    for way, path in ways.items():
        mount = folder.mount_of(folder.existing(Path(way).parent), table)
        if mount is not None and mount.shared is False and not way.startswith(tuple(f"{top}/" for top in SYSTEM)):
            advice = "`clusterddp doctor --nodes 2` tests whether the nodes have it, too"
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
        advice = "for GPUs, install a build with CUDA (pytorch.org/get-started); --device cpu needs none"
        return warning("torch", f"{release}, built without CUDA", advice, **values)
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}"
    found = f"{release}, {built}{f', NCCL {nccl}' if nccl else ''}"
    if wanted and not in_range(release, wanted):
        return warning("torch", found, f"clusterddp is tested with torch {wanted}", **values)
    return ok("torch", found, **values)


def nccl_version() -> str:
    """Of the NCCL that pip installed with torch; '' if torch brings its own."""
    for release in (13, 12, 11):
        with suppress(PackageNotFoundError):
            return version(f"nvidia-nccl-cu{release}")
    return ""


def wanted_torch() -> str:
    """The range of torch releases in this package's metadata, such as ``<2.16,>=2.4.1``; '' if not installed."""
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
    """NVIDIA's driver on this host, which needs none."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ok("driver", "no NVIDIA driver on this host, which needs none; `doctor --nodes` checks the nodes'")
    match = re.search(r"\b(\d{3,4}\.\d+(\.\d+)?)\b", text)
    return ok("driver", f"NVIDIA {match[1] if match else 'of an unknown release'} on this host")


def judge_commands(found: Mapping[str, str | None]) -> Check:
    """Which of Slurm's commands are on PATH."""
    missing = [name for name, path in found.items() if path is None]
    if needed := [name for name in missing if name in NEEDED]:
        return failed("commands", f"not on PATH: {', '.join(needed)}", "load the site's Slurm module")
    if missing:
        return ok("commands", f"all required commands are on PATH; missing optional ones: {', '.join(missing)}")
    return ok("commands", f"{', '.join(found)} are on PATH")
