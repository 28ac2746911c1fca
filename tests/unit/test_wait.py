"""``clusterddp wait``: when it ends, and with which exit code."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from clusterddp.cli.command_line import command
from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary
from clusterddp.runs import waiting
from clusterddp.slurm.polling import Pace
from clusterddp.slurm.run_states import RunState
from clusterddp.supervisor import lease
from tests.histories import happened
from tests.wording import raises, says

Captured = pytest.CaptureFixture[str]


class World:
    """The clock, what happens at each second of it, and what the controller says about each run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0
        self.events: dict[int, Callable[[], object]] = {}
        self.states: dict[str, str] = {}
        #: When it was asked about which runs.
        self.asked: list[tuple[float, list[str]]] = []
        self.blocked = False
        #: Called before an answer is given.
        self.answering: Callable[[], object] = lambda: None

    def add(self, name: str, state: str = "running") -> RunDirectory:
        """A run."""
        run = RunDirectory(self.folder / name)
        run.create()
        run.job_file.write_text("module: x\n")
        self.states[name] = state
        return run

    def over(self, name: str, state: str) -> None:
        """A run ends."""
        outcome: dict[str, object] = {"state": state, "step": 7, "attempts": 1, "reason": "why"}
        if state == "unconfirmed":
            outcome |= {"state": "completed", "confirmed": False}
        write_json(RunDirectory(self.folder / name).outcome_file, outcome)

    def sleep(self, seconds: float) -> None:
        """Passes the time."""
        before, self.now = self.now, self.now + seconds
        for second in range(int(before), int(self.now)):
            self.events.pop(second - 1000, lambda: None)()
        assert self.now < 10_000, "waits for ever"

    def run_states(self, summaries: Sequence[Summary], timeout_s: float, queue: Pace) -> list[RunState]:
        """Stands for squeue, which answers at once unless ``blocked``."""
        if self.blocked:
            self.sleep(timeout_s)
        names = [summary.run.path.name for summary in summaries]
        found = [RunState(self.states[name], "reason") for name in names]
        self.asked.append((self.now - 1000, names))
        self.answering()
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: world.now)
    monkeypatch.setattr(waiting.time, "sleep", world.sleep)
    monkeypatch.setattr(waiting, "run_states", world.run_states)
    monkeypatch.setattr("clusterddp.slurm.polling.random.uniform", lambda least, _: least)
    return world


def test_it_waits_for_all_and_says_how_each_ended(world: World, capsys: Captured) -> None:
    """On standard error, once; nothing on standard output."""
    a, b = world.add("a"), world.add("b", "pending")
    world.events = {3: lambda: world.over("b", "completed"), 5: lambda: world.over("a", "completed")}
    assert command(["wait", "a", "b"]) == 0
    assert capsys.readouterr() == ("", f"{b}: completed at step 7: why\n{a}: completed at step 7: why\n")


def test_runs_that_are_over_need_no_controller(world: World) -> None:
    world.add("a")
    world.over("a", "completed")
    assert (command(["wait", "a"]), world.asked) == (0, [])


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["completed", "cancelled"], 11),
        (["cancelled", "failed", "completed"], 10),
        (["stopped", "cancelled"], 11),
        (["unknown", "stopped"], 12),
        (["completed", "unknown"], 13),
        (["unconfirmed", "unknown"], 13),
        (["unconfirmed", "completed"], 14),
    ],
)
def test_the_exit_code_is_that_of_the_worst_end(world: World, ends: list[str], code: int) -> None:
    """Failed, cancelled, stopped, unknown, not confirmed, in this order."""
    for number, end in enumerate(ends):
        world.add(f"r{number}", end)
        if end in ("completed", "cancelled", "failed", "unconfirmed"):
            world.over(f"r{number}", end)
    assert command(["wait", "r*"]) == code


def test_any_ends_with_the_first_that_ends(world: World) -> None:
    world.add("a"), world.add("b")
    world.events = {4: lambda: world.over("b", "failed")}
    assert command(["wait", "--any", "a", "b"]) == 10
    assert world.now - 1000 < 10


def test_the_time_is_up(world: World, capsys: Captured) -> None:
    """Whatever ended before."""
    for number in range(7):
        world.add(f"r{number}")
    world.over("r0", "failed")
    assert command(["wait", "--timeout", "0.5h", "r*"]) == 124
    assert 1800 <= world.now - 1000 < 1802
    says(capsys.readouterr().err)


def test_a_controller_that_does_not_answer_delays_no_timeout(world: World) -> None:
    world.add("a", "unknown")
    world.blocked = True
    assert command(["wait", "--timeout", "15s", "a"]) == 124
    assert 15 <= world.now - 1000 < 17


def test_the_controller_is_asked_once_for_all_and_not_often(world: World) -> None:
    world.add("a"), world.add("b"), world.add("c")
    world.over("c", "completed")
    assert command(["wait", "--timeout", "25s", "a", "b", "c"]) == 124
    assert world.asked == [(at, ["a", "b"]) for at in (0, 1, 3, 7, 15)]


