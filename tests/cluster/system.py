"""Processes, mounts and waiting: the machine, as /proc shows it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError
from .install import SEARCH_PATH

# In the environment of every process that the cluster starts; its value is the cluster's own id.
MARK = "CLUSTERDDP_TEST_CLUSTER"


@dataclass(frozen=True)
class Process:
    """A process and when it began, in clock ticks since boot: together they are never reused before a reboot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """None if it has exited, also when it is not yet reaped."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may hold blanks and parentheses
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def command(self) -> str:
        return _read_bytes(f"/proc/{self.pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()

    def parent(self) -> int | None:
        """Its parent's pid; None if it has exited."""
        stat = _read_bytes(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()
        return int(stat[1]) if stat else None

    def environment(self) -> list[bytes]:
        return _read_bytes(f"/proc/{self.pid}/environ").split(b"\0")

    def uid(self) -> int | None:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}").stat().st_uid
        return None

    def network(self) -> int | None:
        """The inode of its network namespace."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/ns/net").stat().st_ino
        return None


def processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        process = Process.of(int(entry)) if entry.isdigit() else None
        if process and process.pid != os.getpid():
            yield process


def marked_processes(mark: str) -> list[Process]:
    wanted = f"{MARK}={mark}".encode()
    return [process for process in processes() if wanted in process.environment()]


def network_processes(namespace: Path) -> list[Process]:
    """The processes inside a network namespace of ours; none when it is not mounted any more."""
    try:
        inode, outside = namespace.stat().st_ino, Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return []
    # A file that is not (or no longer) a mounted namespace has an ordinary inode number, which may equal any other.
    if inode == outside or str(namespace) not in mounts_below(namespace):
        return []
    return [process for process in processes() if process.network() == inode]


def kill_all(find: Callable[[], list[Process]], timeout: float = 10) -> None:
    """Kills what `find` finds until it finds nothing: a process may have forked before it was killed."""
    deadline = time.monotonic() + timeout
    while found := find():
        if time.monotonic() > deadline:
            raise ClusterError("these processes do not die: " + ", ".join(f"{p.pid} {p.command()}" for p in found))
        for process in found:
            process.kill()
        time.sleep(0.01)


def mounts_below(root: Path) -> list[str]:
    """Mount points at or below `root`, the latest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    unescaped = [point.encode().decode("unicode_escape") if "\\" in point else point for point in points]
    return [point for point in reversed(unescaped) if point == str(root) or point.startswith(f"{root}/")]


def unmount_below(root: Path) -> None:
    for point in mounts_below(root):
        if subprocess.run(["umount", point], capture_output=True).returncode != 0:
            subprocess.run(["umount", "--lazy", point], capture_output=True)
    left = mounts_below(root)
    if left:
        raise ClusterError(f"cannot unmount {', '.join(left)}")


def bind_read_only(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    command(["mount", "--bind", str(source), str(target)])
    command(["mount", "-o", "remount,bind,ro", str(target)])


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers Ctrl-C and TERM to the end of the block: a second one must not stop the cleanup that the first began."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def command(
    argv: Sequence[str], *, stdin: str | None = None, env: Mapping[str, str] | None = None, timeout: float = 60
) -> str:
    """Runs a program as root and returns its output; a failure is a ClusterError that shows what it said."""
    environment = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8", **(env or {})}
    done = subprocess.run(argv, input=stdin, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_until(condition: Callable[[], object], timeout: float, interval: float = 0.03) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def tail(path: Path, lines: int = 15) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return f"({path} is not there)"


def _read_bytes(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""
