"""The checkpoints of scripts that know nothing of clusterddp: which of them is the newest complete one."""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.history.beginnings import NotRead, OwnCheckpointRead
from clusterddp.history.checkpoints import NoMatch, OwnCheckpoint
from clusterddp.history.codec import sentence
from clusterddp.history.event import Event
from clusterddp.jobdef.job import Job, Limits, Resume
from clusterddp.jobdef.program import checkpoint_values
from clusterddp.messages.reports import End, Report
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_progress import new_checkpoints, progress
from clusterddp.supervisor.retry_limits import exceeded
from clusterddp.supervisor.script_checkpoints import ScriptCheckpoints, find
from clusterddp.supervisor.verdict import Action, RankEnd, added_arguments, judge
from clusterddp.worker.resume_watch import ResumeWatch
from tests.histories import event_of, view
from tests.reports import unreported
from tests.wording import says

ARGS = ("--resume", "{checkpoint}")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def zipped(path: Path, content: str = "weights") -> bytes:
    """The bytes of a file in the form of `torch.save`, which is written, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", path.name)
        file.writestr("archive/data/0", content)
    return path.read_bytes()


def safetensors(size: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def at(path: Path, second: int) -> None:
    os.utime(path, (second, second))


def newest(run: RunDirectory, *patterns: str, since: float = 0.0) -> tuple[str | None, list[tuple[str, str]]]:
    """The path of the newest complete one below the run directory, and what was passed over."""
    found = find(Resume(patterns), str(run), since)
    name = None if found.newest is None else str(Path(found.newest.path).relative_to(run.path))
    return name, [(Path(path).name, why) for path, why in found.passed_over]


# --- files


def test_the_newest_of_several_by_time_then_by_number(run: RunDirectory) -> None:
    for number, second in ((8, 100), (9, 200), (10, 200), (11, 50)):
        zipped(run.path / f"checkpoint-{number}.pth")
        at(run.path / f"checkpoint-{number}.pth", second)
    assert newest(run, "{run_dir}/checkpoint-*.pth") == ("checkpoint-10.pth", [])
    zipped(run.path / "last" / "model.bin")
    assert newest(run, "{run_dir}/checkpoint-*.pth", "{run_dir}/*/model.bin") == ("last/model.bin", [])
    assert newest(run, "{run_dir}/none-*") == (None, [])


@pytest.mark.parametrize("name", ["model.part1.pt", "pytorch_model.part-00001.bin", "model.Part2.pt"])
def test_a_part_of_a_model_is_no_temporary_file(run: RunDirectory, name: str) -> None:
    zipped(run.path / name)
    assert newest(run, "{run_dir}/*model.*") == (name, [])


def test_a_file_that_is_not_whole_is_passed_over(run: RunDirectory) -> None:
    """Judged without torch; what is in no known format must not be empty."""
    whole = zipped(run.path / "a0.pth")
    contents = {
        "a1.pth": whole[: len(whole) // 2],
        "a2.pth": b"",
        "a3.safetensors": safetensors(100)[:-1],
        "a4.safetensors": b"\xff" * 20,
        "a5.tmp.pth": whole,
        "a6.pth.part": whole,
        "a7.safetensors": safetensors(100),
    }
    for second, (name, content) in enumerate(contents.items(), 10):
        (run.path / name).write_bytes(content)
        at(run.path / name, second)
    at(run.path / "a0.pth", 5)
    (run.path / "a8.pth").symlink_to("nowhere")
    assert newest(run, "{run_dir}/a*") == ("a7.safetensors", [])
    (run.path / "a7.safetensors").unlink()
    found, passed = newest(run, "{run_dir}/a*")
    assert found == "a0.pth"
    assert passed[:3] == [
        ("a6.pth.part", "a temporary file"),
        ("a5.tmp.pth", "a temporary file"),
        ("a4.safetensors", "truncated"),
    ]
    (run.path / "b.h5").write_bytes(b"x")
    assert newest(run, "{run_dir}/b.h5") == ("b.h5", [])
    assert newest(run, "{run_dir}/a8.pth") == (None, [("a8.pth", "a dangling link")])


def test_each_way_to_be_cut_off_has_its_reason(run: RunDirectory) -> None:
    (run.path / "zip.pt").write_bytes(zipped(run.path / "x")[:-30])
    (run.path / "empty.pt").touch()
    (run.path / "cut.safetensors").write_bytes(safetensors(100)[:-1])
    (run.path / "odd.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    reasons = {name: newest(run, f"{{run_dir}}/{name}*")[1][0][1] for name in ("zip", "empty", "cut", "odd")}
    assert reasons == {
        "zip": "truncated: the directory at the end of the zip is missing",
        "empty": "empty",
        "cut": "truncated: its size does not match its header",
        "odd": "damaged: its header is not valid",
    }


def test_a_folder_is_complete_with_all_that_the_one_before_has(run: RunDirectory) -> None:
    """Numbers in names, such as ranks, may differ; files that hold no state may be empty."""
    for step, files in (
        (4, ("model.pt", "random_states_0.pkl")),
        (8, ("model.pt", "random_states_3.pkl")),
        (12, ("model.pt",)),
    ):
        for name in files:
            zipped(run.path / f"step_{step}" / name)
            at(run.path / f"step_{step}" / name, step)
    for name in ("done", "code.patch"):
        (run.path / "step_8" / name).touch()
        at(run.path / "step_8" / name, 8)
    (run.path / "step_16").mkdir()
    found, passed = newest(run, "{run_dir}/step_*")
    assert found == "step_8"
    assert passed == [("step_16", "an empty folder"), ("step_12", "code.patch is missing, but step_8 has it")]
    (run.path / "step_12" / "model.pt").write_bytes(b"")
    assert ("step_12", "model.pt: empty") in newest(run, "{run_dir}/step_*")[1]


def test_the_folder_of_all_checkpoints_is_no_older_one(run: RunDirectory) -> None:
    """A script may name it in `requeue(saved=...)`, as one with SpeechBrain's Checkpointer does."""
    for number in (1, 2):
        zipped(run.path / "save" / f"CKPT+{number}" / "model.ckpt")
    also = [str(run.path / "save")]
    found = find(Resume(("{run_dir}/save/CKPT*",)), str(run), 0.0, also)
    assert found.newest is not None and found.newest.path == f"{run.path}/save/CKPT+2"
    assert found.passed_over == ()


