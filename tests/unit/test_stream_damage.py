"""Damaged shards and indexes of ``clusterddp.streams``: a sample, or an error that names the file; no hang.

Always the same damage, and fifty times as much with CLUSTERDDP_TEST_PRODUCT=1.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import resource
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterddp import streams
from tests.unit.test_streams import indexes, samples, write_tar

EXAMPLES = 50 * 60 if "CLUSTERDDP_TEST_PRODUCT" in os.environ else 60
FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
#: What a header's fields and the records of pax might have in place of what they have.
HOSTILE = [
    b"",
    b"0",
    b"-1",
    b"-512",
    b"-1024",
    b"+7",
    b"1_0",
    b"9" * 12,
    b"\x80" + b"\xff" * 11,
    b"\xff" * 12,
    b"\0" * 12,
]
RECORDS = [
    b"0 a=b\n",
    b"-3 a=b\n",
    b"99999 a=b\n",
    b"a=b\n",
    b"6 a=b",
    b"10 size=-\n",
    b"17 size=-51200000\n",
    b"6 \xff=b\n",
]


@pytest.fixture(autouse=True, scope="module")
def little_memory() -> Iterator[None]:
    """A wrong size is a MemoryError here, not a machine out of memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def read_or_named(make: Callable[[], Any], path: Path) -> None:
    """All samples are read, or a ValueError has the file's path."""
    try:
        data = make()
        for number in range(len(data)):
            data[number]
    except ValueError as error:
        assert str(path) in str(error), f"{error!r} does not name the file"


