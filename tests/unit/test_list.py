"""``list`` and ``status``: tables, JSON against the committed schema, and what is read for them."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clusterddp import Handle
from clusterddp.cli import list as table
from clusterddp.cli.command_line import command
from clusterddp.errors import UsageError
from clusterddp.reporter import speed
from clusterddp.rundir.run_directory import RunDirectory, find_runs
from clusterddp.rundir.summary import summarize
from clusterddp.slurm.run_states import WORDS, run_states
from tests.fake_slurm import FakeSlurm
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps
from tests.timings import timing_lines, write_timings
from tests.wording import raises, says

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/run.schema.json").read_text())
QUEUE = """\
41|RUNNING|n[1-2]|2026-11-22T08:00:00|1:00:00|gpu|None
42|PENDING||2126-11-23T08:00:00|1:00:00|gpu|QOSMaxGRESPerUser
43|PENDING||N/A|1:00:00|gpu|BeginTime
"""
BEGUN = [event("progress", step=0, steps=400, rank=0), event("training", step=0)]


clock = [0.0]


@pytest.fixture
def runs(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six runs in all kinds of states, with squeue's answer about three jobs."""
    folder = tmp_path / "runs"
    requeued = event("requeued", reason="preempted", cause="preempted", step=9, checkpoint=9, window_s=1.0)
    saved = event("checkpoint", step=90, blocked_s=0.1, durable_s=0.2, bytes=9)
    recorded_run(
        folder / "running", [started(), *BEGUN, saved], holder=of_job(), metrics=steps(range(100), loss=0.5, acc=0.9)
    )
    recorded_run(folder / "pending", submitted=of_job("42"))
    recorded_run(folder / "held", [started(job="43"), *BEGUN, requeued], holder=of_job("43"))
    over = {"state": "completed", "step": 400, "reason": "all ranks finished"}
    recorded_run(folder / "completed", [started(job="9"), *BEGUN], outcome=over, metrics=steps([399], acc=0.7))
    ended = {"state": "failed", "step": 3, "reason": "rank 1 (n2) failed:\nRuntimeError: " + "x" * 200}
    recorded_run(folder / "failed", [started(job="8"), *BEGUN, requeued, started(1, job="8")], outcome=ended)
    recorded_run(folder / "stopped", [started(job="7")], holder=of_job("7"), metrics=steps([0], loss=float("nan")))
    fake_slurm["squeue"] = QUEUE
    clock[0] = BEGAN + 60
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert command(words) == 0
    return capsys.readouterr().out


def test_a_run_is_a_line_with_all_that_is_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe nothing is left out, and there are no colours."""
    heading, *lines = said(capsys, "list", "--show", "loss,acc").splitlines()
    assert heading.split() == "RUN STATE STEP SPEED LEFT LOSS ACC ATTEMPTS JOB NODES ENDS REASON".split()
    found = {line.split()[0]: line.split() for line in lines}
    assert found["runs/running"][1:] == "running 100/400 2/s 2 min 0.5 0.9 1 41 n[1-2]".split()
    assert found["runs/completed"][1:5] == "completed 400/400 0.7 1".split()
    assert found["runs/pending"][1] == "pending" and "a limit of its QOS is reached" in "\n".join(lines)
    assert found["runs/held"][1] == "held"
    assert found["runs/stopped"][1:4] == "stopped 1 nan".split()
    assert "x" * 200 in "\n".join(lines)


def test_a_column_that_is_there_is_not_replaced_by_a_metric_that_nobody_logged(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step", "state", "run"):
        assert said(capsys, "list", "--show", name) == said(capsys, "list")
    assert said(capsys, "list", "--show", "step,acc,speed") == said(capsys, "list", "--show", "acc")
    capsys.readouterr()
    command(["list", "--show", "step,loss"])
    assert capsys.readouterr().err == ""


def test_newest_runs_are_first_or_those_with_the_lowest_value(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a column or a metric, which is shown then; runs without a value, or with NaN, are last."""

    def order(*words: str) -> list[str]:
        return [line.split()[0].removeprefix("runs/") for line in said(capsys, "list", *words).splitlines()[1:]]

    assert order()[0] == "pending", "whose job definition is newer than the recorded starts"
    assert order("--sort", "acc")[:2] == ["completed", "running"]
    assert order("--sort", "acc", "--reverse")[:2] == ["running", "completed"]
    assert order("--sort", "loss")[0] == "running"
    assert order("--sort", "job", "--state", "held,failed") == ["held", "failed"]
    assert order("--state", "running,stopped", "--sort", "run") == ["running", "stopped"]
    with raises(UsageError):
        command(["list", "--sort", "speeed"])
    with raises(UsageError):
        command(["list", "--state", "runing"])


