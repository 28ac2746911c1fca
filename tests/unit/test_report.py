"""``clusterddp report``: its data, from whole and from damaged runs, and where it goes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clusterddp import entry
from clusterddp.cli.command_line import command
from clusterddp.cli.report import collected
from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job
from clusterddp.report.booking import CATEGORIES
from clusterddp.report.curves import BUCKETS
from clusterddp.report.page import page
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.runs.sweep_members import Record
from tests.fake_slurm import FakeSlurm
from tests.long_run import EVERY, HELD_S, QUEUED_S, REPEATED, STEP_S, long_run
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps
from tests.wording import raises, says

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/report.schema.json").read_text())
NOW = BEGAN + 1e6


@pytest.fixture(autouse=True)
def _no_jobs(fake_slurm: FakeSlurm) -> None:
    fake_slurm[""] = ""


def data_of(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = collected([run], NOW)["runs"][0]
    return found


def test_the_data_follow_the_committed_schema(tmp_path: Path) -> None:
    """Of a run with everything, of one that has just been submitted, and of one whose metrics are not finite."""
    failed = [started(), event("rank_failed", rank=1, host="n2", error="RuntimeError: no", step=3)]
    runs = [
        long_run(tmp_path / "long"),
        recorded_run(tmp_path / "new", submitted=of_job()),
        recorded_run(tmp_path / "failed", failed, metrics=steps(range(3), loss="NaN")),
    ]
    found = json.loads(json.dumps(collected(runs, NOW)))
    check = jsonschema.Draft202012Validator(SCHEMA)
    assert [error.message for error in check.iter_errors(found)] == []
    assert set(found["runs"][0]["time"]["seconds"]) == set(CATEGORIES)


def test_a_lane_begins_with_the_wait_for_its_attempt(tmp_path: Path) -> None:
    """The lanes cover the time of the run without a gap, and each says why its attempt ended."""
    found = data_of(long_run(tmp_path / "run"))
    first, second, third = found["attempts"]
    assert (first["end"], second["end"]) == (second["begin"], third["begin"])
    assert first["seconds"]["queued"] == pytest.approx(QUEUED_S)
    assert second["seconds"]["held"] == pytest.approx(HELD_S)
    assert third["seconds"]["repeating"] == pytest.approx(REPEATED * STEP_S, abs=0.6)
    assert (second["how"], third["how"]) == ("preempted", "completed")
    assert third["repeated"] == REPEATED
    assert sum(sum(lane["seconds"].values()) for lane in found["attempts"]) == pytest.approx(found["time"]["total_s"])
    assert found["interruptions"] == {"preempted": 2}
    assert found["verdict"].startswith("Completed all 600 steps")
    assert "interrupted 2 times (preempted), 10 steps were repeated, and" in found["verdict"]


def test_an_attempt_that_failed_before_the_run_was_continued_is_an_interruption(tmp_path: Path) -> None:
    """The lane says why; the end of the newest attempt is the run's."""
    failed = event("failed", step=3, attempts=1, reason="rank 1 (n2) failed: ValueError: no")
    again = [started(1), event("completed", 1, step=9, attempts=2, reason="")]
    outcome = {"outcome": {"state": "completed", "step": 9, "attempts": 2}}
    found = data_of(recorded_run(tmp_path / "run", [started(), failed, *again], **outcome))
    assert [lane["how"] for lane in found["attempts"]] == ["rank 1 (n2) failed: ValueError: no", "completed"]
    assert "interrupted once (rank 1 (n2) failed: ValueError: no)" in found["verdict"]


@pytest.mark.parametrize(("job", "how"), [("41", "node n1 probably lost"), ("42", "ended without a record")])
def test_an_attempt_without_an_end_whose_job_slurm_restarted_lost_its_batch_host(
    tmp_path: Path, job: str, how: str
) -> None:
    """The supervisor ran there, and could record nothing; another job says nothing about that."""
    found = data_of(recorded_run(tmp_path / "run", [started(), started(1, job=job)]))
    assert found["attempts"][0]["how"] == how


