"""Installs what the test cluster needs, on Debian and Ubuntu, with every service kept off.

Runs as a script too (``python3 tests/cluster/install.py``), before anything else is installed: standard library only,
no import from its siblings.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# package -> (programs that must be there, services it would start)
PACKAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "slurmctld": (("slurmctld",), ("slurmctld",)),
    "slurmd": (("slurmd",), ("slurmd",)),
    "slurm-client": (("sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel", "sacct", "sacctmgr"), ()),
    "slurmdbd": (("slurmdbd",), ("slurmdbd",)),
    "munge": (("munged",), ("munge",)),
    "mariadb-server": (("mariadbd", "mariadb-install-db"), ("mariadb",)),
    "iproute2": (("ip",), ()),
    "strace": (("strace",), ()),
    "openmpi-bin": (("mpirun",), ()),
    "shellcheck": (("shellcheck",), ()),
}
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROBE = "ip link add bridge type bridge && ip link add cable type veth peer name other"  # ends with its namespace
MARKER = Path("/var/lib/clusterddp-test-slurm")
POLICY = Path("/usr/sbin/policy-rc.d")
DAEMONS = {"slurmctld", "slurmd", "slurmdbd", "munged", "mysqld", "mariadbd"}
POLICY_SAVED = POLICY.with_name("policy-rc.d.clusterddp")
KEEP_OFF = "#!/bin/sh\n# clusterddp's test cluster is being installed\nexit 101\n"


def unavailable() -> str | None:
    """One line that says why no real Slurm can be had here and how to get one, or None where it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "no real Slurm here: the test cluster needs root on Linux (network namespaces); run the tests as root"
    missing = missing_packages()
    if missing:
        return obstacle() or (
            f"no real Slurm here: {', '.join(missing)} not installed; `make test` or "
            "`python3 tests/cluster/install.py` installs them"
        )
    probe = ["unshare", "--net", "--uts", "--mount", "sh", "-c", PROBE]
    done = subprocess.run(probe, env={"PATH": SEARCH_PATH}, capture_output=True, text=True)
    if done.returncode != 0:
        return f"no real Slurm here: no network namespaces allowed ({done.stderr.strip()}); use a privileged container"
    return None


def missing_packages() -> list[str]:
    return [name for name, (programs, _) in PACKAGES.items() if not all(map(_program, programs))]


def _program(name: str) -> bool:
    return shutil.which(name, path=SEARCH_PATH) is not None


def obstacle() -> str | None:
    """Why nothing may be installed on this machine, in one line, or None."""
    if os.geteuid() != 0:
        return "no real Slurm here: installing it needs root"
    if not is_debian():
        return "no real Slurm here: it is installed by itself on Debian and Ubuntu only; install " + " ".join(PACKAGES)
    found = configured_or_running()
    if found and not MARKER.exists():
        return f"no real Slurm here: {found} belongs to someone else, so nothing is installed; use another machine"
    return None


def is_debian(os_release: str | None = None) -> bool:
    text = _read(Path("/etc/os-release")) if os_release is None else os_release
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    like = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', "").split()
    return bool({"debian", "ubuntu"} & set(like)) and shutil.which("apt-get", path=SEARCH_PATH) is not None


def configured_or_running() -> str | None:
    """A Slurm, munge or MySQL that is in use on this machine, or None."""
    for conf in Path("/etc").glob("slurm*/slurm.conf"):
        return str(conf)
    for entry in Path("/proc").glob("[0-9]*/comm"):
        name = _read(entry).strip()
        if name in DAEMONS:
            return f"a running {name} (process {entry.parent.name})"
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def services_off() -> Iterator[None]:
    """In the block, packages start no service; a previous policy is restored."""
    if POLICY.exists() and POLICY.read_text() != KEEP_OFF:  # else: ours, of an installation that was killed
        POLICY.rename(POLICY_SAVED)
    POLICY.write_text(KEEP_OFF)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
        if POLICY_SAVED.exists():
            POLICY_SAVED.rename(POLICY)


def install(packages: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": SEARCH_PATH}
    quiet = ["apt-get", "-q", "-y", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120"]
    for command in (["update"], ["install", "--no-install-recommends", *packages]):
        done = subprocess.run([*quiet, *command], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"apt-get {command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def disable(services: list[str]) -> None:
    """Keeps what was just installed from starting at the next boot."""
    if services and shutil.which("systemctl", path=SEARCH_PATH):
        subprocess.run(["systemctl", "disable", *services], capture_output=True)


def main() -> int:
    """Exit code 0 also where nothing can be installed: the tests then say that they are skipped, and why."""
    missing = missing_packages()
    if not missing:
        return 0
    reason = obstacle()
    if reason:
        print(reason, file=sys.stderr)
        return 0
    print(f"installing {' '.join(missing)} for the test cluster (services stay off)", file=sys.stderr)
    MARKER.write_text("Slurm, munge and MariaDB were installed for clusterddp's tests; nothing here uses them.\n")
    with services_off():
        install(missing)
    disable([service for name in missing for service in PACKAGES[name][1]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
