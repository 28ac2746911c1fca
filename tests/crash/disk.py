"""A disk that keeps no more than it promised: what may be found on it after the machine died at a given call.

A file's data is safe once the file was synced, a folder's names once the folder was synced. Everything else may be
there or not, in any order, each independently; unsynced data may also be cut off or read as zeros. Data that an fsync
failed on is never safe any more: the system may hold for written what it has lost.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.crash.tracing import Call

#: A state of the disk: each path, relative to the root, with its content; None for a folder.
Tree = Mapping[str, "bytes | None"]
_BLOCK = 512
_IGNORED = {"close", "sync_file_range"}


@dataclass(eq=False)
class _Change:
    """One change of a file or a folder, and how safe it is."""

    safe: bool = False
    doubtful: bool = False


@dataclass(eq=False)
class _Data(_Change):
    """Bytes written at an offset; or, without bytes, the file cut or grown to a length."""

    offset: int = 0
    data: bytes | None = None


@dataclass(eq=False)
class _Names(_Change):
    """Names that a folder gets or loses at once (a rename does both)."""

    names: Mapping[str, _Node | None] = field(default_factory=dict)


@dataclass(eq=False)
class _File:
    changes: list[_Data] = field(default_factory=list)

    def content(self, keep: Callable[[_Data], bool] = lambda _: True) -> bytes:
        content = bytearray()
        for change in filter(keep, self.changes):
            if change.data is None:
                content = content[: change.offset].ljust(change.offset, b"\0")
            else:
                content = content.ljust(change.offset, b"\0")
                content[change.offset : change.offset + len(change.data)] = change.data
        return bytes(content)


@dataclass(eq=False)
class _Folder:
    changes: list[_Names] = field(default_factory=list)

    def names(self, keep: Callable[[_Names], bool] = lambda _: True) -> dict[str, _Node]:
        names: dict[str, _Node | None] = {}
        for change in filter(keep, self.changes):
            names |= change.names
        return {name: node for name, node in names.items() if node is not None}


_Node = _File | _Folder


class Disk:
    """What calls below ``root`` make of an empty, safe folder ``root``."""

    def __init__(self, root: str) -> None:
        self._root_path, self._root = root, _Folder()
        self._nodes: list[_Node] = [self._root]
        self._offsets: dict[tuple[int, _Node], int | None] = {}  # by descriptor and file; None: appending

    def apply(self, call: Call) -> bool:
        """Carries out a call; returns whether it changed anything, or what is safe."""
        if call.name in ("fsync", "fdatasync"):
            return self._sync(call)
        if call.error or call.deleted or call.name in _IGNORED:
            return False
        return bool(getattr(self, f"_{call.name.removesuffix('2').removesuffix('at')}", self._unknown)(call))

    # --- the calls

    def _sync(self, call: Call) -> bool:
        assert call.at is not None
        node = self._find(call.at)
        unsafe = [change for change in node.changes if not change.safe and not change.doubtful] if node else []
        for change in unsafe:
            change.safe, change.doubtful = call.error is None, call.error is not None and isinstance(node, _File)
        return bool(unsafe)

    def _open(self, call: Call) -> bool:
        assert call.at is not None and call.descriptor is not None
        node, changed = self._find(call.at), False
        if node is None:
            if "O_CREAT" not in call.flags:
                return False
            node, changed = self._add(call.at, _File()), True
        if isinstance(node, _File):
            if "O_TRUNC" in call.flags and node.content():
                node.changes.append(_Data(offset=0))
                changed = True
            self._offsets[call.descriptor, node] = None if "O_APPEND" in call.flags else 0
        return changed

    _creat = _open

    def _write(self, call: Call) -> bool:
        file = self._file(call)
        assert call.descriptor is not None and call.result is not None
        offset = self._offsets[call.descriptor, file]
        self._put(file, len(file.content()) if offset is None else offset, call)
        if offset is not None:
            self._offsets[call.descriptor, file] = offset + call.result
        return call.result > 0

    _writev = _write

    def _pwrite64(self, call: Call) -> bool:
        self._put(self._file(call), call.numbers[-1], call)
        return bool(call.result)

    def _lseek(self, call: Call) -> bool:
        node = self._find(call.at or "")
        if isinstance(node, _File) and call.descriptor is not None:
            key = call.descriptor, node
            if self._offsets.get(key, 0) is not None:
                self._offsets[key] = call.result or 0
        return False

    def _ftruncate(self, call: Call) -> bool:
        self._file(call).changes.append(_Data(offset=call.numbers[-1]))
        return True

    def _mkdir(self, call: Call) -> bool:
        self._add(call.paths[0], _Folder())
        return True

    def _rename(self, call: Call) -> bool:
        old, new = call.paths
        if posixpath.dirname(old) != posixpath.dirname(new):
            raise NotImplementedError(f"{call}: a rename from one folder to another")
        self._change(old, {posixpath.basename(old): None, posixpath.basename(new): self._find(old)})
        return True

    def _unlink(self, call: Call) -> bool:
        self._change(call.paths[0], {posixpath.basename(call.paths[0]): None})
        return True

    _rmdir = _unlink

    def _mmap(self, call: Call) -> bool:
        if {"PROT_WRITE", "MAP_SHARED"} <= call.flags:
            self._unknown(call)
        return False

    def _unknown(self, call: Call) -> bool:
        raise NotImplementedError(f"{call}: this model of a disk does not know the call")

    def _put(self, file: _File, offset: int, call: Call) -> None:
        data = call.data[: call.result]
        assert len(data) == call.result, f"{call}: recorded {len(data)} bytes of {call.result}"
        file.changes.append(_Data(offset=offset, data=data))

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for name in self._parts(path):
            node = node.names().get(name) if isinstance(node, _Folder) else None
        return node

    def _file(self, call: Call) -> _File:
        file = self._find(call.at or "")
        assert isinstance(file, _File), call
        return file

    def _add(self, path: str, node: _Node) -> _Node:
        self._nodes.append(node)
        self._change(path, {posixpath.basename(path): node})
        return node

    def _change(self, path: str, names: Mapping[str, _Node | None]) -> None:
        folder = self._find(posixpath.dirname(path))
        assert isinstance(folder, _Folder), path
        folder.changes.append(_Names(names=names))

    def _parts(self, path: str) -> list[str]:
        relative = posixpath.relpath(path, self._root_path)
        return [] if relative == "." else relative.split("/")

    # --- what may be left

    def states(self) -> Iterator[Tree]:
        """A bounded set of the worst: everything unsafe gone or kept, each single thing gone or kept, data torn."""
        names = [change for node in self._nodes if isinstance(node, _Folder) for change in node.changes]
        names = [change for change in names if not change.safe]
        files = [node for node in self._nodes if isinstance(node, _File) if not all(c.safe for c in node.changes)]
        everything: set[_Names | _File] = {*names, *files}
        yield self._tree(everything)
        yield self._tree(set())
        for single in everything:
            yield self._tree({single})
            yield self._tree(everything - {single})
        for loss in (_torn, _zeros, _hole):
            yield self._tree(everything, dict.fromkeys(files, loss))
            for file in files:
                yield self._tree(everything, {file: loss})

    def _tree(self, kept: set[_Names | _File], losses: Mapping[_File, Callable[[_File], bytes]] | None = None) -> Tree:
        tree: dict[str, bytes | None] = {}

        def walk(folder: _Folder, path: str) -> None:
            for name, node in folder.names(lambda change: change.safe or change in kept).items():
                tree[path + name] = None if isinstance(node, _Folder) else content(node)
                if isinstance(node, _Folder):
                    walk(node, f"{path}{name}/")

        def content(file: _File) -> bytes:
            if file not in kept:
                return file.content(lambda change: change.safe)
            return (losses or {}).get(file, _File.content)(file)

        walk(self._root, "")
        return tree


def _torn(file: _File) -> bytes:
    """The first half of the unsafe changes, and half of the data of the next."""
    unsafe = [change for change in file.changes if not change.safe]
    before, middle = unsafe[: len(unsafe) // 2], unsafe[len(unsafe) // 2]
    half = middle if middle.data is None else replace(middle, data=middle.data[: len(middle.data) // 2])
    kept = [change for change in file.changes if change.safe or change in before or change is middle]
    return _File([half if change is middle else change for change in kept]).content()


def _zeros(file: _File) -> bytes:
    """The file's length is there, its unsafe data is not."""
    return _blank(file, lambda unsafe: unsafe)


def _hole(file: _File) -> bytes:
    """Of the unsafe data, the first block is not there."""
    return _blank(file, lambda unsafe: unsafe[: _BLOCK - unsafe[0] % _BLOCK])


def _blank(file: _File, lost: Callable[[Sequence[int]], Sequence[int]]) -> bytes:
    content, safe = file.content(), file.content(lambda change: change.safe)
    first = next((i for i, (new, old) in enumerate(zip(content, safe, strict=False)) if new != old), None)
    first = min(len(content), len(safe)) if first is None else first
    positions = lost(range(first, len(content))) if first < len(content) else ()
    blank = bytearray(content)
    for position in positions:
        blank[position] = 0
    return bytes(blank)