def test_steps_that_were_repeated_are_apart(tmp_path: Path) -> None:
    """The curve over steps has each step once; what attempt 1 lost is a curve of its own."""
    loss = data_of(long_run(tmp_path / "run"))["metrics"][0]
    steps_of = [point[0] for point in loss["steps"]]
    assert len(steps_of) == BUCKETS and steps_of == sorted(steps_of)
    assert [(tail["attempt"], len(tail["points"])) for tail in loss["discarded"]] == [(1, REPEATED * BUCKETS // 600)]
    assert loss["last"]["step"] == 599


def test_points_keep_the_least_and_the_largest_of_their_values(tmp_path: Path) -> None:
    """A single spike among thousands of steps stays visible."""
    lines = steps(range(5000), loss=1.0)
    lines[3333]["loss"] = 50.0
    (loss,) = data_of(recorded_run(tmp_path / "run", [started()], metrics=lines))["metrics"]
    assert len(loss["steps"]) == BUCKETS
    assert [point[2] for point in loss["steps"] if point[3] == 50.0] == [1.0]


def test_values_that_were_logged_between_two_steps_are_shown_in_their_order(tmp_path: Path) -> None:
    """Each line may be of an earlier step than the one before, whichever metrics these have."""
    lines = [*steps([4], loss=4.0), *steps([8, 2, 6], accuracy=0.5), *steps([8, 2, 6], loss=1.0)]
    loss, accuracy = data_of(recorded_run(tmp_path / "run", [started()], metrics=lines))["metrics"]
    assert [point[:2] for point in loss["steps"]] == [[2, 1.0], [4, 4.0], [6, 1.0], [8, 1.0]]
    assert [point[0] for point in accuracy["steps"]] == [2, 6, 8]
    assert accuracy["last"]["step"] == loss["last"]["step"] == 8


def test_saves_are_summed_up(tmp_path: Path) -> None:
    """How many, how large, and how long they blocked training."""
    found = data_of(long_run(tmp_path / "run", attempts=1, steps=5 * EVERY))["checkpoints"]
    assert (found["number"], found["newest"]["step"]) == (5, 5 * EVERY)
    assert found["bytes"]["newest"] == 1.2e9
    assert 0.02 <= found["blocked_s"]["median"] <= found["blocked_s"]["most"] < 0.03


def test_a_failure_has_its_box(tmp_path: Path) -> None:
    """In the supervisor's words, with the end of the rank's log, and without its colours."""
    failure = event("rank_failed", rank=0, host="n1", error="killed by signal KILL", step=3)
    run = recorded_run(tmp_path / "run", [started(), failure])
    (run.attempt_logs(0)).mkdir(exist_ok=True)
    (run.attempt_logs(0) / "rank-0.err").write_text("\x1b[31mslurmstepd: Detected 1 oom_kill event\x1b[0m\n")
    (found,) = data_of(run)["failures"]
    assert found["words"].startswith("first failure at step 3: rank 0 (n1) ")
    assert "\nslurmstepd: Detected 1 oom_kill event\n" in found["box"]


# --- damaged runs


def half_foreign(run: RunDirectory) -> None:
    for file in (run.events_file, run.metrics_file, run.timing_file):
        file.write_bytes(file.read_bytes().replace(b'"step": 2', b'"step": "two', 1) + b'[1]\n{"time": "now"}\n')


def no_files(run: RunDirectory) -> None:
    for file in (run.events_file, run.metrics_file, run.timing_file, run.outcome_file):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (half_foreign, "because another program wrote them"),
        (no_files, "has no history"),
    ],
)
def test_a_damaged_run_is_reported_with_what_is_missing(
    tmp_path: Path, damage: Callable[[RunDirectory], None], note: str
) -> None:
    """The page opens whatever is in the files, and its data follow the schema."""
    run = long_run(tmp_path / "run", steps=60)
    damage(run)
    found = collected([run], NOW)
    assert note in "\n".join(found["runs"][0]["notes"])
    assert [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(found)] == []
    assert page(found).rstrip().endswith("</html>")


# --- the command


