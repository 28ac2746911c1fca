"""The format of a checkpoint file: reads, writes and verifies its bytes, without torch.

The file is a valid safetensors file: eight bytes with the length of the header (little endian), the header (JSON), and
the data of all tensors. The header has each tensor's ``dtype``, ``shape`` and ``data_offsets``. Its ``__metadata__``
has ``format`` (``clusterddp 2``), ``step``, ``attempt``, ``metrics`` and ``state``: the nested state as JSON, with
``{"$tensor": NAME}`` in place of each tensor. The last tensor, ``checksums``, holds a CRC-32 of all bytes before the
data, and one of each 4 MiB of the data before itself. Reading a file executes no code from it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from clusterddp.rundir.files import open_binary, open_file

FORMAT = "clusterddp 2"
#: Bytes of data per checksum.
CHUNK = 1 << 22
#: Bytes per write. The disk starts on the first piece while the next is written.
_PIECE = 1 << 20
#: Bytes per read when a file is verified, which fit into a core's cache.
BUFFER = 1 << 18
#: The most threads that read a file. One computes checksums at 3 to 7 GB/s, and shared disks need parallel requests.
_READERS = 4
#: The least bytes per thread. Three threads take as long for 10 MB as one.
_PER_READER = 1 << 24
_CHECKSUMS = "checksums"
LONGEST_HEADER = 100_000_000  # the limit of safetensors
#: Starts a piece of work, in this or a different thread. The returned function waits for its result.
Begin = Callable[[Callable[[], Any]], Callable[[], Any]]
#: The target of data: memory, in one piece or several, the file of this descriptor, or None to only verify it.
Into: TypeAlias = "memoryview | Pieces | int | None"
_LENGTH = struct.Struct("<Q")


class Pieces(Protocol):
    """Memory in several pieces."""

    def views(self, start: int, stop: int) -> Iterable[memoryview]: ...


class Damaged(Exception):
    """A file is truncated, altered, or not a checkpoint."""


class Tensor(NamedTuple):  # a save makes and compares one per tensor, while training waits
    """A tensor's name, its dtype as safetensors names it (``F32``), its shape, and the bytes per element."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.item_bytes * math.prod(self.shape)


@dataclass(frozen=True)
class Content:
    """The content of a file: header entries by tensor name, metadata (``facts``), state, and data."""

    entries: dict[str, dict[str, Any]]
    facts: dict[str, str]
    state: Any
    data: mmap.mmap | Pieces


@dataclass(frozen=True)
class Head:
    """A file without its data: the fields of ``Content``, the place and size of the data, and its chunks' checksums.

    ``checksum``: a CRC-32 of all checksums, which stands for the whole file.
    """

    entries: dict[str, dict[str, Any]]
    facts: dict[str, str]
    state: Any
    start: int
    size: int
    sums: tuple[int, ...]
    checksum: int


def offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Each tensor's offset in the data, and the total size, in bytes.

    Tensors with large elements come first, so that each is aligned to its element size without gaps.
    """
    places, end = [0] * len(tensors), 0
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].item_bytes):
        places[index] = end
        end += tensors[index].nbytes
    return places, end


def described(tensors: Sequence[Tensor]) -> str:
    """The header's entries of these tensors as JSON, for ``head``. Depends only on names, dtypes and shapes."""
    places, size = offsets(tensors)
    found = {
        tensor.name: _entry(tensor.dtype, tensor.shape, start, start + tensor.nbytes)
        for tensor, start in zip(tensors, places, strict=True)
    }
    number = _checksum_count(size)
    return json.dumps(found | {_CHECKSUMS: _entry("U32", (number,), size, size + 4 * number)})


def head(tensors: str, state: Any, facts: Mapping[str, str]) -> bytes:
    """All bytes of a file before the data: the header's length and the header.

    ``tensors``: from ``described``. ``state``: plain values, which the header has as JSON in a string of JSON.
    """
    metadata = json.dumps({"format": FORMAT, **facts})[:-1]
    text = f'{{"__metadata__": {metadata}, "state": {json.dumps(json.dumps(state))}}}, {tensors[1:]}'.encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    return _LENGTH.pack(len(text)) + text


def begin_now(work: Callable[[], Any]) -> Callable[[], Any]:
    """Does the work in this thread."""
    result = work()
    return lambda: result