def test_a_folder_of_torchs_distributed_checkpoint_needs_its_metadata(run: RunDirectory) -> None:
    """It is written last. ``test_checkpoint_sets.py`` has real ones."""
    (run.path / "dcp").mkdir()
    (run.path / "dcp" / "__0_0.distcp").write_bytes(b"x")
    assert newest(run, "{run_dir}/dcp") == (None, [("dcp", ".metadata, which is written last, is missing")])
    (run.path / "dcp" / ".metadata").write_bytes(b"x")
    assert newest(run, "{run_dir}/dcp") == (None, [("dcp", ".metadata is damaged (UnpicklingError)")])


def test_a_folder_needs_as_many_files_of_ranks_as_the_one_before_unless_the_number_of_ranks_has_changed(
    run: RunDirectory,
) -> None:
    """As of accelerate's and Trainer's random states."""
    for step, ranks in ((4, 2), (8, 1)):
        for rank in range(ranks):
            zipped(run.path / f"step_{step}" / f"random_states_{rank}.pkl")
            at(run.path / f"step_{step}" / f"random_states_{rank}.pkl", step)
    resume = Resume(("{run_dir}/step_*",))
    found = find(resume, str(run), 0.0)
    assert found.newest is not None and Path(found.newest.path).name == "step_4"
    assert [why for _, why in found.passed_over] == ["it has 1 of 2 files random_states_#.pkl that step_4 has"]
    found = find(resume, str(run), 0.0, ranks=lambda written: 2 if written < 6 else 1)
    assert found.newest is not None and Path(found.newest.path).name == "step_8"


