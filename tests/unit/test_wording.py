"""The golden file of messages: what it compares, and that it holds no more than the tests say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import wording
from tests.wording import Wording


def test_every_entry_belongs_to_a_test(request: pytest.FixtureRequest) -> None:
    """An entry that no test asks for would never be compared."""
    assert wording.obsolete(wording.read(), wording.collected(request.config)) == []


def test_an_entry_is_obsolete_without_its_test_or_its_file() -> None:
    """Nothing is known about a file that was not collected."""
    here = "tests/unit/test_wording.py"
    entries = [f"{here}::kept", f"{here}::gone", "tests/unit/test_job.py::unknown", "tests/unit/test_no_file.py::a"]
    assert wording.obsolete(entries, [f"{here}::kept"]) == [entries[1], entries[3]]


def test_another_error_of_the_same_class_is_a_difference() -> None:
    said = Wording(["UsageError: a", "UsageError: b"], {})
    said.add("UsageError: a")
    with pytest.raises(AssertionError):
        said.add("UsageError: a")


def test_an_error_that_no_entry_expects_is_a_difference() -> None:
    with pytest.raises(AssertionError):
        Wording([], {}).add("UsageError: a")


def test_what_differs_from_run_to_run_is_not_compared(tmp_path: Path) -> None:
    said = Wording(None, {str(tmp_path): "tmp_path"})
    said.add(f"{tmp_path}/run is held by process {os.getpid()} at 127.0.0.1:40123, user {os.geteuid()}\n")
    assert said.said == ["<tmp_path>/run is held by process <number> at 127.0.0.1:<port>, user <id>"]


@pytest.mark.parametrize("text", ["one line", "three\n\n  lines", "# a title", "> "])
def test_entries_are_read_as_they_were_written(tmp_path: Path, text: str) -> None:
    entries = {"tests/a.py::t[# 1]": [text, "another"], "tests/a.py::u": [text]}
    wording.write(entries, tmp_path / "messages.txt")
    assert wording.read(tmp_path / "messages.txt") == entries