def with_checksum(header: bytearray) -> None:
    """Makes the checksum of a tar header fit."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """A header's field is another one, though the checksum fits; or bytes are others; or the end is missing."""
    data = bytearray(whole)
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["field", "type", "record", "bytes", "cut"])
        start = 512 * draw.randrange(len(data) // 512)
        if kind == "bytes":
            for at in draw.choices(range(len(data)), k=8):
                data[at] = draw.randrange(256)
        elif kind == "cut":
            del data[max(1024, draw.randrange(len(data))) :]
        elif kind == "record":
            record = draw.choice(RECORDS)
            data[start : start + len(record)] = record
        else:
            header = data[start : start + 512]
            if kind == "type":
                header[156] = draw.choice(b"0123457LKxgSV\0")
            else:
                text = draw.choice(HOSTILE)
                header[124:136] = text.ljust(12, b"\0")
            with_checksum(header)
            data[start : start + 512] = header
    return bytes(data)


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_tar_is_read_or_named(tmp_path: Path, form: str) -> None:
    """Long names, which have headers of their own, and the headers of all."""
    draw = random.Random(f"tar {form}")
    files = {f"{'folder/' * 20}{name}" if int(name[:3]) % 2 else name: data for name, data in samples(0, 6).items()}
    path = write_tar(tmp_path / "a.tar", files, FORMS[form])
    whole = path.read_bytes()
    for _ in range(EXAMPLES):
        path.write_bytes(damaged(whole, draw))
        read_or_named(lambda: streams.TarShards(path), path)


def holes(whole: bytes, start: int, size: int) -> bytes:
    return whole[:start] + bytes(size) + whole[start + size :]


def test_a_tar_that_lost_a_part_between_two_files_is_refused(tmp_path: Path) -> None:
    """A cut there, a hole that a copy has left, or a second archive: the samples behind it would just be missing."""
    path = write_tar(tmp_path / "a.tar", samples(0, 6))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        starts = [entry.offset for entry in archive]
        end = archive.offset
    middle = starts[4]
    cut = r"it ends at byte {} without the zeros that end an archive"
    hole = r"there are zeros at byte {}, which should end the archive, but more data at byte {}"
    for damaged, message in (
        (b"", cut.format(0)),
        (whole[:middle], cut.format(middle)),
        (whole[:end], cut.format(end)),
        (whole[: end + 100], cut.format(end + 100)),
        (holes(whole, middle, 512), hole.format(middle, middle + 512)),
        (holes(whole, middle, starts[6] - middle), hole.format(middle, starts[6])),
        (holes(whole, 0, middle), hole.format(0, middle)),
        (whole + whole, hole.format(end, len(whole))),
        (whole[:middle] + bytes((2 << 20) + 512), f"the last 2097664 bytes, from byte {middle} on, are zeros"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a\.tar: {message}"):
            streams.TarShards(path)
    for sound in (whole[: end + 512], whole, whole + bytes(1 << 20)):
        path.write_bytes(sound)
        assert len(streams.TarShards(path)) == 6
    path.write_bytes(bytes(10240))  # `tar -cf a.tar -T /dev/null`
    assert len(streams.TarShards([path, write_tar(tmp_path / "b.tar", samples(0, 3))])) == 3


def test_a_sample_that_was_zeroed_after_it_was_indexed_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", samples(0, 2))
    data, times = streams.TarShards(path), path.stat()
    with tarfile.open(path) as archive:
        second = archive.getmembers()[1].offset
    path.write_bytes(holes(path.read_bytes(), second, 512))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=rf"a\.tar, sample at byte 0: there is no header at byte {second}"):
        data[0]


def test_lines_of_any_bytes_are_read_or_named(tmp_path: Path) -> None:
    draw = random.Random("lines")
    path = tmp_path / "a.jsonl"
    pieces = [
        b"{}",
        b"[" * 3,
        b"\n",
        b"\r\n",
        b"\r",
        b"\0",
        b"\xff\xfe",
        b"1" * 5000,
        b'"\\ud800"',
        b"[" * 200_000,
        b"\xc3",
        b"NaN",
    ]
    for _ in range(EXAMPLES):
        path.write_bytes(b"".join(draw.choices(pieces, k=draw.randint(0, 8))))
        read_or_named(lambda: streams.JsonLines(path), path)


def test_tokens_of_any_size_are_read_or_named(tmp_path: Path) -> None:
    draw = random.Random("tokens")
    path = tmp_path / "a.bin"
    for _ in range(EXAMPLES):
        path.write_bytes(draw.randbytes(draw.randint(0, 40)))
        length, dtype = draw.randint(1, 9), draw.choice(["uint8", "uint16", ">u4", "int64"])
        read_or_named(lambda: streams.Tokens(path, length, dtype), path)  # noqa: B023


def test_a_damaged_index_is_built_again_or_named(tmp_path: Path) -> None:
    """Of the places of samples it has no checksum; one that is wrong gives an error that names file and index."""
    draw = random.Random("index")
    path = write_tar(tmp_path / "a.tar", samples(0, 6))
    streams.TarShards(path)
    (index,) = indexes(tmp_path)
    whole = index.read_bytes()
    for _ in range(EXAMPLES):
        data = bytearray(whole)
        for at in draw.choices(range(len(data)), k=draw.randint(1, 4)):
            data[at] = draw.randrange(256)
        del data[draw.choice([0, len(data) // 2, *[len(data)] * 8]) :]
        index.write_bytes(data)
        read_or_named(lambda: streams.TarShards(path), path)


@pytest.mark.parametrize("row", [(-512, 1024), (0, 1 << 62), (1 << 62, 1), (0, -1), (1 << 62, 1 << 62)])
def test_a_wrong_place_in_an_index_is_an_error_that_names_both_files(tmp_path: Path, row: tuple[int, int]) -> None:
    path = write_tar(tmp_path / "a.tar", samples(0, 6))
    streams.TarShards(path)
    (index,) = indexes(tmp_path)
    rows = np.memmap(index, dtype="<i8", mode="r+", shape=(6, 2))
    rows[3] = row
    data = streams.TarShards(path)
    with pytest.raises(ValueError, match="too short for the sample") as error:
        data[3]
    assert str(path) in str(error.value) and f"delete its index {index}" in str(error.value)
    assert data[2]["__key__"] == "002"


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_sample_that_is_only_a_link_is_refused(tmp_path: Path, kind: bytes) -> None:
    """GNU tar packs the second of two hard-linked files so: the sample would be missing."""
    path = write_tar(tmp_path / "a.tar", samples(0, 2))
    link = tarfile.TarInfo("002.txt")
    link.type, link.linkname = kind, "000.txt"
    with tarfile.open(path, "a") as archive:
        archive.addfile(link)
    with pytest.raises(ValueError, match=r"a\.tar: '002\.txt' at byte \d+ is a link without data"):
        streams.TarShards([path])


def test_an_index_that_was_built_again_is_not_read_by_a_process_that_starts_later(tmp_path: Path) -> None:
    """Its rows may be those of other samples; a process that has it open keeps the old one."""
    write_tar(tmp_path / "b.tar", samples(3, 3))
    pattern = tmp_path / "*.tar"
    data = streams.TarShards(pattern)
    sent = pickle.dumps(data)
    for index in indexes(tmp_path):
        index.unlink()
    streams.TarShards(pattern)
    assert pickle.loads(sent)[0]["__key__"] == "003", "of the same shards"
    write_tar(tmp_path / "a.tar", samples(0, 3))
    assert len(streams.TarShards(pattern)) == 6
    assert data[0]["__key__"] == "003"
    with pytest.raises(ValueError, match="was rebuilt, because shards changed while a run was reading them"):
        pickle.loads(sent)[0]


@pytest.mark.parametrize("record", [b"0 a=b\n", b"-3 a=b\n", b"99999 a=b\n", b"a=b\n", b"6 a=b!", b"6 aab\n", b"\xff"])
def test_a_damaged_record_of_a_long_name_is_named_with_its_place(tmp_path: Path, record: bytes) -> None:
    """A length of 0 once ended as an IndexError without the archive's name."""
    path = write_tar(tmp_path / "a.tar", {"000.txt": b"", f"{'n' * 120}.txt": b""}, tarfile.PAX_FORMAT)
    data = path.read_bytes()
    at = data.index(b" path=nnn") - 3
    path.write_bytes(data[:at] + record + data[at + len(record) :])
    with pytest.raises(ValueError, match=rf"a\.tar: expected a pax record at byte {at}, got"):
        streams.TarShards(path)


def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", samples(0, 1))
    data = streams.TarShards(path)

    def broken(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", broken)
    os.utime(path)
    for read in (lambda: data[0], lambda: streams.TarShards(path)):
        with pytest.raises(OSError, match="Input/output error") as error:
            read()
        assert error.value.filename == str(path)