def write(
    file: int, beginning: bytes, data: memoryview, begin: Begin = begin_now
) -> Generator[None, None, Callable[[], None]]:
    """Writes a complete file to a descriptor. Yields after each chunk, so that a different thread may continue.

    ``begin`` gets two pieces of work per chunk: its checksum, and reading it back after it is written. Both may run
    beside the next writes. The caller must call the result before it commits the file. It raises Damaged if the file
    does not contain the written data.
    """
    end = _write_all(file, memoryview(beginning))
    sums = [begin(partial(zlib.crc32, beginning))]
    found = [begin(partial(_reads_back, file, 0, memoryview(beginning)))]
    yield
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        sums.append(begin(partial(zlib.crc32, chunk)))
        _write_out(file, chunk)
        found.append(begin(partial(_reads_back, file, end, chunk)))
        end += len(chunk)
        yield
    last = memoryview(struct.pack(f"<{len(sums)}I", *(result() for result in sums)))
    _write_all(file, last)

    def check() -> None:
        if not (all(result() for result in found) and _reads_back(file, end, last)):
            raise Damaged("reading it back returned different data than was written")

    return check


def read(path: Path) -> Content:
    """Reads and verifies a file. Raises Damaged or OSError."""
    head = read_head(path)
    data = memory(head.size)
    for _ in read_data(path, head, memoryview(data)[: head.size]):
        pass
    return Content(head.entries, head.facts, head.state, data)


def memory(size: int) -> mmap.mmap:
    """Memory for a file's data, of at least one byte, for this process alone. A bytearray would be zeroed first.

    ``MAP_SHARED``, Python's default, takes three times as long to fill. Huge pages would take half as long on bare
    metal, but eight times as long in a virtual machine that returns free ones to its host
    (benchmarks/results/restore.md).
    """
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def verify(path: Path) -> None:
    """Reads a file and compares the checksums. Raises Damaged or OSError."""
    for _ in read_data(path, read_head(path), None):
        pass


def read_head(path: Path) -> Head:
    """Reads and verifies all of a file except its data. Raises Damaged or OSError."""
    with open_binary(path, buffered=False) as file:
        beginning, entries = _read_head(file.fileno())
        size, end = entries.pop(_CHECKSUMS)["data_offsets"]
        last = _read_bytes(file.fileno(), end - size, len(beginning) + size)
    sums = struct.unpack(f"<{(end - size) // 4}I", last)
    if zlib.crc32(beginning) != sums[0]:
        raise Damaged("checksum mismatch in its header")
    metadata = entries.pop("__metadata__")
    try:
        state = json.loads(metadata.pop("state"))
        return Head(entries, metadata, state, len(beginning), size, sums[1:], zlib.crc32(last))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged("its state is not valid JSON") from error


