"""The run directory in memory: what ``clusterddp/rundir/files.py`` and ``sharing.make_private`` do, without a disk.

Renaming and exclusive creation are atomic on the server. A node that has looked into a folder may for a while not see
what others add there, as with the attribute cache of NFS, until it changes something there itself; an operation may be
slow or fail, and a process may be killed between any two steps of one.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from clusterddp.rundir.files import finite
from tests.simulation.world import EPOCH, Killed, World


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

    # --- what goes wrong

    def _step(self, path: Path, write: bool = False) -> None:
        """A point at which the process may be switched or killed, and the operation may fail."""
        world = self.world
        thread = world.thread
        if thread is None:
            return
        if not thread.process.alive:
            raise Killed
        if self.slow and world.random.random() < self.slow:
            world.sleep(world.random.expovariate(2.0))
        if self.broken[0] > world.now:
            _, code, percent = self.broken
            if (write or code != errno.ENOSPC) and world.random.random() * 100 < percent:
                raise OSError(code, os.strerror(code), str(path))

    def _seen(self, path: str) -> Node | None:
        """What the calling node sees there."""
        node, thread = self.nodes.get(path), self.world.thread
        if not self.lag_s or thread is None:
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
        return looked

    def _there(self, path: Path) -> Node:
        node = self._seen(str(path))
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node

    def _add(self, name: str, folder: bool = False) -> Node:
        folder_above = _above(name)
        above = self.nodes.get(folder_above)
        if above is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        self._inodes += 1
        where = self.world.process.node if self.world.thread is not None else ""
        node = self.nodes[name] = Node(self._inodes, self.world.now, where, folder)
        above.names[_name(name)] = None
        self._looked[where, folder_above] = self.world.now
        return node

    def _remove(self, name: str) -> None:
        if self.world.thread is not None:
            self._looked[self.world.process.node, _above(name)] = self.world.now
        if self.nodes.pop(name, None) is not None:
            self.nodes[_above(name)].names.pop(_name(name), None)

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
        temporary = self._temporary_of(path)
        try:
            self._step(path, write=True)
        except Exception:
            self._remove(temporary)
            raise
        self.nodes[temporary].data = content.encode() if isinstance(content, str) else content
        self._move(temporary, str(path))

    def _temporary_of(self, path: Path) -> str:
        """A new file beside one that it is to replace."""
        self._temporary += 1
        name = str(path)
        temporary = f"{_above(name)}/.{_name(name)}.{self._temporary:08x}.tmp"
        self._step(path, write=True)
        self._add(temporary)
        return temporary

    @contextmanager
    def replacing(self, path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
        """As in files.py."""
        temporary = self._temporary_of(path)
        file = io.BytesIO()
        try:
            yield file
            self._step(path, write=True)
        except Exception:
            self._remove(temporary)
            raise
        self.nodes[temporary].data = file.getvalue()
        self._move(temporary, str(path))

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

    def write_json(self, path: Path, value: Mapping[str, Any], mode: int | None = None) -> None:
        """As in files.py."""
        self.write_atomically(path, json.dumps(value), mode)

    def append_line(self, path: Path, value: Mapping[str, Any]) -> None:
        """As in files.py: of a process that is killed meanwhile, a part of the line stays."""
        self._step(path, write=True)
        node = self.nodes.get(str(path)) or self._add(str(path))
        before, data = node.data, (_ENCODER.encode(finite(value)) + "\n").encode()
        if self.slow and self.world.random.random() < self.slow:
            node.data = before + data[: len(data) // 2]
            try:
                self._step(path, write=True)
            except OSError:
                node.data = before
                raise
        node.data, node.changed = before + data, self.world.now

    def remove(self, path: Path) -> None:
        """As in files.py."""
        self.unlink(path)

    def unlink(self, path: Path) -> None:
        """As in files.py."""
        self._step(path, write=True)
        self._remove(str(path))

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
        return True

    def exists(self, path: Path) -> bool:
        """As in files.py."""
        self._step(path)
        return self._seen(str(path)) is not None

    def status(self, path: Path) -> Any:
        """As in files.py."""
        self._step(path)
        node = self._there(path)
        return Status(node.inode, EPOCH + node.changed, len(node.data))

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
        return _Open(self._there(path))

    def fsync_directory(self, path: Path) -> None:
        """As in files.py."""


#: As in files.py.
_ENCODER = json.JSONEncoder(allow_nan=False)


@cache
def _name(path: str) -> str:
    """The last part of a path."""
    return path.rpartition("/")[2]


@cache
def _above(path: str) -> str:
    """The folder that a path is in."""
    return path.rpartition("/")[0] or "/"


class _Open(io.BytesIO):
    """An open file, whose end may be cut off."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.data)
        self._node = node

    def truncate(self, size: int | None = None) -> int:
        """As of a file."""
        self._node.data = self._node.data[:size]
        return super().truncate(size)
