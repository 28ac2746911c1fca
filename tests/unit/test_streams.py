"""Datasets over shards: what their samples are, their index, and the order that reads nearly in sequence."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clusterddp import orders, streams
from clusterddp.data.sample_order import Binding


def write_tar(path: Path, files: dict[str, bytes], form: int = tarfile.USTAR_FORMAT, mode: Any = "w") -> Path:
    with tarfile.open(path, mode, format=form) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def samples(first: int, count: int) -> dict[str, bytes]:
    return {
        f"{number:03}.{kind}": f"{kind} of {number}".encode() * (number + 1)
        for number in range(first, first + count)
        for kind in ("txt", "cls")
    }


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Three shards with 3, 0 and 4 samples."""
    for number, (first, count) in enumerate([(0, 3), (3, 0), (3, 4)]):
        write_tar(tmp_path / f"train-{number}.tar", samples(first, count))
    return tmp_path


def indexes(folder: Path) -> list[Path]:
    return sorted(folder.glob(".clusterddp-*"))


# --- tar


def test_a_sample_of_a_tar_has_its_files_by_extension(tars: Path) -> None:
    data = streams.TarShards(tars / "train-*.tar")
    assert len(data) == 7 and data.shard_lengths.tolist() == [3, 0, 4]
    assert [data[number]["__key__"] for number in range(7)] == [f"{number:03}" for number in range(7)]
    assert data[4] == {
        "__key__": "004",
        "__url__": str(tars / "train-2.tar"),
        "txt": b"txt of 4" * 5,
        "cls": b"cls of 4" * 5,
    }
    assert data[-1] == data[np.int64(6)]
    with pytest.raises(IndexError, match="sample 7 of 7"):
        data[7]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_tar_is_read_as_tarfile_reads_it(tmp_path: Path, form: int) -> None:
    """Long names, names that are not ASCII, folders, empty files, files and links without extension."""
    deep = "/".join(["folder" * 5] * 4)
    names = ["a.b.jpg", "a.JSON", "ü/x.png", f"{deep}/{'y' * 40}.txt", f"{deep}/{'y' * 40}.cls", "README", "z.empty"]
    files = {name: name.encode() * number for number, name in enumerate(names)}
    path = write_tar(tmp_path / "a.tar", files, form)
    with tarfile.open(path, "a", format=form) as archive:
        folder = tarfile.TarInfo("z.folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        link = tarfile.TarInfo("newest")
        link.type, link.linkname = tarfile.SYMTYPE, "q" * 300
        if form != tarfile.USTAR_FORMAT:
            archive.addfile(link)
    raw = path.read_bytes()
    members = streams.members(lambda at, n: raw[at : at + n], 0, len(raw))
    found = {member.name: raw[member.data : member.stop] for member in members}
    with tarfile.open(path) as archive:
        wanted = {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isreg()}  # type: ignore[union-attr]
    assert found == wanted
    data = streams.TarShards(path)
    assert [{name for name in sample if name[0] != "_"} for sample in map(data.__getitem__, range(4))] == [
        {"b.jpg", "json"},
        {"png"},
        {"txt", "cls"},
        {"empty"},
    ]


def test_sizes_in_pax_records_and_of_8_gib_are_read() -> None:
    entry = tarfile.TarInfo("large.bin")
    entry.size = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        start = entry.tobuf(form)
        (found,) = streams.members(
            lambda at, n, of=start: of[at : at + n],  # type: ignore[misc]
            0,
            len(start) + entry.size,
            whole=False,
        )
        assert found.name == "large.bin" and found.stop - found.data == entry.size and found.data == len(start)


def test_decode_gets_the_files_of_a_sample(tars: Path) -> None:
    data = streams.TarShards(tars / "train-*.tar", lambda sample: len(sample["txt"]))
    assert data[1] == 2 * len("txt of 1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: path.write_bytes(b"no archive" * 100),
            "there is no header at byte 0, so it is damaged or not a tar archive",
        ),
        (lambda path: write_tar(path, samples(0, 2), mode="w:gz"), r"is compressed \(gzip\).*Unpack it"),
        (lambda path: write_tar(path, {"a.x": b"", "b.x": b"", "a.y": b""}), "sample 'a' are not next to each other"),
        (lambda path: path.write_bytes(write_tar(path, {"a.x": bytes(9999)}).read_bytes()[:2000]), "within 'a.x'"),
    ],
)
def test_what_is_no_archive_of_samples_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "a.tar")
    with pytest.raises(ValueError, match=message) as error:
        streams.TarShards(tmp_path / "a.tar")
    assert str(tmp_path / "a.tar") in str(error.value)
    assert indexes(tmp_path) == [], "neither an index nor a temporary file"


def test_a_sample_with_two_files_of_one_extension_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.x": b"1", "a.X": b"2"})
    with pytest.raises(ValueError, match=r"a\.tar, sample at byte 0: sample 'a' has two \.x files"):
        streams.TarShards(tmp_path / "a.tar")[0]