def test_json_follows_the_committed_schema(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every state; status prints the same object, with more."""
    check = jsonschema.Draft202012Validator(SCHEMA)
    found = {one["name"]: one for one in json.loads(said(capsys, "list", "--json"))}
    assert {one["state"] for one in found.values()} == {*WORDS} - {"cancelled", "unknown"}
    assert SCHEMA["properties"]["state"]["enum"] == list(WORDS)
    assert found["stopped"]["metrics"] == {"loss": "NaN"}
    assert found["pending"]["expected_start"] > BEGAN and "--qos" in found["pending"]["remedy"]
    for name, one in found.items():
        check.validate(one)
        assert one.keys() == set(SCHEMA["required"])
        more = json.loads(said(capsys, "status", "--json", f"runs/{name}"))
        check.validate(more)
        assert more.keys() == SCHEMA["properties"].keys()
        assert {key: more[key] for key in one} == one


def test_a_handles_state_is_that_of_the_list(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every state."""
    for one in json.loads(said(capsys, "list", "--json")):
        assert Handle(one["run"]).status().state == one["state"]


def test_csv_has_a_line_per_run_and_all_metrics(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the keys of the JSON."""
    found = {line["name"]: line for line in csv.DictReader(io.StringIO(said(capsys, "list", "--csv")))}
    assert len(found) == 6
    assert (found["running"]["state"], found["running"]["steps"], found["running"]["metrics.acc"]) == (
        "running",
        "400",
        "0.9",
    )
    assert found["pending"]["metrics.acc"] == "" and found["failed"]["ends"] == "preempted"


def test_a_folder_without_runs_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Nothing on stdout but, for a program, an empty list."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    assert command(["list"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "no runs in runs\n")
    assert command(["list", "--state", "failed,held"]) == 0
    says(capsys.readouterr().err)
    assert json.loads(said(capsys, "list", "--json")) == []


def test_status_says_why_a_run_waits_and_what_to_do(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the start that Slurm expects."""
    shown = said(capsys, "status", "runs/pending")
    assert "state     job 42 (PENDING)\n" in shown
    assert "waits     a limit of its QOS is reached: GPUs per user (QOSMaxGRESPerUser)\n" in shown
    assert "to do     the job starts when others that count towards the limit end" in shown
    assert "starts    11-23 08:00" in shown
    shown = said(capsys, "status", "runs/held")
    assert "waits     held by Slurm for a while, which happens after each requeue\n" in shown
    assert "to do     `clusterddp wait --resubmit runs/held` lifts the hold" in shown and "starts  " not in shown


def test_status_names_a_slow_node_with_what_it_is_slow_in(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said as long as none is; the scores are in the JSON, in any case."""
    run = RunDirectory("runs/running")
    write_timings(run, timing_lines(["n1", "n2"], 60.0))
    assert "slow  " not in said(capsys, "status", "runs/running")
    write_timings(run, timing_lines(["n1", "n2"], 60.0, attempt=1, slow={1: ("data_s", 80.0)}))
    shown = said(capsys, "status", "runs/running")
    words = r"^slow      n2: 2\.[56] times as long per step as the fastest, in waiting for its batches$"
    assert re.search(words, shown, re.MULTILINE), shown
    found = json.loads(said(capsys, "status", "--json", "runs/running"))
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert [one["slow"] for one in found["stragglers"]["ranks"]] == [False, True]
    assert found["stragglers"]["nodes"][1]["relative"] == pytest.approx(0.4, abs=0.02)
    write_timings(RunDirectory("runs/completed"), timing_lines(["n1", "n2"], 60.0, slow={1: ("data_s", 80.0)}))
    assert "slow  " not in said(capsys, "status", "runs/completed")


def test_status_says_how_far_a_run_is(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, speed, time left, the last save, nodes and what they have."""
    shown = said(capsys, "status", "runs/running")
    assert "state     job 41 (RUNNING on n[1-2])\n" in shown
    assert "steps     100 of 400 done, last values: loss 0.5, acc 0.9\n" in shown
    assert "speed     2/s, about 2 min left\n" in shown
    assert "saved     step 90, " in shown
    assert "nodes     n[1-2], 1 process each\n" in shown
    assert "state     failed at step 3: rank 1 (n2) failed:" in said(capsys, "status", "runs/failed")


def test_status_tells_the_nodes_with_ranks_from_the_jobs_idle_ones(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm lists the nodes of a job together."""
    begun = {**started(nodes="n1"), "spares": ["n2"]}
    recorded_run(runs / "running", [begun], holder=of_job())
    shown = said(capsys, "status", "runs/running")
    assert "RUNNING on n[1-2]" in shown
    assert "nodes     n1, 1 process each\nidle      n2 (spare)\n" in shown


def test_status_names_the_checkpoint_of_a_script_that_saves_by_itself(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest that matches ``resume``, or that the script named when it stopped."""
    found = event("own_checkpoint", file="out/a.pt", written=BEGAN + 10)
    named = {**event("saved", file=str(runs / "own" / "out" / "b.pt"), rank=0), "time": BEGAN + 50}
    recorded_run(runs / "own", [started(), found], holder=of_job())
    assert "saved     out/a.pt, 50 s ago\n" in said(capsys, "status", "runs/own")
    recorded_run(runs / "both", [started(), found, named], holder=of_job())
    assert f"saved     {runs}/own/out/b.pt, 10 s ago\n" in said(capsys, "status", "runs/both")


def test_a_run_without_new_steps_has_no_time_left(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last step was 14 minutes ago: it may hang. A slow run is not meant."""
    clock[0] = BEGAN + 50 + 14 * 60
    assert "speed     2/s until 14 min ago, no step since then\n" in said(capsys, "status", "runs/running")
    assert json.loads(said(capsys, "list", "--json", "runs/running"))[0]["left_s"] is None
    recorded_run(runs / "slow", [started(), *BEGUN], holder=of_job(), metrics=steps(range(3), pace_s=600.0))
    clock[0] = BEGAN + 1200 + 5 * 600
    assert "speed     600 s/step, about 2 d 18 h left\n" in said(capsys, "status", "runs/slow")


ODD = ["two words", "line\nbreak", "[red]x", "l\u00e4ufe \u65e5\u672c", "\x1b[2J\x9b\u202ex", "a\u0301b"]


def test_odd_names_are_shown_in_one_line_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Markup is no markup; what a terminal would obey, or show in another order, becomes a question mark."""
    for name in ODD:
        recorded_run(tmp_path / "runs" / name, [started()], outcome={"state": "failed", "reason": name})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    shown = said(capsys, "list").splitlines()
    assert len(shown) == 1 + len(ODD)
    assert all(line.isprintable() for line in shown)
    text = "\n".join(shown)
    assert "runs/[red]x " in text and "runs/line?break " in text and "runs/?[2J??x " in text
    at = {table.columns_of(line[: line.index("failed")]) for line in shown[1:]}
    assert len(at) == 1, "the columns are aligned, also behind letters that take two columns or none"
    assert {one["name"] for one in json.loads(said(capsys, "list", "--json"))} == set(ODD)


def test_a_metric_that_no_run_has_logged_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And those that were; the other metrics are shown."""
    command(["list", "--show", "los,acc"])
    printed = capsys.readouterr()
    says(printed.err)
    assert "ACC" in printed.out and "LOS" not in printed.out


def test_members_of_a_sweep_stay_together_in_the_order_of_their_newest(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Although other runs began between them."""
    fake_slurm["squeue"] = ""
    for place, name in enumerate(["lr/a", "net-0", "lr/b", "net-1", "lr/c", "net-2"]):
        run = recorded_run(tmp_path / name, [started()])
        run.events_file.write_text(json.dumps({"time": BEGAN + place, **started()}) + "\n")
    (tmp_path / "lr/sweep.yaml").touch()
    summaries = [summarize(run) for run in find_runs([str(tmp_path)])]
    shown = [table.Row(*pair) for pair in zip(summaries, run_states(summaries), strict=True)]
    newest_first = ["net-2", "lr/c", "lr/b", "lr/a", "net-1", "net-0"]
    assert [row.summary.name for row in table.ordered(shown, None, False)] == newest_first
    assert [row.summary.name for row in table.ordered(shown, None, True)] == newest_first[::-1]


def rows(runs: Path) -> list[table.Row]:
    summaries = [summarize(run) for run in find_runs([str(runs)])]
    return [table.Row(*pair) for pair in zip(summaries, run_states(summaries), strict=True)]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40])
def test_a_table_fits_the_terminal(runs: Path, width: int) -> None:
    """Run, state and step stay, columns are left out, and the reason is clipped."""
    lines = table.table(rows(runs), table.columns([]), width)
    assert max(map(len, lines)) <= width
    assert all(word in lines[0].split() for word in ("RUN", "STATE", "STEP"))
    assert ("REASON" in lines[0].split()) == (width > 40)


def test_runs_with_long_paths_are_told_apart_on_a_narrow_terminal(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ends of their paths: the beginning is the same for all runs of a folder."""
    monkeypatch.chdir("/")
    shown = [line.split()[0] for line in table.table(rows(runs), table.columns([]), 40)[1:]]
    assert len(set(shown)) == 6 and all(name.startswith("...") for name in shown)


def test_colours_change_no_text(runs: Path) -> None:
    """They are on a terminal alone, and not with NO_COLOR."""
    found = rows(runs)
    plain, coloured = (table.table(found, table.columns([]), 100, colour) for colour in (False, True))
    assert plain[0] == coloured[0]
    assert _without_colours("\n".join(coloured)) == "\n".join(plain)
    assert "\x1b[31mfailed" in "".join(coloured)


def _without_colours(text: str) -> str:
    from rich.text import Text

    return Text.from_ansi(text).plain


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The files that are opened meanwhile."""
    found: list[str] = []
    watching = [True]

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if watching[0] and name == "open" and isinstance(arguments[0], (str, Path)):
            found.append(str(arguments[0]))

    sys.addaudithook(hook)  # for the rest of the process
    yield found
    watching[0] = False


def test_a_list_opens_at_most_four_files_and_two_folders_of_a_run_and_no_job_definition(
    tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], opened: list[str]
) -> None:
    """Fifty runs, with every record that a run can have."""
    folder = tmp_path / "runs"
    for number in range(50):
        history = [line for attempt in range(4) for line in (started(attempt), event("training", attempt, step=0))]
        more = {"outcome": {"state": "completed"}} if number % 2 else {"submitted": of_job("9"), "loop": of_job("9")}
        recorded_run(folder / f"net-{number}", history, holder=of_job(), metrics=steps(range(100)), **more)
    fake_slurm["squeue"] = QUEUE
    opened.clear()
    assert len(json.loads(said(capsys, "list", "--json", str(folder)))) == 50
    of_runs = [Path(path) for path in opened if path.startswith(str(folder))]
    of_each = [[path for path in of_runs if path.is_relative_to(folder / f"net-{number}")] for number in range(50)]
    folders = max(sum(path.is_dir() for path in of_one) for of_one in of_each)
    assert folders <= 2 and 2 <= max(map(len, of_each)) - folders <= 4
    assert not any(path.suffix == ".yaml" for path in of_runs)


def test_a_list_without_sweeps_loads_no_yaml(tmp_path: Path) -> None:
    """Nor torch, nor rich: they would take longer than reading hundreds of runs."""
    recorded_run(tmp_path / "runs" / "net", [started()], outcome={"state": "completed"})
    code = (
        "import sys; from clusterddp.cli.command_line import command; command(['list', 'runs'])\n"
        "sys.exit(str({'yaml', 'torch', 'rich', 'numpy'} & sys.modules.keys()).replace('set()', '') or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "runs/net  completed" in done.stdout


@pytest.mark.parametrize(
    ("seconds_per_step", "shown"),
    [(None, ""), (0.08, "12.5/s"), (0.00124, "806/s"), (0.0009, "1,111/s"), (3.14, "3.14 s/step"), (75, "75 s/step")],
)
def test_speed_is_shown_per_second_or_per_step(seconds_per_step: float | None, shown: str) -> None:
    """Never with an exponent."""
    assert speed(seconds_per_step) == shown
