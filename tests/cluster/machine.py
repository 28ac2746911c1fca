"""What `up` creates on the machine besides daemons and network, and how all of it is removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from . import config as text
from . import network, release
from .config import USER, ClusterConfig, Site
from .errors import ClusterError
from .install import PACKAGES, SEARCH_PATH
from .state import BOOT, State
from .system import (
    Process,
    bind_read_only,
    command,
    kill_all,
    marked_processes,
    mounts_below,
    network_processes,
    processes,
    unmount_below,
)

REPOSITORY = Path(__file__).resolve().parents[2]
CGROUPS = Path("/sys/fs/cgroup")
NVIDIA_MAJOR = 195
#: Slurm's, for users.
COMMANDS = PACKAGES["slurm-client"][0]


def cgroup_v1() -> bool:
    """Whether proctrack/cgroup can work: it needs the freezer of cgroup v1 (v2 needs systemd)."""
    return os.access(CGROUPS / "freezer" / "cgroup.procs", os.W_OK)


def slurm_version(search_path: str) -> tuple[int, int, int]:
    words = command(["slurmctld", "-V"], env={"PATH": search_path}).split()
    year, month, patch = (int(part) for part in words[-1].split("-")[0].split(".")[:3])
    return year, month, patch


def host_name() -> str:
    return socket.gethostname().split(".")[0]


def make_folders(state: State) -> None:
    """The state folder is a mount of its own, shared, so that a later mount inside is seen on the nodes."""
    root = state.site.root
    root.mkdir(mode=0o755)
    state.save()
    command(["mount", "--bind", str(root), str(root)])
    command(["mount", "--make-shared", str(root)])
    modes = {"etc": 0o755, "log": 0o755, "run": 0o755, "spool": 0o755, "spool/slurmctld": 0o700, "db": 0o700}
    modes |= {"net": 0o755, "dev": 0o755, "mnt": 0o755, "tmp": 0o1777, "home": 0o700, "scratch": 0o755}
    for name, mode in modes.items():
        (root / name).mkdir()
        (root / name).chmod(mode)


def make_user(state: State) -> None:
    """An ordinary user; an existing one is used and kept."""
    if not _user_exists():
        state.user_made = True
        state.save()
        home = str(state.site.root / "home")
        options = ["--system", "--user-group", "--no-create-home", "--home-dir", home, "--shell", "/bin/bash"]
        command(["useradd", *options, USER])
    entry = pwd.getpwnam(USER)
    state.uid, state.gid = entry.pw_uid, entry.pw_gid
    for name in ("home", "scratch"):
        os.chown(state.site.root / name, entry.pw_uid, entry.pw_gid)
    state.save()


def _user_exists() -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(USER))
    return False


def make_devices(state: State) -> None:
    """Character devices in the state folder: Slurm reads their path and number, nobody opens them."""
    for index in range(state.config.gpus):
        os.mknod(state.site.root / "dev" / f"nvidia{index}", stat.S_IFCHR | 0o666, os.makedev(NVIDIA_MAJOR, index))


def write_configuration(state: State) -> None:
    config, site, etc = state.config, state.site, state.site.root / "etc"
    files = {"slurm.conf": text.slurm_conf(config, site), "gres.conf": text.gres_conf(config, site)}
    files |= {"cgroup.conf": text.cgroup_conf(config, site)}
    files |= {"hosts": text.hosts(config, site), "my.cnf": text.my_cnf(site)}
    files |= {"job_submit.lua": text.job_submit_lua()} if config.rules else {}
    for name, content in files.items():
        (etc / name).write_text(content)
        (etc / name).chmod(0o644)
    if config.slurmdbd:
        secret = etc / "slurmdbd.conf"
        secret.touch(0o600)
        secret.write_text(text.slurmdbd_conf(site))


def make_commands(state: State) -> None:
    """Slurm's commands for the user: they find slurm.conf as if that was compiled in."""
    site = state.site
    if not state.config.conf_elsewhere:
        return
    folder = site.root / "bin"
    folder.mkdir()
    for name in COMMANDS:
        program = shutil.which(name, path=site.search_path)
        lines = ["#!/bin/sh", f"SLURM_CONF={site.root}/etc/slurm.conf", "export SLURM_CONF", f'exec {program} "$@"']
        (folder / name).write_text("\n".join(lines) + "\n")
        (folder / name).chmod(0o755)


def show_source(state: State) -> None:
    """The checkout as the user sees it: mounted into the state folder where its own path is closed to the user."""
    if _user_can(state, ["cat", str(REPOSITORY / "tests" / "cluster" / "__init__.py")]):
        state.source = str(REPOSITORY)
        return
    target = state.site.root / "mnt" / "source"
    bind_read_only(REPOSITORY, target)
    state.source = str(target)