def test_a_relative_pattern_is_relative_to_the_current_folder(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`{checkpoint}` is absolute; a link keeps its name."""
    zipped(run.path / "out" / "epoch_3.pth")
    (run.path / "out" / "last.pth").symlink_to("epoch_3.pth")
    monkeypatch.chdir(run.path / "out")
    found = find(Resume(("last.pth",)), "/elsewhere", 0.0).newest
    assert found is not None and found.path == str(run.path / "out" / "last.pth")


def test_a_file_from_before_the_run_is_not_its_checkpoint(run: RunDirectory) -> None:
    """It is of another training in the same folder."""
    zipped(run.path / "ckpt.pt")
    at(run.path / "ckpt.pt", 100)
    assert newest(run, "{run_dir}/ckpt.pt", since=101.0) == (None, [("ckpt.pt", "it is older than this run")])


# --- what an attempt does with it


def job(args: Sequence[str] = ARGS, **more: Any) -> Job:
    return Job(name="n", module="n", device="cpu", resume=Resume(("{run_dir}/*.pt",), tuple(args)), **more)


def event(attempt: int, time: float, name: str, **values: Any) -> dict[str, Any]:
    return {"attempt": attempt, "time": time, "event": name, **values}


def begun(
    run: RunDirectory, number: int, events: Sequence[Mapping[str, Any]], made: Job | None = None
) -> tuple[ScriptCheckpoints, str]:
    """The attempt's view, and what its history says."""
    own = ScriptCheckpoints(run, made or job(), number, view(events))
    resumed = own.begin()
    return own, (sentence(replace(resumed, attempt=number)) or "") if resumed is not None else ""


def test_the_history_says_what_an_attempt_continues_from(run: RunDirectory) -> None:
    earlier = [event(0, 50.0, "started"), event(0, 120.0, "requeued")]
    assert begun(run, 0, [])[1] == ""
    assert begun(run, 1, earlier)[1] == (
        "attempt 1: no complete checkpoint matches *.pt. The script starts from the beginning. If it has saved a "
        "checkpoint, correct `resume.checkpoint` and submit with --change"
    )
    assert begun(run, 1, earlier, job(()))[1] == "attempt 1: no complete checkpoint matches *.pt"
    zipped(run.path / "a.pt")
    at(run.path / "a.pt", 106)
    (run.path / "b.pt").touch()
    file = run.path / "a.pt"
    assert begun(run, 1, earlier)[1] == (
        "attempt 1: the newest checkpoint of the script is a.pt, saved 14 s before the stop. The script starts with "
        f"--resume {file}. Not used: b.pt: empty"
    )
    assert begun(run, 1, earlier, job(()))[1].startswith(
        "attempt 1: the newest checkpoint of the script is a.pt, saved 14 s"
    )
    at(run.path / "a.pt", 40)
    (run.path / "b.pt").unlink()
    assert begun(run, 0, [])[1] == "attempt 0: Not used: a.pt: it is older than this run"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"step": 35, "checkpoint": 30},
            "The attempt ended at step 35. The newest checkpoint is 30, so 5 steps will be repeated",
        ),
        ({"step": None, "checkpoint": None, "file": "a.pt"}, "The newest checkpoint is a.pt"),
        (
            {"step": None, "checkpoint": None, "made": 14},
            "The attempt completed at least 14 steps. The script restarts from the beginning unless it resumes by "
            "itself or `resume.checkpoint` names its checkpoints",
        ),
        ({"step": None, "checkpoint": None}, "No step was recorded"),
    ],
)
def test_a_failure_and_what_follows_are_two_sentences(values: dict[str, Any], words: str) -> None:
    """What is advised about it does not run into the rest."""
    why = {"reason": "rank 1 (n1) killed by signal 9. Check memory", "cause": "signal"}
    ended = event(0, 120.0, "restarted", **why, **values)
    said = f"attempt 0: rank 1 (n1) killed by signal 9. Check memory. {words}. Restarting all ranks in place"
    assert sentence(event_of(ended)) == said


def test_what_the_script_has_said_it_saved_need_not_match(run: RunDirectory) -> None:
    """`clusterddp.requeue(saved=...)`: the stop's own checkpoint is the newest."""
    zipped(run.path / "a.pt")
    at(run.path / "a.pt", 106)
    zipped(run.path / "stop" / "last.pth")
    earlier = [event(0, 50.0, "started"), event(0, 119.0, "saved", file=str(run.path / "stop" / "last.pth"))]
    assert "is stop/last.pth, " in begun(run, 1, [*earlier, event(0, 120.0, "requeued")])[1]
    assert progress(view(earlier), 0, None, 130.0).saved