def read_data(
    path: Path, head: Head, into: Into, retry: Callable[[Callable[[], int]], int] = lambda work: work()
) -> Iterator[int]:
    """Reads and verifies the data, several chunks at once, into memory, a file (its descriptor), or nowhere.

    Yields, after each chunk in their order, how many bytes are verified by now. ``retry`` calls the function that reads
    a chunk. After an error the file is reopened. Raises Damaged or OSError.
    """
    reading = _Reading(path, head, into)
    numbers = range(len(head.sums))
    readers = min(_READERS, len(os.sched_getaffinity(0)), -(-head.size // _PER_READER))
    try:
        if readers < 2:
            yield from (retry(partial(reading.chunk, number)) for number in numbers)
            return
        from concurrent.futures import ThreadPoolExecutor  # here, because the writer process does without it

        with ThreadPoolExecutor(readers, "reader") as pool:
            yield from pool.map(lambda number: retry(partial(reading.chunk, number)), numbers)
    finally:
        for file in reading.opened:
            os.close(file)


class _Reading:
    """Reads a file's chunks in several threads. Each has a descriptor, so that the kernel sees sequential reads."""

    def __init__(self, path: Path, head: Head, into: Into) -> None:
        self._path, self._head, self._into = path, head, into
        self._of_thread = threading.local()
        self.opened: list[int] = []

    def chunk(self, number: int) -> int:
        """Reads and verifies a chunk. Returns its end in the data."""
        start = number * CHUNK
        end, sum_ = min(start + CHUNK, self._head.size), 0
        try:
            for at in range(start, end, BUFFER):
                sum_ = self._piece(at, min(BUFFER, end - at), sum_)
        except OSError:
            self._of_thread.file = None
            raise
        if sum_ != self._head.sums[number]:
            raise Damaged(f"checksum mismatch in its data from byte {start} on")
        return end

    def _piece(self, at: int, size: int, sum_: int) -> int:
        """Reads a piece of the data and passes it on while it is in the core's cache. Returns the new checksum."""
        into = self._into
        views: Iterable[memoryview] = [self._buffer()[:size]]
        if isinstance(into, memoryview):
            views = [into[at : at + size]]
        elif into is not None and not isinstance(into, int):
            views = into.views(at, at + size)
        for piece in views:
            read_into(self._file(), piece, self._head.start + at)
            sum_ = zlib.crc32(piece, sum_)
            if isinstance(into, int):
                write_at(into, piece, at)
            at += len(piece)
        return sum_

    def _file(self) -> int:
        found: int | None = getattr(self._of_thread, "file", None)
        if found is None:
            found = self._of_thread.file = open_file(self._path)
            self.opened.append(found)
        return found

    def _buffer(self) -> memoryview:
        found: memoryview | None = getattr(self._of_thread, "buffer", None)
        if found is None:
            found = self._of_thread.buffer = memoryview(bytearray(BUFFER))
        return found


def read_facts(path: Path) -> dict[str, str]:
    """The metadata of a file, from its header, which is not verified. Raises Damaged or OSError."""
    with open_binary(path, buffered=False) as file:
        return dict(_read_head(file.fileno())[1]["__metadata__"])


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _checksum_count(size: int) -> int:
    return 1 + -(-size // CHUNK)


def _write_all(file: int, data: memoryview) -> int:
    """Writes all data. Returns the file position after it."""
    while data:
        data = data[os.write(file, data) :]
    return os.lseek(file, 0, os.SEEK_CUR)


def _write_out(file: int, chunk: memoryview) -> None:
    """Writes a chunk and starts its write-back now, so that little is left for fsync.

    On Linux, POSIX_FADV_DONTNEED starts the write-back of dirty pages and keeps them in memory. For 10 MB, the final
    fsync takes 4 ms without it, 2.6 ms with pieces of 4 MiB, and 0.7 ms with these (ext4, Linux 6.18).
    """
    for start in range(0, len(chunk), _PIECE):
        piece = chunk[start : start + _PIECE]
        end = _write_all(file, piece)
        with suppress(OSError):  # a hint that not every file system supports
            os.posix_fadvise(file, end - len(piece), len(piece), os.POSIX_FADV_DONTNEED)


def _reads_back(file: int, place: int, data: memoryview) -> bool:
    """Whether a file contains these bytes at this position."""
    buffer = bytearray(min(BUFFER, len(data)))
    try:
        for start in range(0, len(data), BUFFER):
            part = data[start : start + BUFFER]
            if len(part) < len(buffer):
                buffer = bytearray(len(part))
            read_into(file, memoryview(buffer), place + start)
            if buffer != part:  # for a bytearray, memcmp(3)
                return False
    except Damaged:
        return False
    return True


def write_at(file: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(file, data, position)
        data, position = data[count:], position + count


def read_into(file: int, buffer: memoryview, position: int) -> None:
    """Fills the buffer from this position of the file. Raises Damaged if the file ends before."""
    while buffer:
        count = os.preadv(file, [buffer], position)
        if count == 0:
            raise Damaged("truncated while it was read")
        buffer, position = buffer[count:], position + count


def _read_bytes(file: int, size: int, position: int) -> bytes:
    read_into(file, memoryview(data := bytearray(size)), position)
    return bytes(data)


def _read_head(file: int) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the data, and the header in them, whose entries are within the file."""
    size = os.fstat(file).st_size
    if size < _LENGTH.size:
        raise Damaged(f"truncated: {size} bytes")
    length = _read_bytes(file, _LENGTH.size, 0)
    (number,) = _LENGTH.unpack(length)
    if number > min(size - _LENGTH.size, LONGEST_HEADER):
        raise Damaged(f"truncated, or not a checkpoint: a header of {number} bytes in a file of {size}")
    text = _read_bytes(file, number, _LENGTH.size)
    try:
        header = json.loads(text)
        found, end = header["__metadata__"]["format"], _check_entries(header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("its header is invalid") from error
    if found != FORMAT:
        raise Damaged(f"expected format {FORMAT!r}, got {found!r}")
    if _LENGTH.size + number + end != size:
        raise Damaged(f"truncated: expected {_LENGTH.size + number + end} bytes, got {size}")
    return length + text, header


def _check_entries(header: Mapping[str, Any]) -> int:
    """Where the checksums, and with them the file, end in the data.

    Raises Damaged unless the metadata is text and each tensor is within the data, and ValueError, TypeError or KeyError
    for a header of a different form.
    """
    size, end = header[_CHECKSUMS]["data_offsets"]
    for name, entry in header.items():
        if name == "__metadata__":
            if not all(isinstance(fact, str) for fact in entry.values()):
                raise Damaged("its metadata contains values other than text")
            continue
        start, stop = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (start, stop, *entry["shape"]))
        most = end if name == _CHECKSUMS else size
        if not whole or not isinstance(entry["dtype"], str) or not start <= stop <= most:
            raise Damaged(f"tensor {name} is not within the data")
    if end - size != 4 * _checksum_count(size):
        raise Damaged("the number of checksums does not match the data")
    return int(end)
