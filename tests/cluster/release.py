"""The Slurm of another Debian release, beside the machine's own.

Debian's own tool unpacks the release into a folder. Its Slurm does not live in there (no chroot): the daemons and
commands are copies on the machine's own root, changed in two places: they start with the release's dynamic loader and
look for libraries in the release's folders (an RPATH, which also holds for what their plugins need). What they execute,
a task above all, is the machine's: its Python, its C library, its /tmp, with nothing set in the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import ClusterError
from .install import SEARCH_PATH, is_debian, services_off
from .install import install as install_packages
from .system import command, unmount_below

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge")
TOOLS = ("debootstrap", "patchelf")
CACHE = Path("/var/cache")
# The registry that apt takes the machine's own packages from.
MIRRORS = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"]


def folder(release: str) -> Path:
    """What `install` makes: `root` as Debian made it, `bin` with the programs as they run here."""
    return CACHE / f"clusterddp-{release}"


def programs(release: str) -> Path:
    return folder(release) / "bin"


def plugins(release: str) -> Path:
    return next(_libraries(folder(release) / "root").glob("slurm*/auth_munge.so")).parent


def missing(release: str) -> str | None:
    """One line that says how to get it, or None where it is."""
    if programs(release).is_dir():
        return None
    return f"no Slurm of {release} here: `python -m tests.cluster install --release {release}` (as root) gets it"


def install(release: str) -> None:
    """About a minute, 250 MB; nothing to do where it is already."""
    if os.geteuid() != 0 or not is_debian():
        raise ClusterError(f"the Slurm of {release} can be got by root on Debian alone")
    with _alone():
        if not missing(release):
            return
        print(f"getting the Slurm of {release} into {folder(release)}", file=sys.stderr)
        if any(shutil.which(tool, path=SEARCH_PATH) is None for tool in TOOLS):
            with services_off():
                install_packages(list(TOOLS))
        _make(release)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One at a time on this machine; the lock goes with the process."""
    descriptor = os.open(CACHE, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(release: str) -> None:
    """`bin` is created last, atomically: a killed installation leaves none."""
    top = folder(release)
    if top.exists():
        unmount_below(top)  # debootstrap mounts /proc inside
        shutil.rmtree(top)
    top.mkdir(mode=0o755)
    root, partial = top / "root", top / "bin.new"
    include = f"--include={','.join(PACKAGES)}"
    command(["debootstrap", "--variant=minbase", include, release, str(root), _mirror()], timeout=900)
    shutil.rmtree(root / "var" / "cache" / "apt")
    partial.mkdir(mode=0o755)
    for program in _packaged(root):
        _transplant(root, program, partial)
    partial.rename(programs(release))


def _mirror() -> str:
    found = command(MIRRORS).split()
    if not found:
        raise ClusterError("apt's sources name no registry of Debian, or were never read (apt-get update)")
    return found[0]


def _packaged(root: Path) -> list[Path]:
    """The programs of PACKAGES, as paths inside `root`: not the links, which would lead out of it."""
    lists = [(root / "var/lib/dpkg/info" / f"{package}.list").read_text() for package in PACKAGES]
    names = [name for text in lists for name in text.splitlines() if name.startswith(("/usr/bin/", "/usr/sbin/"))]
    return [path for path in (root / name[1:] for name in names) if path.is_file() and not path.is_symlink()]


def _transplant(root: Path, program: Path, target: Path) -> None:
    """A copy that runs on the machine's own root; Debian calls slurmd and its like slurmd-wlm."""
    copy = target / program.name.removesuffix("-wlm")
    shutil.copy2(program, copy)
    loader = f"{root}{command(['patchelf', '--print-interpreter', str(copy)]).strip()}"
    libraries = _libraries(root)
    path = ":".join(map(str, [*libraries.glob("slurm*"), libraries]))
    command(["patchelf", "--set-interpreter", loader, "--force-rpath", "--set-rpath", path, str(copy)])


def _libraries(root: Path) -> Path:
    return next((root / "usr" / "lib").glob("*-linux-gnu*"))