def show_python(state: State) -> None:
    """This interpreter with its packages, as the user can run it: itself, or an environment over mounts of it."""
    packages = Path(sysconfig.get_path("purelib"))
    probe = f"import os, encodings; os.listdir({str(packages)!r}); os.chdir({str(REPOSITORY)!r})"
    if _user_can(state, [sys.executable, "-c", probe]):
        state.python = sys.executable
        return
    base, site = state.site.root / "mnt" / "python", state.site.root / "mnt" / "packages"
    bind_read_only(Path(sys.base_prefix), base)
    bind_read_only(packages, site)
    state.python = str(_environment_over(state, base, site))
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        # Its run path names the closed folder; the loader would take the system's libpython of the same minor version.
        state.library_path = str(base / "lib")


def _environment_over(state: State, base: Path, site: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = state.site.root / "venv"
    own = folder / "lib" / version / "site-packages"
    own.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").write_text(f"home = {base}/bin\ninclude-system-site-packages = false\n")
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(base / "bin" / version)
    # The checkout comes first: an editable installation in `site` names a path that is closed to the user.
    (own / "checkout.pth").write_text(f"{state.source}\nimport site; site.addsitedir({str(site)!r})\n")
    return folder / "bin" / "python"


def _user_can(state: State, argv: list[str]) -> bool:
    environment = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8"}
    identity: dict[str, Any] = {"user": state.uid, "group": state.gid, "extra_groups": []}
    try:
        return subprocess.run(argv, cwd="/", env=environment, capture_output=True, **identity).returncode == 0
    except PermissionError:  # the program's own path is closed
        return False


def node_cgroups(nodes: list[str]) -> list[Path]:
    """The cgroups that a slurmd of ours makes, and everything below them, the deepest first."""
    tops = [path for node in nodes for path in (*CGROUPS.glob(f"*/slurm_{node}"), *CGROUPS.glob(f"slurm_{node}"))]
    return [Path(found) for top in tops for found, _, _ in os.walk(top, topdown=False)]


def clear(state: State) -> None:
    """Removes all that this cluster created. The state file goes last, so that a killed `down` can be repeated."""
    root, nodes = state.site.root, state.config.node_names
    kill_all(lambda: ours(state))
    network.clear(nodes)
    unmount_below(root)
    for path in node_cgroups(nodes):
        if str(path) not in state.cgroups_before:
            with contextlib.suppress(OSError):
                path.rmdir()
    if state.user_made:
        _remove_user(state)
    remove_folder(root)


def ours(state: State) -> list[Process]:
    """Every living process of this cluster, and no other: by its mark, its network, its user, or the state file."""
    found = set(marked_processes(state.mark))
    for node in state.config.node_names:
        found.update(network_processes(network.namespace(state.site.root, node)))
    if state.boot == BOOT.read_text().strip():
        found.update(process for process in state.daemons.values() if process.alive())
    if state.user_made and state.uid > 0:
        found.update(process for process in processes() if process.uid() == state.uid)
    return sorted(found, key=lambda process: process.pid)


def _remove_user(state: State) -> None:
    for folder in (Path("/dev/shm"), Path("/tmp")):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                info = path.lstat()
                if info.st_uid == state.uid and info.st_ctime >= state.since:
                    shutil.rmtree(path) if stat.S_ISDIR(info.st_mode) else path.unlink()
    if _user_exists():
        command(["userdel", USER])


def remove_folder(root: Path) -> None:
    """Never follows a mount: the checkout may be mounted inside."""
    unmount_below(root)
    for path in (root / "mnt").glob("*"):
        path.rmdir()  # fails, and stops everything, while something is still mounted on it
    if mounts_below(root):
        raise ClusterError(f"something is mounted below {root}")
    if root.exists():
        shutil.rmtree(root)


def new_site(state_folder: Path, config: ClusterConfig) -> Site:
    if config.proctrack == "cgroup" and not cgroup_v1():
        raise ClusterError("proctrack cgroup was asked for, but cgroup v1 with its freezer is not mounted here")
    if config.memory_limits and not (cgroup_v1() and (CGROUPS / "memory").is_dir()):
        raise ClusterError("memory_limits was asked for, but cgroup v1 with its memory controller is not mounted here")
    site = Site(
        root=state_folder,
        version=(0, 0, 0),
        host=host_name(),
        subnet=network.free_subnet(),
        proctrack=config.proctrack or ("cgroup" if cgroup_v1() else "linuxproc"),
        programs=str(release.programs(config.release)) if config.release else "",
        plugins=str(release.plugins(config.release)) if config.release else "",
    )
    return dataclasses.replace(site, version=slurm_version(site.search_path))
