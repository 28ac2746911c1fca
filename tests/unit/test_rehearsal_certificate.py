"""The certificate of a rehearsal: its schema, what it is about, and what ``submit`` says about it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clusterddp.cli import submit
from clusterddp.jobdef.job import Job
from clusterddp.rehearsal.causes import Cause, Finding
from clusterddp.rehearsal.certificate import Subject, as_json, page
from clusterddp.rehearsal.comparison import Result
from clusterddp.rehearsal.disturbances import Disturbance, Script
from clusterddp.rehearsal.rehearsal import Rehearsal, Tried
from clusterddp.rehearsal.validity import remark
from clusterddp.rehearsal.workspace import program_of, workspace_of
from clusterddp.slurm.configuration import Preemption

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/rehearsal.schema.json").read_text())
FINDING = Finding(Cause.NOT_RESUMED, "a start begins at step 0 <again>", "/tmp/rehearse-x/run-3/src/train.py", 7)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return tmp_path


def job(script: str = "train.py") -> Job:
    return Job(name="train", script=script)


def certificate(*findings: Finding, of: Job | None = None, unlike: int | None = None) -> dict[str, Any]:
    """That of a rehearsal of the job's script as it is now."""
    of = of or job()
    workspace = workspace_of(of)
    subject = Subject(
        str(of.script), " ".join(program_of(of, workspace.root)), ["--lr", "1"], workspace.root, workspace.commit,
        workspace.digest(), 2, 20.0, True, "slurm",
    )  # fmt: skip
    tried = [
        Tried(Disturbance.STEP, at="after 7 steps", starts=2, resumed_step=8, result=Result.SAME, exit_s=0.123),
        Tried(Disturbance.EVALUATION, "no evaluation was seen"),
    ]
    script = Script(14, [5], [], [], 0.1, False, True)
    by_cause: Sequence[Any] = [(finding, [Disturbance.STEP]) for finding in findings]
    rehearsal = Rehearsal(script, tried, unlike, 5, 12.34, by_cause)
    assert "<again>" not in page(subject, rehearsal)
    return as_json(subject, rehearsal)


def write(found: dict[str, Any], file: str = "rehearsal.json") -> None:
    Path(file).write_text(json.dumps(found))


@pytest.mark.parametrize("findings", [(), (FINDING,), (Finding(Cause.FILES_LEFT, "x"),)])
@pytest.mark.parametrize("unlike", [None, 3])
def test_a_certificate_is_as_its_schema_says(findings: Sequence[Finding], unlike: int | None) -> None:
    found = json.loads(json.dumps(certificate(*findings, unlike=unlike)))
    assert [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(found)] == []
    assert [one["file"] for one in found["findings"]] in ([], ["src/train.py"], [None])


def test_a_script_that_was_rehearsed_as_it_is_needs_no_remark() -> None:
    write(certificate())
    assert remark(job()) is None
    write(certificate(Finding(Cause.FILES_LEFT, "x")))
    assert remark(job()) is None


def test_a_script_that_was_not_rehearsed_that_has_changed_or_that_loses_work_is_told() -> None:
    said = [remark(job())]
    write({**certificate(), "program": "other.py"})
    said.append(remark(job()))
    write(certificate(FINDING))
    said.append(remark(job()))
    write(certificate())
    Path("helper.py").write_text("")
    said.append(remark(job()))
    Path("rehearsal.json").write_text("{}")
    said.append(remark(job()))
    assert [bool(one) for one in said] == [True] * 5
    words = ["never", "never", "loses work", "changed", "could not read"]
    assert [word in str(one) for word, one in zip(words, said, strict=True)] == [True] * 5


def test_a_certificate_is_found_beside_the_script_and_in_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    write(certificate())
    monkeypatch.chdir(elsewhere)
    assert remark(job(str(folder / "train.py"))) is None
    (folder / "rehearsal.json").rename("rehearsal.json")
    assert remark(job(str(folder / "train.py"))) is None


def test_what_git_ignores_and_what_is_no_code_is_not_in_the_digest(folder: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *words], check=True, capture_output=True)

    git("init")
    Path(".gitignore").write_text("data/\n")
    Path("config.yaml").write_text("lr: 1\n")
    before = workspace_of(job()).digest()
    (folder / "data").mkdir()
    Path("data/made.py").write_text("x = 1\n")
    Path("README.md").write_text("about\n")
    write(certificate())
    git("add", ".")
    git("commit", "-m", "all")
    assert workspace_of(job()).digest() == before
    Path("config.yaml").write_text("lr: 2\n")
    assert workspace_of(job()).digest() != before


def test_without_git_output_of_the_script_is_not_in_the_digest() -> None:
    before = workspace_of(job()).digest()
    Path("metrics.json").write_text("{}")
    Path("runs/one/private").mkdir(parents=True)
    Path("runs/one/job.yaml").write_text("script: train.py\n")
    Path("runs/one/copy.py").write_text("")
    assert workspace_of(job()).digest() == before


@pytest.mark.parametrize(("mode", "told"), [("REQUEUE", True), ("CANCEL", True), ("OFF", False), ("SUSPEND", False)])
def test_only_a_job_that_may_be_preempted_is_told(
    mode: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Preemption("low", mode, 20, 30, 121)
    monkeypatch.setattr("clusterddp.slurm.configuration.preemption", lambda *_: policy)
    submit.tell_of_rehearsal(job())
    assert ("never rehearsed" in capsys.readouterr().err) is told


def test_a_valid_certificate_asks_nothing_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("clusterddp.slurm.configuration.preemption")
    monkeypatch.setattr("clusterddp.slurm.configuration.preemption", None, raising=False)
    write(certificate())
    submit.tell_of_rehearsal(job())
