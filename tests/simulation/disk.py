"""The run directory in memory: what ``clusterddp/rundir/files.py`` and ``sharing.make_private`` do, without a disk.

Renaming and exclusive creation are atomic on the server. A node that has looked into a folder may for a while not see
what others add there, as with the attribute cache of NFS, until it changes something there itself; an operation may be
slow or fail, and a process may be killed between any two steps of one.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from json.encoder import c_make_encoder  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from clusterddp.rundir.files import finite
from clusterddp.rundir.run_directory import RunDirectory
from tests.simulation.world import EPOCH, Killed, Process, World

#: What `remembered` functions do not read: checkpoints, and files that grow with each step.
UNSEEN, UNREAD = "/checkpoints/", ("/metrics.jsonl", "/timing.jsonl")
#: What they do read: claims; files in the run's folder; these, and what is added to them; which attempts have folders;
#: all of it, and what grows with each step.
CLAIMS, FILES, LINES, ATTEMPTS, ALL = range(5)
_MISSING = os.strerror(errno.ENOENT)


@dataclass
class Node:
    """A file or a folder. ``node``: where it was created, from which it is visible at once."""

    inode: int
    created: float
    node: str
    folder: bool = False
    data: bytes = b""
    changed: float = 0.0
    names: dict[str, None] = field(default_factory=dict)
    #: What `os.stat` told last.
    status: Status | None = None


class Status(NamedTuple):
    """What ``os.stat`` tells."""

    st_ino: int
    st_mtime: float
    st_size: int
    st_uid: int = os.geteuid()
    st_gid: int = os.getegid()


class Disk:
    """The shared file system. ``lag_s``: for how long a node believes what it has seen of a folder."""

    def begin(self, world: World, lag_s: float = 0.0, slow: float = 0.0) -> None:
        """An empty disk. Histories share the object, as its methods are put in many places."""
        self.world, self.lag_s, self.slow = world, lag_s, slow
        self.nodes: dict[str, Node] = {"/": Node(1, 0.0, "", folder=True)}
        self._inodes = 1
        #: When each node looked into a folder.
        self._looked: dict[tuple[str, str], float] = {}
        #: Until when operations fail, with which error, and how many of a hundred.
        self.broken: tuple[float, int, int] = (0.0, 0, 0)
        self._temporary = 0
        #: Who holds a file's lock.
        self.locks: dict[str, Process | None] = {}
        #: Counts the changes of what `remembered` functions read.
        self.changes = [0, 0, 0, 0, 0]
        #: What they found, at which number of changes, in how many steps, and when the first folder was looked into.
        self._known: dict[tuple[str, str, str], tuple[Any, int, int, float]] = {}
        #: How many steps were made so far, and when the first of the folders that count was looked into.
        self._steps, self._oldest = 0, math.inf
        #: Draws of slow steps that are made already.
        self._drawn: list[float] = []

    # --- what goes wrong

    def _step(self, path: Path, write: bool = False) -> None:
        """A point at which the process may be switched or killed, and the operation may fail."""
        world = self.world
        thread = world.thread
        if thread is None:
            return
        if not thread.process.alive:
            raise Killed
        self._steps += 1
        if self.slow and (self._drawn.pop() if self._drawn else world.random.random()) < self.slow:
            world.sleep(world.random.expovariate(2.0))
        if self.broken[0] > world.now:
            _, code, percent = self.broken
            if (write or code != errno.ENOSPC) and world.random.random() * 100 < percent:
                raise OSError(code, os.strerror(code), str(path))

    def remembered(
        self,
        read: Callable[[RunDirectory], Any],
        run: RunDirectory,
        copied: Callable[[Any], Any],
        what: int,
        name: str,
    ) -> Any:
        """What ``read(run)`` returns, which only reads; the same as before, without reading, if nothing has changed.

        ``what`` it reads: one of the numbers above. ``name``: of the function.
        """
        world = self.world
        thread = world.thread
        if thread is None or not thread.process.alive or self.broken[0] > world.now:
            return read(run)
        key = (thread.process.node, name, str(run.path))
        now = self.changes[what]
        known = self._known.get(key)
        if known is not None:
            found, changes, steps, looked = known
            is_same = changes == now and world.now - looked < self.lag_s
            if is_same and (not self.slow or (not self._drawn and self._is_quick(steps))):
                self._steps += steps
                if looked < self._oldest:
                    self._oldest = looked
                return copied(found)
        outer, self._oldest = self._oldest, math.inf
        wait, steps = thread.wait, self._steps
        try:
            found = read(run)
            if thread.wait == wait:  # else others have run meanwhile
                self._known[key] = copied(found), now, self._steps - steps, self._oldest
        finally:
            if outer < self._oldest:
                self._oldest = outer
        return found

    def _is_quick(self, steps: int) -> bool:
        """Whether none of so many steps is slow. If one is, they are drawn already for who makes them."""
        drawn = []
        for _ in range(steps):
            drawn.append(self.world.random.random())
            if drawn[-1] < self.slow:
                self._drawn = drawn[::-1]
                return False
        return True

    def _seen(self, path: str) -> Node | None:
        """What the calling node sees there."""
        node = self.nodes.get(path)
        if not self.lag_s or (thread := self.world.thread) is None:
            return node
        here = thread.process.node
        looked = self._looked_at(here, _above(path))
        return None if node is None or (node.created > looked and node.node != here) else node

    def _looked_at(self, here: str, folder: str) -> float:
        """When a node has looked into a folder, which may be now."""
        now = self.world.now
        looked = self._looked.get((here, folder), -1e9)
        if now - looked >= self.lag_s:
            looked = self._looked[here, folder] = now
        if looked < self._oldest:
            self._oldest = looked
        return looked

    def _there(self, path: Path) -> Node:
        node = self._seen(str(path))
        if node is None:
            raise FileNotFoundError(errno.ENOENT, _MISSING, str(path))
        return node

    def _add(self, name: str, folder: bool = False) -> Node:
        folder_above = _above(name)
        above = self.nodes.get(folder_above)
        if above is None:
            raise FileNotFoundError(errno.ENOENT, _MISSING, name)
        self._inodes += 1
        where = self.world.process.node if self.world.thread is not None else ""
        node = self.nodes[name] = Node(self._inodes, self.world.now, where, folder)
        above.names[_name(name)] = None
        self._looked[where, folder_above] = self.world.now
        self._change(name)
        return node

    def _remove(self, name: str) -> None:
        if self.world.thread is not None:
            self._looked[self.world.process.node, _above(name)] = self.world.now
        if self.nodes.pop(name, None) is not None:
            self.nodes[_above(name)].names.pop(_name(name), None)
        self._change(name)

    def _change(self, name: str) -> None:
        if UNSEEN in name:
            return
        self.changes[ALL] += 1
        if "/private" in name or "/logs" in name:
            self.changes[CLAIMS] += 1
            self.changes[ATTEMPTS] += _above(name).endswith(("/private", "/logs"))
        else:
            self.changes[FILES] += 1
            self.changes[LINES] += 1

    # --- clusterddp/rundir/files.py

    def mkdir(self, path: Path, exist_ok: bool = False) -> None:
        """An exclusive mkdir."""
        self._step(path, write=True)
        if str(path) in self.nodes:
            if exist_ok:
                return
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._add(str(path), folder=True)

    def create_folder(self, path: Path, exist_ok: bool = False) -> None:
        """As in files.py."""
        self.mkdir(path, exist_ok)

    def create_common_folder(self, path: Path) -> None:
        self.mkdir(path, exist_ok=True)

    def make_folder(self, path: Path, exist_ok: bool = True, mode: int = 0o777) -> None:
        """As in files.py."""
        if str(path.parent) not in self.nodes:
            self.make_folder(path.parent)
        self.mkdir(path, exist_ok)

    def make_private(self, path: Path) -> None:
        """As in sharing.py."""
        self.mkdir(path, exist_ok=True)

    def write_atomically(self, path: Path, content: str | bytes, mode: int | None = None) -> None:
        """As in files.py."""
        self._temporary += 1
        name = str(path)
        temporary = f"{_above(name)}/.{_name(name)}.{self._temporary:08x}.tmp"
        self._step(path, write=True)
        self._add(temporary)
        try:
            self._step(path, write=True)
        except Exception:
            self._remove(temporary)
            raise
        self.nodes[temporary].data = content.encode() if isinstance(content, str) else content
        self._move(temporary, name)

    def _move(self, old: str, new: str) -> None:
        node = self.nodes[old]
        before = self.nodes.get(new)
        self._remove(old)
        if before is not None:  # the name is known already
            node.created, node.node = before.created, before.node
        else:
            node.created = self.world.now
        node.changed = self.world.now
        self.nodes[new] = node
        self.nodes[_above(new)].names[_name(new)] = None
        self._change(new)

    def write_in_place(self, path: Path, data: bytes, seconds: float) -> None:
        """As a script does: whoever opens the file meanwhile finds a part of it, and so it stays if the script dies."""
        self._step(path, write=True)
        node = self.nodes.get(str(path)) or self._add(str(path))
        node.data, node.changed = data[: len(data) // 2], self.world.now
        self.world.sleep(seconds)
        self._step(path, write=True)
        node.data, node.changed = data, self.world.now

    def write_json(self, path: Path, value: Mapping[str, Any], mode: int | None = None) -> None:
        """As in files.py."""
        self.write_atomically(path, "".join(_ENCODE(value, 0)), mode)

    def append_line(self, path: Path, value: Mapping[str, Any]) -> None:
        """As in files.py: of a process that is killed meanwhile, a part of the line stays."""
        self._step(path, write=True)
        name = str(path)
        node = self.nodes.get(name) or self._add(name)
        seen = not name.endswith(UNREAD)
        self.changes[LINES] += seen
        self.changes[ALL] += 1
        before, data = node.data, f"{_encoded(value)}\n".encode()
        if self.slow and self.world.random.random() < self.slow:
            node.data = before + data[: len(data) // 2]
            try:
                self._step(path, write=True)
            except OSError:
                node.data = before
                raise
        # What another node has appended meanwhile is overwritten, as on NFS, whose clients write at the end they knew.
        at = len(before)
        node.data, node.changed = node.data[:at] + data + node.data[at + len(data) :], self.world.now
        self.changes[LINES] += seen
        self.changes[ALL] += 1

    def remove(self, path: Path) -> None:
        """As in files.py."""
        self.unlink(path)

    def unlink(self, path: Path) -> None:
        """As in files.py."""
        self._step(path, write=True)
        self._remove(str(path))

    def remove_empty(self, folder: Path) -> None:
        """As in sharded/folder.py."""
        try:
            self._step(folder, write=True)
        except OSError:
            return
        if (node := self.nodes.get(str(folder))) is not None and not node.names:
            self._remove(str(folder))

    def rename(self, old: Path, new: Path) -> None:
        """As in files.py."""
        self._step(new, write=True)
        self._there(old)
        self._move(str(old), str(new))

    def create_exclusively(self, path: Path, content: str, mode: int) -> bool:
        """As in files.py."""
        self._step(path, write=True)
        if str(path) in self.nodes:
            return False
        node = self._add(str(path))
        self._step(path)
        node.data, node.changed = content.encode(), self.world.now
        self._change(str(path))
        return True

    def exists(self, path: Path) -> bool:
        """As in files.py."""
        self._step(path)
        return self._seen(str(path)) is not None

    def status(self, path: Path) -> Any:
        """As in files.py."""
        self._step(path)
        node = self._there(path)
        status, changed, size = node.status, EPOCH + node.changed, len(node.data)
        if status is None or status.st_mtime != changed or status.st_size != size:
            status = node.status = Status(node.inode, changed, size)
        return status

    def size(self, path: Path) -> int:
        """``_size`` of polling.py: -1 of a file that cannot be seen."""
        try:
            self._step(path)
        except OSError:
            return -1
        node = self._seen(str(path))
        return -1 if node is None else len(node.data)

    def resolved(self, path: Path) -> str:
        """As in files.py."""
        return str(path)

    def names_in(self, folder: Path) -> list[str]:
        """As in files.py."""
        self._step(folder)
        names = self._there(folder).names
        if not self.lag_s or self.world.thread is None:
            return list(names)
        path, here = str(folder), self.world.thread.process.node
        looked = self._looked_at(here, path)
        nodes = ((name, self.nodes[f"{path}/{name}"]) for name in names)
        return [name for name, node in nodes if node.created <= looked or node.node == here]

    def read_bytes(self, path: Path) -> bytes:
        """As in files.py."""
        self._step(path)
        return self._there(path).data

    def open_binary(self, path: Path, change: bool = False, buffered: bool = True) -> BinaryIO:
        """As in files.py."""
        self._step(path)
        return _Open(self, self._there(path))

    def fsync_directory(self, path: Path) -> None:
        """As in files.py."""


#: ``json.dumps(value, allow_nan=False)``, made once.
_ENCODE = c_make_encoder(None, None, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, False)


def _encoded(value: Mapping[str, Any]) -> str:
    """As in files.py. Few values are not finite."""
    try:
        return "".join(_ENCODE(value, 0))
    except (ValueError, TypeError):
        return "".join(_ENCODE(finite(value), 0))


@cache
def _name(path: str) -> str:
    """The last part of a path."""
    return path.rpartition("/")[2]


@cache
def _above(path: str) -> str:
    """The folder that a path is in."""
    return path.rpartition("/")[0] or "/"


_EMPTY = os.open(os.devnull, os.O_RDONLY)


class _Open(io.BytesIO):
    """An open file, whose end may be cut off."""

    def __init__(self, disk: Disk, node: Node) -> None:
        super().__init__(node.data)
        self._disk, self._node = disk, node

    def fileno(self) -> int:
        """Of an empty file: what is refused for its size or its holes is not simulated."""
        return _EMPTY

    def truncate(self, size: int | None = None) -> int:
        """As of a file."""
        self._node.data = self._node.data[:size]
        self._disk.changes[LINES] += 1
        self._disk.changes[ALL] += 1
        return super().truncate(size)
