"""A checkpoint file byte by byte, without torch: what the writer process writes and every restore reads.

The layout is that of safetensors, whose own reader opens the file: eight bytes with the length of the header (little
endian), the header (JSON), and the bytes of all tensors, one after the other. An entry of the header gives a tensor's
``dtype``, ``shape`` and ``data_offsets``. Here, ``__metadata__`` has ``format`` (``clusterddp 2``), ``step``,
``attempt``, ``metrics`` and ``state``: the nested state as JSON, with ``{"$tensor": NAME}`` in each tensor's place. The
last tensor, ``checksums``, holds a CRC-32 of all bytes before the data, and one of each 4 MiB of the data before
itself. Nothing in the file is code.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

FORMAT = "clusterddp 2"
#: Bytes of data that one check sum covers.
CHUNK = 1 << 22
#: Bytes that are written at a time: the disk begins with the first when the next is written.
_PIECE = 1 << 20
#: Bytes that are read back at a time: they fit into a core's own cache.
_BUFFER = 1 << 18
_CHECKSUMS = "checksums"
_LONGEST_HEADER = 100_000_000  # safetensors reads no longer one
#: Begins work, at once or in another thread; what it returns waits for the work's result.
Begin = Callable[[Callable[[], Any]], Callable[[], Any]]
_LENGTH = struct.Struct("<Q")


class Damaged(Exception):
    """A file is not what a writer has left: cut off, altered, or something else altogether."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, its dtype in safetensors' terms (``F32``), its shape, and the bytes of one of its elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        size = self.item_bytes
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Content:
    """A file as it was read: its header's entries by tensor name, its facts, its state, and the data."""

    entries: dict[str, dict[str, Any]]
    facts: dict[str, str]
    state: Any
    data: mmap.mmap | bytearray


def offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor's data begins, and the size of all of it, in bytes.

    Tensors of wide elements come first: so each begins at a multiple of its element's size, without gaps.
    """
    places, end = [0] * len(tensors), 0
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].item_bytes):
        places[index] = end
        end += tensors[index].nbytes
    return places, end


def described(tensors: Sequence[Tensor]) -> str:
    """The header's text of the tensors, for ``head``: the same for as long as names, dtypes and shapes are."""
    places, size = offsets(tensors)
    number = _checksum_count(size)
    found = {
        tensor.name: _entry(tensor.dtype, tensor.shape, start, start + tensor.nbytes)
        for tensor, start in zip(tensors, places, strict=True)
    }
    return json.dumps(found | {_CHECKSUMS: _entry("U32", (number,), size, size + 4 * number)})


def head(tensors: str, state: Any, facts: Mapping[str, str]) -> bytes:
    """All bytes of a file before the data: the header and its length. ``tensors`` is their description."""
    metadata = json.dumps({"format": FORMAT, **facts, "state": json.dumps(state)})
    text = f'{{"__metadata__": {metadata}, {tensors[1:]}'.encode()
    if len(text) > _LONGEST_HEADER:
        raise ValueError(
            f"the names and plain values of the state take {len(text) / 1e6:.0f} MB, and a checkpoint's header holds "
            f"{_LONGEST_HEADER / 1e6:.0f} MB: keep long lists of numbers in tensors"
        )
    text += b" " * (-len(text) % 8)  # the data then begins at a multiple of 8 bytes
    return _LENGTH.pack(len(text)) + text


def begin_now(work: Callable[[], Any]) -> Callable[[], Any]:
    """Does the work before it returns."""
    result = work()
    return lambda: result


def write(
    file: int, beginning: bytes, data: memoryview, begin: Begin = begin_now
) -> Generator[None, None, Callable[[], None]]:
    """Writes a whole file to a descriptor, chunk by chunk: a thread may go on where another has left off.

    ``begin`` is given the check sum of each chunk and, once it is written, the comparison with what the file has: both
    may be done while others are on their way to the disk. The result is to be called before the file counts: it raises
    Damaged when something reads back otherwise than it was written.
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
            raise Damaged("what was written reads back otherwise")

    return check


def read(path: Path) -> Content:
    """A file's content; every byte of it is read once, and verified. Raises Damaged, or OSError."""
    with open(path, "rb", buffering=0) as file:
        beginning, entries = _read_head(file.fileno())
        start, _ = _places(entries)
        data = memory(start)
        _check(file.fileno(), beginning, entries, memoryview(data))
    metadata = entries.pop("__metadata__")
    del entries[_CHECKSUMS]
    try:
        return Content(entries, metadata, json.loads(metadata.pop("state")), data)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged("its state cannot be read") from error


def memory(size: int) -> mmap.mmap | bytearray:
    """Room for a file's data; a bytearray would be filled with zeros first, and in small pages."""
    if size == 0:
        return bytearray()
    room = mmap.mmap(-1, size)
    with suppress(OSError, AttributeError):  # a wish; not every kernel has huge pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return room


def verify(path: Path) -> None:
    """Reads every byte and compares the check sums. Raises Damaged, or OSError."""
    with open(path, "rb", buffering=0) as file:
        beginning, entries = _read_head(file.fileno())
        _check(file.fileno(), beginning, entries, None)


