"""A folder that all nodes must share: its file system, the time of a durable write, whether others' files appear.

Files are looked up by name. On NFS a listing may be a minute old, but a new name is always requested.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.rundir.files import write_atomically

#: File systems that several hosts mount, and those that only one host has. Others are unknown.
SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "smb3", "panfs", "pvfs2", "orangefs"),
    *("afs", "wekafs", "glusterfs", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs", "fuse.quobyte", "quobyte", "dvs"),
    *(
        "ocfs2",
        "gfs2",
        "9p",
        "virtiofs",
        "daos",
        "fuse.daos",
        "fuse.dfuse",
        "fuse.beegfs",
        "fuse.moosefs",
        "fuse.cvmfs2",
    ),
    *("vastfs", "fuse.gcsfuse", "fuse.mount-s3", "fuse.s3fs", "fuse.goofys", "fhgfs", "stornext", "cvfs"),
}
LOCAL = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "vfat", "exfat", "ntfs"),
    *("tmpfs", "ramfs", "overlay", "squashfs", "iso9660", "devtmpfs", "fuse.squashfuse", "fuse.fuse-overlayfs"),
}
#: The number of durable writes to time, and the seconds of one above which a check warns.
WRITES, SLOW_S = 5, 1.0


@dataclass(frozen=True)
class Mount:
    """A line of the mount table: where, the file system's type, and what is mounted."""

    point: str
    kind: str
    source: str

    @property
    def shared(self) -> bool | None:
        """Whether other hosts can mount the same, or None if the type is unknown."""
        return self.kind in SHARED if self.kind in SHARED | LOCAL else None


def mount_of(path: Path, table: str) -> Mount | None:
    """The mount that holds an absolute, resolved path, from the text of /proc/self/mountinfo (proc(5))."""
    best: Mount | None = None
    for line in table.splitlines():
        before, dash, after = line.partition(" - ")
        here, there = before.split(), after.split()
        if not dash or len(here) < 5 or len(there) < 2:
            continue
        mount = Mount(_unescaped(here[4]), there[0], _unescaped(there[1]))
        # A later mount at the same place hides the earlier one.
        if Path(mount.point) in (path, *path.parents) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _unescaped(text: str) -> str:
    """Blanks and backslashes in the mount table are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def write_s(path: Path, content: str) -> float:
    """Seconds that a durable write of a small file takes (write, fsync, rename, fsync of the folder): the median.

    The file stays. Raises OSError.
    """
    seconds = []
    for _ in range(WRITES):
        started = time.monotonic()
        write_atomically(path, content, mode=0o600)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def unseen(files: Mapping[Path, str], timeout_s: float) -> list[Path]:
    """Waits until all files are here with their contents. Returns those that are not after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while left := [path for path, content in files.items() if not _holds(path, content)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def _holds(path: Path, content: str) -> bool:
    try:
        return path.read_text() == content
    except (OSError, UnicodeDecodeError):
        return False


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists, with symbolic links resolved."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return Path(os.path.realpath(path))


#: Folders that every host has for itself.
OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root")
MOUNTS = Path("/proc/self/mountinfo")


def only_here(places: Mapping[str, Path]) -> list[str]:
    """Warnings about paths that probably only this host has. ``places``: the paths, each with its meaning."""
    table = MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
    found: dict[str, list[str]] = {}
    for what, path in places.items():
        mount = mount_of(existing(Path(os.path.realpath(path))), table)
        if (own := own_place(path)) and (mount is None or not mount.shared):
            found.setdefault(own, []).append(f"{what} ({path})")
    return [
        f"{', '.join(names)}: usually each node has its own {own}, in which case the job fails at once. "
        "Use a folder that all nodes share"
        for own, names in found.items()
    ]


def own_place(path: Path) -> str | None:
    """The folder that every host has for itself and that a path is in, by its name or where it leads."""
    ways = (str(path), os.path.realpath(path))
    return next((top for top in OWN for way in ways if way.startswith(f"{top}/")), None)