def test_the_file_is_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its name alone is on stdout."""
    monkeypatch.chdir(tmp_path)
    long_run(tmp_path / "runs" / "net-0", steps=60)
    assert command(["report", "runs/net-0"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'net-0-report.html'}\n"
    assert command(["report", "runs", "-o", "here.html"]) == 0
    assert (tmp_path / "here.html").read_text().startswith("<!doctype html>")


def test_a_report_goes_to_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As a page, or as JSON; nothing is written."""
    monkeypatch.chdir(tmp_path)
    long_run(tmp_path / "runs" / "net-0", steps=60)
    assert command(["report", "runs/net-0", "-o", "-"]) == 0
    assert "</html>" in capsys.readouterr().out
    assert command(["report", "runs/net-0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_a_file_in_no_folder_is_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    run = str(recorded_run(tmp_path / "run"))
    with raises(UsageError):
        command(["report", run, "-o", str(tmp_path / "no" / "report.html")])
    with raises(UsageError):
        command(["report", run, "-o", str(tmp_path)])


def test_members_of_a_sweep_have_their_values(tmp_path: Path) -> None:
    """The page has a row for each, with the value by which they differ."""
    folder = tmp_path / "lr"
    runs = [long_run(folder / name, steps=60) for name in ("lr=0.1", "lr=0.2")]
    members = {f"lr={value}": {"lr": value} for value in ("0.1", "0.2")}
    (folder / SWEEP_FILE).write_text(Record(Job(name="net", module="net", device="cpu"), members).to_yaml())
    found = collected(runs, NOW)
    assert [run["values"] for run in found["runs"]] == [{"lr": "0.1"}, {"lr": "0.2"}]
    text = page(found)
    assert "2 runs" in text and "loss over lr" in text
    assert ">0.1</td>" in text and ">0.2</td>" in text


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Nor is a device: root's ``-o /dev/null`` must not make it a file."""
    recorded_run(tmp_path / "net-0", [started()])
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
    assert command(["report", str(tmp_path / "net-0"), "-o", str(tmp_path / "pipe")]) == 0
    assert (tmp_path / "pipe").is_fifo()
    assert os.read(reader, 1 << 20).startswith(b"<!doctype html>")
    os.close(reader)


def test_report_list_and_status_name_the_same_newest_values(tmp_path: Path, capsys: Any) -> None:
    """Of members of a sweep that were evaluated behind the loop, one of which then lost that to a resume before it."""
    begun = [started(), event("progress", step=0, steps=4), event("training", step=0)]
    evaluated = event("result", step=4, accuracy=0.9, loss=0.1)
    folder, lines = tmp_path / "sweep", steps(range(4), loss=0.5)
    over = {"state": "completed", "step": 4, "reason": "all ranks finished"}
    between = [event("result", step=2, accuracy=0.4), evaluated]
    behind = {"step": 4, "time": BEGAN + 10, "attempt": 0, "event": "result", "accuracy": 0.9, "loss": 0.1}
    before = {**behind, "step": 2, "time": BEGAN + 1, "accuracy": 0.4}
    del before["loss"]
    recorded_run(folder / "lr=0.1", [*begun, evaluated], metrics=[*lines, behind], outcome=over)
    recorded_run(folder / "lr=0.2", [*begun, *between], metrics=[*lines[:2], before, *lines[2:], behind], outcome=over)
    lost = [*begun, evaluated, started(1), event("resumed", 1, step=2)]
    recorded_run(folder / "lr=0.3", lost, metrics=[*lines, behind, *steps([2], 1, loss=0.7)], holder=of_job())
    record = Record(Job(name="net", module="net", device="cpu"), {f"lr=0.{n}": {"lr": f"0.{n}"} for n in (1, 2, 3)})
    (folder / SWEEP_FILE).write_text(record.to_yaml())
    wanted = {
        "lr=0.1": {"loss": 0.1, "accuracy": 0.9},
        "lr=0.2": {"loss": 0.1, "accuracy": 0.9},
        "lr=0.3": {"loss": 0.7},
    }

    command(["list", "--json", "--show", "loss,accuracy", str(folder)])
    listed = {Path(one["run"]).name: one["metrics"] for one in json.loads(capsys.readouterr().out)}
    assert listed == wanted
    for name, values in wanted.items():
        command(["status", "--json", str(folder / name)])
        assert json.loads(capsys.readouterr().out)["metrics"] == values
    command(["report", "--json", str(folder)])
    reported = json.loads(capsys.readouterr().out)["runs"]
    newest = {
        Path(run["run"]).name: {one["name"]: one["last"]["value"] for one in run["metrics"] if one["last"]}
        for run in reported
    }
    assert newest == wanted
    accuracy = next(one for one in reported[1]["metrics"] if one["name"] == "accuracy")
    assert [point[:2] for point in accuracy["steps"]] == [[2, 0.4], [4, 0.9]]
    assert [point[:2] for tail in reported[2]["metrics"][1]["discarded"] for point in tail["points"]] == [[4, 0.9]]


def test_a_folder_of_another_user_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Without a traceback in a file, which would say no more."""
    run = long_run(tmp_path / "net-0", steps=60)
    denied = PermissionError(13, "Permission denied", str(tmp_path / ".page.html.0123abcd.tmp"))

    def refuse(*_: object) -> None:
        raise denied

    monkeypatch.setattr("clusterddp.cli.report.write_atomically", refuse)
    with pytest.raises(SystemExit) as ended:
        entry.exit_with(lambda: command(["report", "-o", str(tmp_path / "page.html"), str(run)]))
    assert ended.value.code == 1
    says(capsys.readouterr().err)