# --- JSON lines


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_lines_are_parsed_and_empty_ones_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Also where they lie across the pieces in which a file is searched; the last needs no newline."""
    monkeypatch.setattr(streams, "_CHUNK", chunk)
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 0}\n\n{"n": 1}\r\n\r\n7\n')
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes('{"n": "ü"}'.encode())
    data = streams.JsonLines(tmp_path / "*.jsonl")
    assert [data[number] for number in range(len(data))] == [{"n": 0}, {"n": 1}, 7, {"n": "ü"}]
    assert streams.JsonLines(tmp_path / "*.jsonl", decode=len)[0] == 8


def test_an_index_of_many_lines_is_built_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have 16 MB."""
    monkeypatch.setattr(streams, "_CHUNK", 1 << 16)
    for shard in "ab":
        (tmp_path / f"{shard}.jsonl").write_bytes(b"1\n" * 500_000)
    tracemalloc.start()
    try:
        assert len(streams.JsonLines(tmp_path / "*.jsonl")) == 10**6
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": \n')
    data = streams.JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl, line at byte 9: Expecting value"):
        data[1]


def test_compressed_lines_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ValueError, match=r"is compressed \(gzip\), and can only be read from its start. Unpack it"):
        streams.JsonLines(tmp_path / "*.gz")


# --- tokens


def test_a_block_of_tokens_and_what_follows_each(tmp_path: Path) -> None:
    np.arange(11, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(70_000 % 65_536, 70_000 % 65_536 + 5, dtype=np.uint16).tofile(tmp_path / "b.bin")
    np.arange(3, dtype=np.uint16).tofile(tmp_path / "c.bin")
    data = streams.Tokens(tmp_path / "*.bin", length=4)
    assert data.shard_lengths.tolist() == [2, 1, 0]
    assert [[part.tolist() for part in data[number]] for number in range(3)] == [
        [[0, 1, 2, 3], [1, 2, 3, 4]],
        [[4, 5, 6, 7], [5, 6, 7, 8]],
        [[4464, 4465, 4466, 4467], [4465, 4466, 4467, 4468]],
    ]
    assert data[0][0].dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length is 0"),
        ({"length": 4, "dtype": "float32"}, "dtype is float32"),
        ({"length": 4, "dtype": "uint32"}, "a.bin has 6 bytes, which is not a multiple of the size of uint32"),
    ],
)
def test_wrong_tokens_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    np.arange(3, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=message):
        streams.Tokens(tmp_path / "a.bin", **options)


# --- files