def read_facts(path: Path) -> dict[str, str]:
    """The metadata of a file, from its header alone, which is not verified. Raises Damaged, or OSError."""
    with open(path, "rb", buffering=0) as file:
        metadata: dict[str, str] = _read_head(file.fileno())[1]["__metadata__"]
    return metadata


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _checksum_count(size: int) -> int:
    return 1 + -(-size // CHUNK)


def _write_all(file: int, data: memoryview) -> int:
    """Writes all of it, and returns where in the file it ends."""
    while data:
        data = data[os.write(file, data) :]
    return os.lseek(file, 0, os.SEEK_CUR)


def _write_out(file: int, chunk: memoryview) -> None:
    """Writes a chunk and has the kernel bring it to the disk from now on, rather than all of it in fsync.

    That is what this advice does in Linux to pages that are not on the disk yet; they stay in memory. Of 10 MB, an
    fsync has 4 ms of work left without it, 2.6 ms with pieces of 4 MiB, and 0.7 ms with these (ext4, Linux 6.18).
    """
    for start in range(0, len(chunk), _PIECE):
        piece = chunk[start : start + _PIECE]
        end = _write_all(file, piece)
        with suppress(OSError):  # advice, which not every file system takes
            os.posix_fadvise(file, end - len(piece), len(piece), os.POSIX_FADV_DONTNEED)


def _reads_back(file: int, place: int, data: memoryview) -> bool:
    """Whether a file has these bytes at this place."""
    buffer = bytearray(min(_BUFFER, len(data)))
    for start in range(0, len(data), _BUFFER):
        part = data[start : start + _BUFFER]
        if len(part) < len(buffer):
            buffer = bytearray(len(part))
        there = 0
        while there < len(part):
            count = os.preadv(file, [memoryview(buffer)[there:]], place + start + there)
            if count == 0:
                return False
            there += count
        if buffer != part:  # for a bytearray, memcmp(3)
            return False
    return True


def _read_head(file: int) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the data, and the header in them, whose entries fit the file's size."""
    size = os.fstat(file).st_size
    length = os.read(file, _LENGTH.size)
    if len(length) < _LENGTH.size:
        raise Damaged(f"cut off: {size} bytes")
    (number,) = _LENGTH.unpack(length)
    if number > min(size - _LENGTH.size, _LONGEST_HEADER):
        raise Damaged(f"cut off, or not a checkpoint: a header of {number} bytes in a file of {size}")
    text = b"".join(_read_exactly(file, number))
    try:
        header = json.loads(text)
        found, end = header["__metadata__"]["format"], _places(header)[1]
        _check_entries(header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("its header cannot be read") from error
    if found != FORMAT:
        raise Damaged(f"its format is {found!r}, and this version reads {FORMAT!r}")
    if _LENGTH.size + number + end != size:
        raise Damaged(f"cut off: {size} bytes instead of {_LENGTH.size + number + end}")
    return length + text, header


def _places(header: Mapping[str, Any]) -> tuple[int, int]:
    """Where the check sums begin and end in the data."""
    start, stop = header[_CHECKSUMS]["data_offsets"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise ValueError("no place for the check sums")
    if stop - start != 4 * _checksum_count(start):
        raise ValueError("not as many check sums as there is data")
    return start, stop


def _check_entries(header: Mapping[str, Any]) -> None:
    """Raises ValueError, or what a wrong type leads to, unless the facts are texts and each tensor lies in the data."""
    size = _places(header)[0]
    for name, entry in header.items():
        if name == "__metadata__":
            if not all(isinstance(fact, str) for fact in entry.values()):
                raise ValueError("a fact that is no text")
            continue
        start, stop = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (start, stop, *entry["shape"]))
        if not whole or not isinstance(entry["dtype"], str) or (name != _CHECKSUMS and not start <= stop <= size):
            raise ValueError(f"tensor {name} does not lie in the data")


def _check(file: int, beginning: bytes, header: Mapping[str, Any], into: memoryview | None) -> None:
    """Reads the data, into ``into`` if given, and compares all check sums."""
    start, stop = _places(header)
    sums = [zlib.crc32(beginning)]
    buffer = memoryview(bytearray(min(CHUNK, start))) if into is None else into
    for begin in range(0, start, CHUNK):
        size = min(CHUNK, start - begin)
        chunk = buffer[:size] if into is None else buffer[begin : begin + size]
        _read_into(file, chunk)
        sums.append(zlib.crc32(chunk))
    recorded = struct.unpack(f"<{len(sums)}I", b"".join(_read_exactly(file, stop - start)))
    for number, (one, other) in enumerate(zip(sums, recorded, strict=True)):
        if one != other:
            where = "its header" if number == 0 else f"the data from byte {(number - 1) * CHUNK} on"
            raise Damaged(f"the check sum of {where} does not match")


def _read_exactly(file: int, size: int) -> Iterator[bytes]:
    while size:
        part = os.read(file, min(size, CHUNK))
        if not part:
            raise Damaged("cut off while it was read")
        size -= len(part)
        yield part


def _read_into(file: int, chunk: memoryview) -> None:
    while chunk:
        count = os.readv(file, [chunk])
        if not count:
            raise Damaged("cut off while it was read")
        chunk = chunk[count:]
