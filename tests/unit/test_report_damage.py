"""``clusterddp report`` on damaged run directories: each file in turn is mutated, cut, emptied or another program's.

Always the same damage, and two hundred times as much with CLUSTERDDP_TEST_PRODUCT=1.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from clusterddp.checkpoint import file_format
from clusterddp.cli.report import collected
from clusterddp.jobdef.job import Job
from clusterddp.report.page import page
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.runs.sweep_members import Record
from tests.fake_slurm import FakeSlurm
from tests.long_run import long_run
from tests.runs_on_disk import BEGAN, event, write_lines
from tests.unit.test_report import SCHEMA
from tests.unit.test_report_page import ATTRIBUTES, TAGS, Reader

EXAMPLES = 200 if "CLUSTERDDP_TEST_PRODUCT" in os.environ else 1
CHECKPOINT = "checkpoints/step-000000000030.attempt-2.safetensors"
#: Files whose damage is named, and files from which a report takes a detail at most.
RECORDS = [
    "events.jsonl", "metrics.jsonl", "timing.jsonl", "outcome.json", "job.yaml", "code/current.json",
    "private/attempt-2/resumed.json", CHECKPOINT, f"../{SWEEP_FILE}",
]  # fmt: skip
DETAILS = ["private/attempt-1/rank-0.json", "private/attempt-2/holder.json", "logs/attempt-1/rank-0.err"]
#: What other programs write.
FOREIGN = [
    "{}", "[]", "null", "12", '"text"', "[" * 2000, '{"state": 5, "step": -1, "attempt": "x", "time": null}',
    '{"event": [], "attempt": 1e99, "step": {}, "time": "now"}', "NaN", "<html><script>alert(1)</script></html>",
]  # fmt: skip
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>"

Damage = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep's folder with a run that has every file that a report reads."""
    folder = tmp_path_factory.mktemp("whole") / "sweep"
    run = long_run(folder / "net", steps=30)
    hung = event("hung", 1, time=BEGAN + 300, rank=0, late=[0], host="n1", step=3, seconds=9.0, what="rank 0 hung")
    failure = event("rank_failed", 1, time=BEGAN + 301, rank=0, host="n1", error="ValueError: no", step=3)
    write_lines(run.events_file, sorted([*run.events(), hung, failure], key=lambda line: float(line["time"])))
    for attempt in range(3):
        parent = {"attempt": attempt - 1, "step": 10 * attempt} if attempt else None
        run.resume_record(attempt).write_text(json.dumps({"step": 10 * attempt, "parent": parent}))
    end = {"host": "n1", "end": "exception", "started": BEGAN, "error": "ValueError: no", "traceback": "Traceback: no"}
    run.rank_record(1, 0).write_text(json.dumps(end))
    (run.attempt_logs(1) / "rank-0.err").write_text("Traceback (most recent call last):\nValueError: no\n")
    run.code.mkdir()
    run.code_file.write_text(json.dumps({"snapshot": "0123456789ab", "checkout": "/home/me/net", "changed": 0}))
    run.holder_file(2).write_text(json.dumps({"kind": "slurm", "job": "41"}))
    head = file_format.head(file_format.described([]), {}, {"step": "30"})
    with open(folder / "net" / CHECKPOINT, "w+b", buffering=0) as file:
        assert list(file_format.write(file.fileno(), head, memoryview(b""))) is not None
    members = {"net": {"lr": "0.1"}}
    (folder / SWEEP_FILE).write_text(Record(Job(name="net", module="net", device="cpu"), members).to_yaml())
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path, fake_slurm: FakeSlurm) -> RunDirectory:
    """A copy of it, whose job Slurm has forgotten."""
    fake_slurm[""] = ""
    shutil.copytree(whole, tmp_path / "some" / "sweep")  # deeper than where all tests' histories are checked
    return RunDirectory(tmp_path / "some" / "sweep" / "net")


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Some bytes are others."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 5, 50))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def shuffled(content: bytes, chance: random.Random) -> bytes:
    """Lines are missing, twice there, or in another order."""
    lines = content.splitlines(keepends=True)
    return b"".join(chance.choices(lines, k=len(lines)))


def other_values(content: bytes, chance: random.Random) -> bytes:
    """Well-formed, but numbers are huge, negative or text, and texts are markup."""
    values = [b"-1", b"1e308", b"9" * 30, b"null", b"[]", b'{"a": []}', json.dumps(HOSTILE).encode(), b"true", b"0"]
    share = chance.choice((0.02, 0.3))
    return re.sub(
        rb'(?<=: )("[^"]*"|[\d.]+)',
        lambda found: chance.choice(values) if chance.random() < share else found[0],
        content,
    )


def reported(run: RunDirectory) -> list[str]:
    """Builds the report, checks that it is whole and that nothing of the run became part of it; returns its notes."""
    found = collected([run], BEGAN + 1e6)
    assert [error.message for error in VALIDATOR.iter_errors(found)] == []
    json.dumps(found, allow_nan=False)
    text = page(found)
    read = Reader(text)
    assert not read.unclosed and read.tags <= TAGS and {name for name, _ in read.attributes} <= ATTRIBUTES
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", text)
    notes: list[str] = found["runs"][0]["notes"]
    assert bool(notes) == ('id="missing"' in text)
    return notes


def test_a_whole_run_has_no_notes(copied: RunDirectory) -> None:
    """So that each note of the tests below is about their damage."""
    assert reported(copied) == []


@pytest.mark.parametrize("name", [*RECORDS, *DETAILS])
@pytest.mark.parametrize("damage", [flipped, cut, shuffled, other_values])
def test_a_page_is_built_from_any_content(copied: RunDirectory, name: str, damage: Damage) -> None:
    """Also where the damage cannot be told from a record."""
    path = copied.path / name
    content = path.read_bytes()
    for example in range(EXAMPLES):
        path.write_bytes(damage(content, random.Random(f"{name} {damage.__name__} {example}")))
        reported(copied)


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_that_is_not_the_runs_own_is_named(copied: RunDirectory, name: str) -> None:
    """Whatever is in it instead: nothing, another program's JSON, or bytes; or it is a folder."""
    path = copied.path / name
    texts = [f"{text}\n".encode() for text in FOREIGN]
    for content in [b"", *texts, bytes(range(256)) * 20 + b"\n", b"\0" * 99 + b"\n"]:
        path.write_bytes(content)
        notes = "\n".join(reported(copied))
        assert Path(name).name in notes, content[:60]
    path.unlink()
    path.mkdir()
    assert Path(name).name in "\n".join(reported(copied))


@pytest.mark.parametrize("name", DETAILS)
def test_a_detail_that_is_not_the_runs_own_is_left_out(copied: RunDirectory, name: str) -> None:
    """The rest of the report is there."""
    path = copied.path / name
    for text in ["", *FOREIGN]:
        path.write_text(text)
        reported(copied)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "timing.jsonl"])
def test_a_line_that_was_cut_off_is_named(copied: RunDirectory, name: str) -> None:
    """Its writer was killed, or is still writing."""
    path = copied.path / name
    path.write_bytes(path.read_bytes()[:-5])
    (note,) = reported(copied)
    assert note.startswith(f"the last line of {name} is incomplete")