@pytest.mark.parametrize("word", ["stopped", "failed", "cancelled"])
def test_an_outcome_that_a_shared_disk_does_not_show_yet_is_waited_for(world: World, word: str) -> None:
    """The history, a file that is known, says that the run is over."""
    hidden, lost = world.add("a", word), world.add("b", word)
    for run in (hidden, lost):
        happened(run, {"event": "completed", "attempt": 0, "time": 2.0, "step": 9, "reason": "done"})
    world.events = {60: lambda: world.over("a", "completed")}
    assert command(["wait", "a"]) == 0
    assert command(["wait", "b"]) == {"stopped": 12, "failed": 10, "cancelled": 11}[word]


def test_a_run_that_is_between_two_jobs_has_not_stopped(world: World, capsys: Captured) -> None:
    """Nor one whose outcome is written just after its job left the queue. One that stays stopped has."""
    resubmitted, late, stopped = (world.add(name, "stopped") for name in "abc")
    world.events = {
        1: lambda: world.states.update(a="held"),
        2: lambda: world.over("b", "completed"),
        15: lambda: world.states.update(a="stopped"),
        17: lambda: world.over("a", "completed"),
    }
    assert command(["wait", "a", "b", "c"]) == 12
    ends = [line.split(" at ")[0].split(" (")[0] for line in capsys.readouterr().err.splitlines()]
    assert ends == [f"{late}: completed", f"{stopped}: stopped", f"{resubmitted}: completed"]


def test_an_unreachable_controller_is_not_the_end(world: World, capsys: Captured) -> None:
    """It restarts within minutes. One line says that it is asked again, for all runs."""
    world.add("a", "unknown")
    world.add("b", "unknown")
    world.events = {
        200: lambda: world.states.update(a="running", b="running"),
        700: lambda: (world.over("a", "completed"), world.over("b", "completed")),
    }
    assert command(["wait", "a", "b"]) == 0
    assert capsys.readouterr().err.count("the state of a run is unknown, retrying: reason\n") == 1


def test_a_run_that_ends_while_the_controller_does_not_answer_has_not_ended_unknown(world: World) -> None:
    """The last question may take 20 s, in which the outcome was written: it is read again."""
    world.add("a", "unknown")
    world.blocked = True
    assert command(["wait", "a"]) == 13
    last = world.asked[-1][0]
    world.add("b", "unknown")
    world.events = {int(world.now - 1000 + last) - 1: lambda: world.over("b", "completed")}
    assert command(["wait", "b"]) == 0


def test_a_run_that_is_submitted_again_while_the_controller_takes_its_time_has_not_stopped(world: World) -> None:
    """Its answer is about the job before: `wait` had ended with "stopped" while the next job trained."""
    run = world.add("a", "stopped")

    def slowly() -> None:
        if world.now >= 1000 + waiting.END_SETTLE_S and not run.submitted_file.exists():
            world.sleep(30.0)
            lease.submitted(run, "42")
            world.states["a"] = "running"

    world.answering = slowly
    world.events = {300: lambda: world.over("a", "completed")}
    assert command(["wait", "a"]) == 0


def test_a_cancelled_run_without_an_outcome_has_ended(world: World) -> None:
    """Its supervisor was killed, and `cancel` could not write on a full disk."""
    world.add("a", "cancelled")
    assert command(["wait", "a"]) == 11


def test_nothing_in_a_run_changes(world: World) -> None:
    """Unlike with `wait --resubmit`."""
    run = world.add("a", "stopped")

    def files() -> Mapping[Path, float]:
        return {path: path.stat().st_mtime_ns for path in [run.path, *run.path.rglob("*")]}

    before = files()
    assert command(["wait", "a"]) == 12
    assert files() == before


@pytest.mark.parametrize("text", ["5", "1:30:00", "-1s", "2 h", "1w"])
def test_a_timeout_has_a_unit(world: World, text: str, capsys: Captured) -> None:
    """A bare number would be minutes to Slurm, and seconds to timeout(1)."""
    with pytest.raises(SystemExit) as exited:
        command(["wait", "a", f"--timeout={text}"])
    assert exited.value.code == 2
    says(capsys.readouterr().err.splitlines()[-1])


def test_a_word_that_names_no_run_is_refused(world: World) -> None:
    world.add("a")
    with raises(RunDirectoryError):
        command(["wait", "a", "b"])


def test_a_damaged_record_of_one_run_leaves_it_unknown_and_the_others_are_waited_for(
    world: World, capsys: Captured
) -> None:
    a, b = world.add("a", "unknown"), world.add("b")
    a.outcome_file.write_text("garbage")
    world.events = {3: lambda: world.over("b", "completed")}
    assert command(["wait", "a", "b"]) == 13
    assert capsys.readouterr().err.splitlines()[1:] == [f"{b}: completed at step 7: why", f"{a}: unknown: reason"]


def test_a_run_directory_that_is_deleted_is_not_called_stopped(world: World, capsys: Captured) -> None:
    a = world.add("a", "stopped")
    world.events = {1: lambda: shutil.rmtree(a.path)}
    assert command(["wait", "a"]) == 13
    says(capsys.readouterr().err)