def test_the_position_in_an_epoch_is_told_while_the_script_continues_from_what_it_saved_there(
    run: RunDirectory,
) -> None:
    """Not once it has written that file again, or a newer checkpoint. The file alone is watched after the stop."""
    last, newer = run.path / "last.pt", run.path / "epoch-1.pt"
    zipped(last)
    at(last, 119)
    stop = [event(0, 50.0, "started", ranks=1), event(0, 119.0, "saved", file=str(last), items=7, written=119.0)]
    killed = [*stop, event(1, 130.0, "started"), event(1, 140.0, "rank_failed", rank=0)]
    both = {"CLUSTERDDP_SAVED": str(last), "CLUSTERDDP_SAVED_ITEMS": "7"}

    def told(job: Job, number: int, events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        own = ScriptCheckpoints(run, job, number, view(events))
        own.begin()
        return {name: value for name, value in own.saved().items() if name != "CLUSTERDDP_RESUMABLE"}

    watched, alone = job(), Job(name="n", module="n", device="cpu")
    assert [told(one, 1, stop) for one in (watched, alone)] == [both] * 2
    assert [told(one, 2, killed) for one in (watched, alone)] == [both] * 2
    zipped(newer)
    at(newer, 150)
    assert [told(one, 2, killed) for one in (watched, alone)] == [{}, both]
    newer.unlink()
    at(last, 160)
    assert [told(one, 2, killed) for one in (watched, alone)] == [{}] * 2
    assert told(alone, 1, stop) == {"CLUSTERDDP_SAVED": str(last)}
    assert told(alone, 0, []) == {}


def test_another_number_of_ranks_begins_the_epoch_anew(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them has other items: skipped ones would never be trained on."""
    last = run.path / "last.pt"
    zipped(last)
    at(last, 119)
    saved = event(0, 119.0, "saved", file=str(last), items=7, written=119.0)
    events = [event(0, 50.0, "started", ranks=2), saved]
    for gpus in (2, 1):
        same = Job(name="n", module="n", device="cpu", gpus_per_node=gpus)
        assert ("CLUSTERDDP_SAVED_ITEMS" in ScriptCheckpoints(run, same, 1, view(events)).saved()) == (gpus == 2)
    says(capsys.readouterr().err)


def test_the_number_of_a_checkpoint_is_the_last_one_of_its_name() -> None:
    """Some scripts take the number of a step or an epoch, instead of a file."""
    names = {
        "out-1/c-300": "300",
        "e=3-step=0500.v2.ckpt": "0500",
        "m_12.rank_0.pth": "12",
        "out-1/last.pt": "",
        "": "",
    }
    assert {name: checkpoint_values(name)["checkpoint_number"] for name in names} == names


def test_the_ranks_variables_have_their_placeholders_filled_in(run: RunDirectory) -> None:
    """Except where only the rank knows a value: it fills in the whole variable."""
    zipped(run.path / "a.pt")
    env = {"FROM": "{checkpoint}", "OUT": "{run_dir}/{attempt}", "NODE": "{run_dir}/{node_rank}", "JSON": '{"a": {}}'}
    own, _ = begun(run, 3, [event(0, 50.0, "started")], job(env=env, nodes=2))
    path = f"{run.path}/a.pt"
    assert own.variables() == {
        "FROM": path, "OUT": f"{run}/3", "NODE": "{run_dir}/{node_rank}", "JSON": '{"a": {}}',
        "CLUSTERDDP_CHECKPOINT": path, "CLUSTERDDP_PLACEHOLDERS": "NODE",
    }  # fmt: skip
    none, _ = begun(run, 0, [], job(env={"FROM": "{checkpoint}"}))
    assert none.variables() == {"FROM": ""}


def watched(own: ScriptCheckpoints) -> list[str]:
    """What is recorded once the ranks have ended."""
    seen: list[str] = []
    over = threading.Event()
    over.set()

    def report(found: Event) -> None:
        assert isinstance(found, OwnCheckpoint | NoMatch)
        seen.append(sentence(replace(found, attempt=1)) or f"attempt 1: {found.name} {found.file}")

    own.watch(over, report)
    return seen


def test_a_pattern_that_matches_none_of_the_saved_files_is_told(run: RunDirectory) -> None:
    """Otherwise each attempt would start from the beginning."""
    own, _ = begun(run, 0, [])
    assert watched(own) == []
    own.written = f"{run.path}/out/last.pth"
    told = (
        "the script has saved out/last.pth, but no file matches *.pt so far. If the script can resume from that file, "
        "correct `resume.checkpoint` and submit with --change"
    )
    assert watched(own) == [f"attempt 1: {told}"]
    (run.path / "cut.pt").touch()
    assert watched(own) == []  # the pattern is right
    other, _ = begun(run, 0, [], Job(name="n", module="n"))
    other.written = "last.pth"
    assert watched(other) == []


def test_the_supervisor_opens_the_checkpoint_that_it_continues_from_once(run: RunDirectory) -> None:
    """Later, an open shows that the script reads it."""
    zipped(run.path / "a.pt")
    own, _ = begun(run, 1, [event(0, 50.0, "started")])
    seen = ResumeWatch(f"{run.path}/a.pt", unreported)
    assert watched(own) == []
    assert seen.was_opened() is False
    zipped(run.path / "a.pt", "later")
    assert watched(own) == ["attempt 1: own_checkpoint a.pt"]


def test_no_look_of_the_supervisor_counts_as_a_read_of_a_checkpoint(run: RunDirectory) -> None:
    """A newer folder is compared with the one before, and files that are older than the run may be read as well."""
    for name, second in (("old.pt", 5), ("a.pt/model", 60)):
        zipped(run.path / name)
        at(run.path / name, second)
    own, _ = begun(run, 1, [event(0, 50.0, "started")])
    named, *others = json.loads(own.saved()["CLUSTERDDP_RESUMABLE"])
    assert (named, others) == (f"{run.path}/a.pt", [f"{run.path}/old.pt"])
    seen = ResumeWatch(named, unreported, others)
    zipped(run.path / "b.pt" / "model")
    assert watched(own) == ["attempt 1: own_checkpoint b.pt"]
    assert (seen.was_opened(), seen.opened_instead()) == (False, None)


def test_an_open_that_writes_is_no_read(run: RunDirectory) -> None:
    """A script that ignores its checkpoint may write the same file before its first step."""
    file, other = run.path / "a.pt", run.path / "b.pt"
    for path in (file, other):
        zipped(path)
    seen = ResumeWatch(str(file), unreported, ["", str(file), str(other)])
    for path in (file, other):
        path.write_bytes(b"later")
    assert (seen.was_opened(), seen.opened_instead()) == (False, None)
    seen = ResumeWatch("", unreported, [str(file), str(other)])
    other.read_bytes()
    assert (seen.was_opened(), seen.opened_instead()) == (False, str(other))
    seen = ResumeWatch(str(file), unreported)
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == b"later"
    file.unlink()
    assert seen.was_opened() is True


def ignoring(path: Path) -> tuple[ResumeWatch, list[Report]]:
    """The watch and the reports of a script that has made steps without reading this file."""
    zipped(path)
    reports: list[Report] = []
    watch = ResumeWatch(str(path), reports.append)
    for _ in range(2):
        assert watch.end(final=False) is False
    assert reports == [NotRead(file=str(path))]
    return watch, reports


def test_a_checkpoint_that_is_read_after_some_steps_is_resumed_from(run: RunDirectory) -> None:
    """As by a script that looks for a learning rate first."""
    watch, reports = ignoring(run.path / "a.pt")
    (run.path / "a.pt").read_bytes()
    assert watch.end(final=False) is True
    assert reports[1:] == [OwnCheckpointRead(file=str(run.path / "a.pt"))]
    assert watch.ended and watch.end() is None


@pytest.mark.parametrize("then", ["ends", "writes"])
def test_a_late_read_without_a_step_or_of_what_the_attempt_wrote_is_no_resume(run: RunDirectory, then: str) -> None:
    """A script that ignores its checkpoint may load its best one for a last evaluation, or what it has just saved."""
    watch, reports = ignoring(run.path / "a.pt")
    if then == "writes":
        with open(run.path / "a.pt", "wb"):  # the save takes several steps, in a thread
            assert watch.end(final=False) is False
    (run.path / "a.pt").read_bytes()
    assert watch.end(stepped=then == "writes") is False
    assert len(reports) == 1


def test_an_attempt_that_read_its_checkpoint_late_has_not_begun_again() -> None:
    events = [event(1, 1.0, "not_read", file="a.pt"), event(2, 2.0, "not_read", file="a.pt")]
    assert view(events).attempt(2).unread is not None
    events.append(event(2, 3.0, "own_checkpoint_read", file="a.pt"))
    assert [view(events).attempt(number).unread is None for number in (1, 2)] == [False, True]


def test_a_state_that_is_saved_again_is_no_new_checkpoint(run: RunDirectory) -> None:
    """nanoGPT saves what it has just loaded: that is no progress."""
    zipped(run.path / "a.pt", "step 10")
    own, _ = begun(run, 1, [event(0, 50.0, "started")])
    zipped(run.path / "a.pt", "step 10")
    assert watched(own) == []
    zipped(run.path / "a.pt", "step 20")
    assert [*watched(own), *watched(own)] == ["attempt 1: own_checkpoint a.pt"]


def test_a_new_checkpoint_counts_for_the_limit_of_failures() -> None:
    """Three kills with new checkpoints in between do not end a run; three without do, however long they ran."""
    events: list[dict[str, Any]] = []
    for attempt in range(3):
        events += [event(attempt, 1000.0 * attempt, "started"), event(attempt, 1000.0 * attempt + 900, "restarted")]
    words = exceeded(job(), view(events), 4000.0)
    assert words == "3 consecutive attempts failed without saving a new checkpoint that matches {run_dir}/*.pt"
    saved = event(1, 1500.0, "own_checkpoint", file="a.pt", written=1500.0)
    assert exceeded(job(), view([*events[:3], saved, *events[3:]]), 4000.0) is None
    assert exceeded(job(()), view(events), 4000.0) is None  # its checkpoints may be elsewhere


def test_an_exception_after_a_new_checkpoint_restarts_the_ranks() -> None:
    """Even the same one as before, whose step is unknown."""
    raised = "OSError at a.py:1 (f)"
    events = [
        event(0, 0.0, "started"), event(0, 1.0, "rank_failed", raised=raised), event(0, 1.0, "restarted"),
        event(1, 2.0, "started"), event(1, 3.0, "own_checkpoint", file="a.pt", written=3.0),
    ]  # fmt: skip
    end = RankEnd(0, "n1", End.EXCEPTION, 4.0, error="OSError: no", traceback='File "a.py", line 1, in f')
    with_it, without = (
        judge([end], 1, False, lambda: Cause.NONE, progress(view(seen), 1, None, 4.0)) for seen in (events, events[:-1])
    )
    assert (with_it.action, with_it.because) == (Action.RESTART, "the script had written a new checkpoint")
    assert without.action is Action.FAIL


@pytest.mark.parametrize(("lasted_s", "action"), [(30.0, Action.FAIL), (900.0, Action.RESTART)])
def test_a_script_that_saves_and_soon_fails_at_the_same_line_each_time_is_not_restarted_forever(
    lasted_s: float, action: Action
) -> None:
    """Its checkpoint is a new one each time, as it starts from the beginning. After ten minutes it may have trained."""
    seen: list[dict[str, Any]] = []
    end = RankEnd(0, "n1", End.EXCEPTION, 4.0, error="OSError: no", traceback='File "a.py", line 1, in f')
    for attempt in range(3):
        at = 1000.0 * attempt
        seen += [event(attempt, at, "started"), event(attempt, at + 9, "own_checkpoint", file="a.pt", written=at + 9)]
        verdict = judge([end], 1, False, lambda: Cause.NONE, progress(view(seen), attempt, None, at + lasted_s))
        assert verdict.action is (action if attempt == 2 else Action.RESTART)
        seen.append(event(attempt, at + lasted_s, "rank_failed", raised=end.raised))
    if action is Action.FAIL:
        assert verdict.because == (
            "3 attempts in a row failed with the same exception at the same line and step, each in less than 10 minutes"
        )


@pytest.mark.parametrize(
    ("loaded", "unread", "written", "counted"),
    [
        ("c-300.pt", False, ["c-100.pt", "c-300.pt", "c-400.pt"], ["c-400.pt"]),
        ("c-300.pt", True, ["c-300.pt"], []),
        ("1-c-300.pt", False, ["2-c-100.pt"], ["2-c-100.pt"]),
        ("last.pt", False, ["last.pt"], ["last.pt"]),
        ("last.pt", True, ["last.pt"], []),
        ("c-300.pt", False, ["last.pt"], ["last.pt"]),
        ("slot-1.pt", False, ["slot-0.pt", "slot-1.pt", "slot-0.pt"], ["slot-0.pt"]),
        (None, False, ["c-100.pt"], ["c-100.pt"]),
    ],
)
def test_a_checkpoint_counts_if_it_is_further_than_the_one_that_was_loaded(
    loaded: str | None, unread: bool, written: list[str], counted: list[str]
) -> None:
    """A script that begins again writes the same ones once more. Files that are written in turn have small numbers."""
    own = [event(1, 0.0, "own_resume", file=loaded)] if loaded else []
    own += [event(1, 1.0, "not_read", file=loaded)] if unread else []
    own += [event(1, 2.0 + number, "own_checkpoint", file=file) for number, file in enumerate(written)]
    assert [one.file for one in new_checkpoints(view(own).attempt(1))] == counted


def test_attempts_that_begin_again_end_the_run_after_three(run: RunDirectory) -> None:
    """Their checkpoints are new files, but no progress."""
    events: list[dict[str, Any]] = []
    for attempt in range(4):
        again = [event(attempt, 0.1, "own_resume", file="a-8.pt"), event(attempt, 0.2, "not_read", file="a-8.pt")]
        events += [event(attempt, 0.0, "started"), *(again if attempt else [])]
        events += [event(attempt, 5.0, "own_checkpoint", file="a-8.pt"), event(attempt, 9.0, "restarted")]
    assert exceeded(job(), view(events[:-5]), 40.0) is None
    assert exceeded(job(), view(events), 40.0) is not None


def test_a_checkpoint_with_which_the_script_failed_is_taken_only_if_there_is_no_other(run: RunDirectory) -> None:
    zipped(run.path / "b.pt")
    at(run.path / "b.pt", 110)
    failed = [event(0, 50.0, "started"), event(1, 120.0, "own_checkpoint_rejected", file="b.pt", written=110.0)]
    own, said = begun(run, 2, failed)
    assert own.newest is not None and own.newest.path == f"{run.path}/b.pt" and "Not used" not in said
    zipped(run.path / "a.pt")
    at(run.path / "a.pt", 100)
    own, said = begun(run, 2, failed)
    assert own.newest is not None and own.newest.path == f"{run.path}/a.pt"
    assert said.endswith("Not used: b.pt: the script failed with it")
    at(run.path / "b.pt", 130)  # written again
    own, _ = begun(run, 2, failed)
    assert own.newest is not None and own.newest.path == f"{run.path}/b.pt"


def test_a_failure_says_which_arguments_were_added(run: RunDirectory) -> None:
    def said(*events: dict[str, Any], attempt: int = 1) -> str:
        return added_arguments(run, view(events).attempt(attempt))

    resumed = event(1, 0.0, "own_resume", file="a.pt", arguments=["--resume", "/r/a b.pt"])
    assert said(resumed) == "`resume` added `--resume '/r/a b.pt'` for a.pt. It does not exist"
    zipped(run.path / "a.pt")
    assert "Check that the script can load it" in said(resumed)
    none = event(1, 0.0, "own_resume", patterns=["*.pt"], from_start=True)
    assert said(none) == "`resume` added no arguments, because there was no complete checkpoint"
    assert said(resumed, event(1, 1.0, "own_checkpoint", file="a.pt", written=1.0)) == said(resumed, attempt=2) == ""


def test_limits_of_the_job_still_hold() -> None:
    saved = event(0, 5.0, "own_checkpoint", file="a.pt", written=5.0)
    events = [event(0, 0.0, "started"), saved, event(0, 10.0, "restarted")]
    assert exceeded(job(limits=Limits(attempts=1)), view(events), 20.0) == "limits.attempts (1) reached"