def test_files_are_sorted_and_each_is_taken_once(tars: Path) -> None:
    given: list[Any] = [tars / "train-2.tar", str(tars / "train-*.tar"), tars / "train-0.tar"]
    assert [Path(path).name for path in streams.TarShards(given).shards] == [
        f"train-{number}.tar" for number in range(3)
    ]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nothing-*.tar", FileNotFoundError, "no file matches .*nothing-"),
        ("a-{000..009}.tar", FileNotFoundError, r"\{\} is not expanded. Use \* or a list"),
        ("s3://bucket/a.tar", ValueError, "because it is read at arbitrary positions. Download it"),
        ("pipe:cat a.tar", ValueError, "because it is read at arbitrary positions. Download it"),
    ],
)
def test_what_is_no_file_is_refused(given: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        streams.TarShards(given)


def test_a_shard_that_becomes_shorter_is_an_error_and_no_crash(tars: Path) -> None:
    data = streams.TarShards(tars / "train-*.tar")
    os.truncate(tars / "train-2.tar", 1000)
    with pytest.raises(ValueError, match=r"train-2\.tar is too short for the sample at byte"):
        data[6]


def test_more_shards_than_a_process_keeps_open_are_read(tmp_path: Path) -> None:
    for number in range(100):
        np.full(3, number, dtype=np.uint8).tofile(tmp_path / f"{number:03}.bin")
    data = streams.Tokens(tmp_path / "*.bin", length=2, dtype="uint8")
    open_before = len(os.listdir("/proc/self/fd"))
    assert [int(data[number][0][0]) for number in [*range(100), *range(100)]] == [*range(100)] * 2
    assert len(os.listdir("/proc/self/fd")) - open_before <= 64
    del data
    assert len(os.listdir("/proc/self/fd")) == open_before


# --- the index


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the shards that are read for an index."""
    found: list[str] = []
    scan = streams.scan_archive
    monkeypatch.setattr(streams, "scan_archive", lambda path: found.append(Path(path).name) or scan(path))
    return found


def test_the_index_is_built_once_and_then_only_for_shards_that_changed(
    tars: Path, scanned: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    pattern = tars / "train-*.tar"
    whole = list(map(streams.TarShards(pattern).__getitem__, range(7)))
    assert sorted(scanned) == ["train-0.tar", "train-1.tar", "train-2.tar"]
    assert "indexing 3 of 3 shards" in capfd.readouterr().err
    assert list(map(streams.TarShards(pattern).__getitem__, range(7))) == whole and len(scanned) == 3
    write_tar(tars / "train-1.tar", samples(50, 2))
    write_tar(tars / "train-9.tar", samples(90, 1))
    changed = streams.TarShards(pattern)
    assert sorted(scanned[3:]) == ["train-1.tar", "train-9.tar"]
    assert "indexing 2 of 4 shards" in capfd.readouterr().err
    assert [changed[number] for number in (0, 1, 2, 5, 6, 7, 8)] == whole
    assert [changed[number]["__key__"] for number in (3, 4, 9)] == ["050", "051", "090"]
    (tars / "train-0.tar").unlink()
    assert len(streams.TarShards(pattern)) == 7 and len(scanned) == 5
    assert len(indexes(tars)) == 1


def test_a_shard_with_another_time_of_modification_is_read_again(tars: Path, scanned: list[str]) -> None:
    """Its size may be the same."""
    streams.TarShards(tars / "train-*.tar")
    os.utime(tars / "train-0.tar", ns=(1, 1))
    streams.TarShards(tars / "train-*.tar")
    assert scanned[3:] == ["train-0.tar"]


@pytest.mark.parametrize("damage", ["shorter", "longer", "empty", "description"])
def test_a_damaged_index_is_built_again(tars: Path, scanned: list[str], damage: str) -> None:
    whole = list(map(streams.TarShards(tars / "train-*.tar").__getitem__, range(7)))
    (path,) = indexes(tars)
    data = path.read_bytes()
    at = data.index(b"train-0")
    ruined = {"shorter": data[16:], "longer": bytes(16) + data, "empty": b""}
    path.write_bytes(ruined.get(damage, data[:at] + b"X" + data[at + 1 :]))
    assert list(map(streams.TarShards(tars / "train-*.tar").__getitem__, range(7))) == whole
    assert len(scanned) == 6 and path.read_bytes() == data


def test_each_dataset_has_its_own_index_beside_the_data_or_in_a_folder(tars: Path, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("index")
    streams.TarShards(tars / "train-*.tar", index=folder)
    assert indexes(tars) == [] and len(indexes(folder)) == 1
    streams.TarShards(tars / "train-0.tar", index=folder)
    assert len(indexes(folder)) == 2


def test_an_index_that_cannot_be_written_names_the_remedy(tars: Path) -> None:
    with pytest.raises(OSError, match="Pass index=FOLDER"):
        streams.TarShards(tars / "train-*.tar", index=tars / "missing")


def test_what_a_worker_gets_has_no_copy_of_the_index(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n" * 10_000)
    data = streams.JsonLines(tmp_path / "a.jsonl")
    assert data[9999] == 1
    sent = pickle.dumps(data)
    assert len(sent) < 2000 and isinstance(data._rows, np.memmap)
    received = pickle.loads(sent)
    assert received[9999] == 1 and isinstance(received._rows, np.memmap)


# --- with ctx.loader


def test_by_shard_reads_a_window_of_neighbours_and_shuffles_the_shards() -> None:
    lengths = [100] * 50
    bound = orders.by_shard(window=50).bind(Binding(SimpleNamespace(shard_lengths=lengths), 5000, 3, 8))
    epoch = [index for _, index in bound.samples(0, 5000)]
    other = [index for _, index in bound.samples(5000, 10_000)]
    shards = [index // 100 for index in epoch]
    seen = list(dict.fromkeys(shards))
    assert sorted(seen) == list(range(50)) and seen != list(dict.fromkeys(index // 100 for index in other))
    for start in range(0, 5000, 50):
        assert len(set(shards[start : start + 50])) <= 3
    assert sum(abs(one - two) == 1 for one, two in itertools.pairwise(epoch)) < 500, "not shuffled"


def test_a_seek_in_many_shards_is_the_same_as_reading_on() -> None:
    lengths = np.full(10_000, 10_000)
    bound = orders.by_shard().bind(Binding(SimpleNamespace(shard_lengths=lengths), 10**8, 3, 8))
    near = bound.samples(10**8 - 5, 10**8 + 5)
    assert [sample[0] for sample in near] == [0] * 5 + [1] * 5
    assert near[3:] == bound.samples(10**8 - 2, 10**8 + 5)


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_window_is_a_number_of_samples(window: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="expected a number of samples"):
        orders.by_shard(window=window)


def test_by_shard_needs_shards() -> None:
    with pytest.raises(TypeError, match="needs a dataset with shards.*list has no shard_lengths"):
        orders.by_shard().bind(Binding([1, 2], 2, 0, 1))
    with pytest.raises(ValueError, match="shard_lengths adds up to 3 samples, but the dataset has 2"):
        orders.by_shard().bind(Binding(SimpleNamespace(shard_lengths=[3]), 2, 0, 1))
