"""The wording of the product's messages, all of it in ``tests/messages.txt``.

A test asserts a message's class and data. The sentence stands in that file, under the test's name, so that all messages
can be read on one page. ``pytest --update-messages`` rewrites the entries of the tests that it runs.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from clusterddp.rundir.ownership import owner_of

ERROR = TypeVar("ERROR", bound=BaseException)

FILE = Path(__file__).with_name("messages.txt")
TITLE = "# The messages that the tests expect. Written by: pytest --update-messages\n"
#: What differs from run to run, or between users. A fixture that is a path is replaced by its name, too.
VARYING = {
    r"\b(pid|process|port) \d{2,}": r"\1 <number>",
    r"\b(127\.0\.0\.1|0\.0\.0\.0|localhost):\d+": r"\1:<port>",
    r"\b0x[0-9a-f]{6,}": "<address>",
    r"/tmp/tmp\w{8}\b": "<folder>",
    r"\b20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\b": "<time>",
    rf"\b(node|on) {re.escape(socket.gethostname())}\b": r"\1 <host>",
    r"\b(\w+Error)\((?:'[^']*'|\"[^\"]*\")\)": r"\1(...)",  # Python's and torch's own words
    rf"\buser {os.geteuid()}\b": "user <id>",
    rf"\bbelongs to {re.escape(owner_of(Path('/proc/self')))}\b": "belongs to <user>",
    rf"{sysconfig.get_path('stdlib')}\b": "<python>",
    r"(.)\1{99,}": r"\1<repeated>",
}


class Wording:
    """What a test expects to be said, in this order, and what has been said in it."""

    def __init__(self, expected: list[str] | None, paths: Mapping[str, str]) -> None:
        self.said: list[str] = []
        self._expected = expected
        self._paths = {sys.executable: "python", str(FILE.parents[1]): "repository", **paths}

    def add(self, said: str) -> None:
        """Compares a text with the next one that is expected. Without any expectation, it is only noted."""
        for path in sorted(self._paths, key=len, reverse=True):
            said = said.replace(path, f"<{self._paths[path]}>")
        for varying, placeholder in VARYING.items():
            said = re.sub(varying, placeholder, said)
        said = "\n".join(line.rstrip() for line in said.strip().splitlines())
        self.said.append(said)
        if self._expected is not None:
            listed = (self._expected[len(self.said) - 1 :] or ["nothing in tests/messages.txt"])[0]
            assert said == listed, "after a change on purpose: pytest --update-messages"


_current: Wording | None = None


@contextmanager
def raises(expected: type[ERROR] | tuple[type[ERROR], ...]) -> Iterator[pytest.ExceptionInfo[ERROR]]:
    """As ``pytest.raises``. The error's class and whole message must be those in ``tests/messages.txt``."""
    with pytest.raises(expected) as caught:
        yield caught
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    _add(f"{type(caught.value).__name__}: {text}")


def says(text: str) -> None:
    """The whole text, such as the output of a command, must be the one in ``tests/messages.txt``."""
    _add(f"> {text}")


def _add(said: str) -> None:
    assert _current is not None, "only while a test runs"
    _current.add(said)


def read(file: Path = FILE) -> dict[str, list[str]]:
    """The texts of each test. A text's first line is indented by two spaces, its other lines by four."""
    entries: dict[str, list[str]] = {}
    texts: list[str] = []
    lines = file.read_text().split("\n")[2:] if file.exists() else []
    for line in lines:
        if line and not line.startswith(" "):
            texts = entries.setdefault(line, [])
        elif line.startswith("    ") or not line:
            texts[-1:] = [f"{text}\n{line[4:]}" for text in texts[-1:]]
        else:
            texts.append(line[2:])
    return {test: [text.rstrip("\n") for text in texts] for test, texts in entries.items()}


_entries = cache(read)


def write(entries: Mapping[str, list[str]], file: Path = FILE) -> None:
    """The entries, sorted, with an empty line before each."""
    lines = [TITLE]
    for test in sorted(entries):
        lines += [
            test,
            *("  " + text.replace("\n", "\n    ").replace("\n    \n", "\n\n") for text in entries[test]),
            "",
        ]
    file.write_text("\n".join(lines).rstrip("\n") + "\n")


def obsolete(entries: Iterable[str], collected: Iterable[str]) -> list[str]:
    """The entries of tests that no longer exist. Only those of the files that were collected can be known."""
    tests = {*collected}
    files = {test.partition("::")[0] for test in tests}
    return [
        entry
        for entry in entries
        if entry not in tests and ((file := entry.partition("::")[0]) in files or not (FILE.parents[1] / file).exists())
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("clusterddp").addoption(
        "--update-messages", action="store_true", help="rewrite the entries of these tests in tests/messages.txt"
    )


_COLLECTED = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)  # before any of them are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):
        config.stash[_COLLECTED] = [item.nodeid for item in items]


def collected(config: pytest.Config) -> list[str]:
    """The tests of the files that this process was told to run, also those that it does not run."""
    return config.stash.get(_COLLECTED, [])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compares what the test said with its entry, or notes it."""
    global _current
    update = item.config.getoption("--update-messages")
    fixtures = getattr(item, "funcargs", {})
    paths = {str(value): name for name, value in fixtures.items() if isinstance(value, Path)}
    expected = _entries().get(item.nodeid, [])
    _current = wording = Wording(None if update else expected, paths)
    try:
        yield
    finally:
        _current = None
    if update:
        entries = read()
        entries[item.nodeid] = wording.said
        gone = obsolete(entries, collected(item.config))
        write({test: texts for test, texts in entries.items() if texts and test not in gone})
    else:
        assert len(wording.said) == len(expected), "tests/messages.txt has more texts of this test. Update it"
