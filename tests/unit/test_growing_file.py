"""A file that others append to is followed line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir import growing_file
from clusterddp.rundir.growing_file import GrowingFile


def appended(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def test_each_line_comes_once_and_as_soon_as_it_has_its_end(tmp_path: Path) -> None:
    """Also if the file does not exist yet. The last line needs none once nobody writes any more."""
    followed = GrowingFile(path := tmp_path / "rank-0.out")
    assert followed.lines() == []
    appended(path, b"one\ntw")
    assert followed.lines() == ["one"]
    appended(path, b"o\n\n\xffthree")
    assert followed.lines() == ["two", ""] and followed.lines() == []
    assert (followed.rest(), followed.rest()) == ("\ufffdthree", "")


def test_what_the_file_had_before_can_be_left_out(tmp_path: Path) -> None:
    appended(path := tmp_path / "events.jsonl", b"old\n")
    followed = GrowingFile(path, from_end=True)
    appended(path, b"new\n")
    assert followed.lines() == ["new"]


def test_a_carriage_return_can_end_a_line_wherever_a_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a progress bar, of which only the end is kept if it never ends a line."""
    monkeypatch.setattr(growing_file, "BLOCK", 4)
    monkeypatch.setattr(growing_file, "MOST_KEPT", 6)
    appended(path := tmp_path / "rank-0.err", b"10%\r20%\r\n30%")
    followed, whole = GrowingFile(path, ends=rb"[\r\n]+"), GrowingFile(path)
    assert list(filter(None, followed.lines())) == ["10%", "20%"]
    assert whole.lines() == ["%\r20%\r"] and whole.rest() == "30%"
