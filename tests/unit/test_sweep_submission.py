"""What a sweep's command submits: the first time, again, with more values, after a crash, at a limit, beside another.

Slurm is a fake that answers in the formats of its commands; on a cluster, sweeps are tested in slurm/test_sweeps.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from clusterddp.cli.command_line import command
from clusterddp.errors import RunDirectoryError, SlurmError, SlurmUnavailable, UsageError
from clusterddp.failures import node_memory
from clusterddp.jobdef import code_snapshot
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import sweep_submission
from clusterddp.runs.sweep_members import read_record
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import lease
from clusterddp.supervisor.lease import holders
from tests.fake_slurm import SMALL_CLUSTER, FakeSlurm
from tests.histories import happened
from tests.packages import require
from tests.runs_on_disk import jobs_of, outcome_of
from tests.wording import raises, says


class Slurm:
    """What sbatch has accepted: the script of each array, and the state of each task."""

    def __init__(self) -> None:
        self.max_array, self.max_submit = 1001, 1000
        self.scripts: dict[str, Path] = {}
        self.texts: dict[str, str] = {}
        self.tasks: dict[str, str] = {}
        self.refusals = 0
        self.away = False
        self.on_sbatch: Callable[[], object] = lambda: None

    def run(self, *words: str) -> str:
        if self.away:
            raise SlurmUnavailable("`squeue` failed: Unable to contact slurm controller")
        return {"sbatch": self.sbatch, "squeue": self.squeue, "scontrol": self.scontrol}[words[0]](*words[1:])

    def sbatch(self, *words: str) -> str:
        self.on_sbatch()
        script = Path(words[-1])
        size = int(re.findall(r"--array=0-(\d+)", script.read_text())[0]) + 1
        if size > self.max_array:
            raise SlurmError("`sbatch` failed: Batch job submission failed: Invalid job array specification")
        if sum(state == "PENDING" for state in self.tasks.values()) + size > self.max_submit:
            self.refusals += 1
            raise SlurmError("`sbatch` failed: AssocMaxSubmitJobLimit; Job violates accounting/QOS policy")
        job = str(41 + len(self.scripts))
        self.scripts[job], self.texts[job] = script, script.read_text()
        self.tasks |= {f"{job}_{task}": "PENDING" for task in range(size)}
        return f"{job}\n"

    def squeue(self, *words: str) -> str:
        if any("%o" in word for word in words):
            return "".join(f"{job}|{script}\n" for job, script in self.scripts.items())
        return "".join(f"{task}|{state}||N/A|1:00|low|None\n" for task, state in self.tasks.items())

    def scontrol(self, *words: str) -> str:
        if words[:2] == ("show", "config"):
            return f"KillWait                = 30 sec\nMaxArraySize            = {self.max_array}\n"
        task = words[-1]
        array, index = task.split("_")
        state = f"UserId=u(1) GroupId=g(1) JobState={self.tasks[task]}"
        return f"JobId=1 ArrayJobId={array} ArrayTaskId={index} {state} Command=x"

    def end(self, state: str = "COMPLETED") -> None:
        self.tasks = dict.fromkeys(self.tasks, state)


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    fake = Slurm()
    fake_slurm |= {**SMALL_CLUSTER, **dict.fromkeys(("sbatch", "squeue", "scontrol show config", "scontrol"), fake.run)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    return fake


def sweep(*options: str) -> int:
    return command(["submit", "train.py", "--device", "cpu", "--run-dir", "s", "--sweep", *options])


def member(seed: int) -> RunDirectory:
    return RunDirectory(f"s/seed={seed}")


def end(run: RunDirectory, state: str) -> None:
    """What a member's supervisor leaves."""
    run.create_attempt()
    write_json(run.outcome_file, {"state": state, "step": 3, "reason": "said the test"})


def noted(capsys: pytest.CaptureFixture[str]) -> str:
    """Without the remark about a folder in /tmp: that of the tests may be elsewhere."""
    return "\n".join(line for line in capsys.readouterr().err.splitlines() if "each node has its own /tmp" not in line)


def submitted(slurm: Slurm) -> list[list[str]]:
    """The members of each array, by their tasks."""
    return [[(path.parent / str(task)).readlink().name for task in range(len(list(path.parent.glob("[0-9]*"))))]
            for path in slurm.scripts.values()]  # fmt: skip


def test_a_sweep_is_an_array_whose_tasks_are_runs(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its job definition, a batch script of its own to continue with, and the lease of its task."""
    assert sweep("seed=0..2", "--max-running", "2") == 0
    assert capsys.readouterr().out == "41\n"
    assert submitted(slurm) == [["seed=0", "seed=1", "seed=2"]]
    text = slurm.texts["41"]
    assert "#SBATCH --array=0-2%2\n" in text
    assert f"#SBATCH --output={Path.cwd()}/s/arrays/0/%a/logs/job-%A_%a.log\n" in text
    assert 's/"${run##*/}"' in text
    for seed in range(3):
        assert jobs_of(holders(member(seed))) == [f"41_{seed}"]
        assert f"seed: {seed}\n" in member(seed).job_file.read_text()
        assert member(seed).batch_script.read_text().rstrip().endswith(f"seed={seed}")
        assert "--array" not in member(seed).batch_script.read_text()


def test_nothing_is_submitted_twice(slurm: Slurm) -> None:
    """While members are queued, and when they have completed."""
    sweep("seed=0..2")
    assert sweep("seed=0..2") == 0
    for seed in range(3):
        end(member(seed), "completed")
    slurm.end()
    assert sweep("seed=0..2") == 0
    assert len(slurm.scripts) == 1


def test_a_value_that_is_given_twice_makes_one_member(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """And the command says so: it may be a typo."""
    assert sweep("seed=1,2,1") == 0
    assert submitted(slurm) == [["seed=1", "seed=2"]]
    said = noted(capsys)
    says(said)
    assert sweep("seed=1,2") == 0
    assert "is a key of the job definition" not in capsys.readouterr().err


def test_more_values_extend_it_and_removed_ones_are_left_as_they_are(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("seed=0..2")
    capsys.readouterr()
    assert sweep("seed=1..4") == 0
    assert submitted(slurm)[1:] == [["seed=3", "seed=4"]]
    says(noted(capsys))
    record = read_record(Path("s"))
    assert record is not None and list(record.left) == ["seed=0"]
    assert slurm.tasks["41_0"] == "PENDING"
    sweep("seed=0..4")
    record = read_record(Path("s"))
    assert len(slurm.scripts) == 2 and record is not None and not record.left


def test_only_what_nothing_trains_is_submitted_again(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """A member whose task was cancelled in the queue, and one that stopped; what failed or was cancelled on request."""
    sweep("seed=0..4")
    slurm.end("CANCELLED")
    end(member(0), "completed")
    end(member(1), "failed")
    end(member(2), "cancelled")
    member(2).mark_cancelled()
    member(3).create_attempt()
    assert sweep("seed=0..4") == 0
    assert submitted(slurm)[1:] == [["seed=3", "seed=4"]]
    said = noted(capsys)
    says(said)
    assert sweep("seed=0..4", "--retry", "failed", "--retry", "cancelled") == 0
    assert submitted(slurm)[2:] == [["seed=1", "seed=2"]]
    assert member(1).outcome() is None and not member(2).cancelled


def test_a_member_that_its_user_stopped_is_left_alone(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Until the user submits it; one that stopped for another reason continues."""
    sweep("seed=0..1")
    slurm.end("COMPLETED")
    for seed, cause in ((0, Cause.STOP_REQUESTED), (1, Cause.NONE)):
        line = {"time": 1.0, "attempt": member(seed).create_attempt(), "event": "stopped"}
        lease.take(member(seed), 0, lease.of_job(f"41_{seed}"))
        happened(member(seed), {**line, "reason": cause.value, "cause": cause.value, "step": 7, "checkpoint": 7})
    assert sweep("seed=0..1") == 0
    assert submitted(slurm)[1:] == [["seed=1"]]
    says(noted(capsys))


def test_a_member_whose_job_is_just_ending_is_not_retried_yet(slurm: Slurm) -> None:
    """Two jobs must not train the same run."""
    sweep("seed=0..1")
    end(member(0), "failed")
    slurm.tasks["41_0"] = "COMPLETING"
    sweep("seed=0..1", "--retry", "failed")
    assert len(slurm.scripts) == 1


def test_a_member_that_completes_while_slurm_is_asked_is_not_submitted_again(
    slurm: Slurm, fake_slurm: FakeSlurm
) -> None:
    """Its job has ended by then, and its outcome must stay."""
    sweep("seed=0..1")
    lease.take(member(0), member(0).create_attempt(), lease.of_job("41_0"))

    def squeue(*_: str) -> str:
        end(member(0), "completed")
        return "41_0|COMPLETED||N/A|1:00|low|None\n41_1|RUNNING||N/A|1:00|low|None\n"

    fake_slurm["squeue"] = squeue
    sweep("seed=0..1")
    assert len(slurm.scripts) == 1 and member(0).outcome_file.exists()


def test_a_member_that_completes_before_its_array_is_written_keeps_its_outcome(
    slurm: Slurm, fake_slurm: FakeSlurm
) -> None:
    """Slurm is asked for its limits in between, and may answer late."""
    sweep("seed=0..1")
    slurm.end()

    def limits(*words: str) -> str:
        end(member(0), "completed")
        return slurm.run(*words)

    fake_slurm["scontrol show config"] = limits
    sweep("seed=0..1", "--retry", "failed")
    assert submitted(slurm)[1:] == [["seed=1"]]
    assert (outcome_of(member(0)) or {})["state"] == "completed"


def test_arrays_are_split_evenly_above_the_largest_size(slurm: Slurm) -> None:
    """All together may run as many as one would."""
    slurm.max_array = 10
    sweep("seed=0..23", "--max-running", "7")
    assert [len(names) for names in submitted(slurm)] == [8, 8, 8]
    assert sum(int(re.findall(r"--array=0-7%(\d+)", text)[0]) for text in slurm.texts.values()) == 7


def test_members_that_request_other_resources_are_in_another_array(slurm: Slurm) -> None:
    sweep("seed=0..1", "--sweep", "gpus_per_node=1,2")
    assert submitted(slurm) == [
        ["seed=0,gpus_per_node=1", "seed=1,gpus_per_node=1"],
        ["seed=0,gpus_per_node=2", "seed=1,gpus_per_node=2"],
    ]
    assert "--ntasks-per-node=2" in slurm.texts["42"]


@pytest.mark.parametrize("varied", ["grid: {args.lr: [1, 2], seed: 0..1}", "members: [{args.lr: 1}, {seed: 3}]"])
def test_the_file_of_a_sweep_is_submitted_again_with_what_is_missing(slurm: Slurm, varied: str) -> None:
    """Into a folder of its name, or that of --run-dir."""
    path = Path("rates.yaml")
    path.write_text(f"job: {{script: train.py, device: cpu}}\n{varied}\n")
    assert command(["submit", "rates.yaml", "--max-running", "1", "--", "--epochs", "3"]) == 0
    (names,) = submitted(slurm)
    assert "%1" in slurm.texts["41"]
    assert all(RunDirectory(f"runs/rates/{name}").exists() for name in names)
    with path.open("a") as file:
        file.write("# the same\n")
    assert command(["submit", "rates.yaml", "--", "--epochs", "3"]) == 0 and list(slurm.texts) == ["41"]
    assert command(["submit", "rates.yaml", "--run-dir", "s", "--dry-run"]) == 0 and not Path("s").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--sweep", "seed=1"], ["--wait"], ["--fork", "r"], ["--max-running", "0"], ["--max-running", "1", "--local"],
        ["--debug"],
    ],
)  # fmt: skip
def test_options_of_a_single_run_are_refused_with_the_file_of_a_sweep(slurm: Slurm, words: list[str]) -> None:
    Path("rates.yaml").write_text("job: {script: train.py, device: cpu}\ngrid: {seed: 0..1}\n")
    with pytest.raises(UsageError):
        command(["submit", "rates.yaml", *words])
    assert not slurm.texts and not Path("runs").exists()


@pytest.mark.parametrize("words", [["--max-running", "1"], ["--retry", "failed"]])
def test_options_of_a_sweep_are_refused_without_one(slurm: Slurm, words: list[str]) -> None:
    with pytest.raises(UsageError):
        command(["submit", "train.py", "--device", "cpu", *words])


@pytest.mark.parametrize("command_of", ["sweep", "multirun"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["seed=0"], "Submitted 1 member as job 41"),
        (["seed=0", "--sweep", "gpus_per_node=1,2"], "Submitted 2 members as jobs 41, 42"),
    ],
)
def test_submitted_members_are_counted_and_their_jobs_named(
    slurm: Slurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command_of: str,
    options: list[str],
    expected: str,
) -> None:
    """By `clusterddp submit --sweep`, and in the same words by a Hydra multirun."""
    if command_of == "multirun":
        require("hydra")
        launcher = import_module("hydra_plugins.clusterddp_launcher").ClusterddpLauncher()
        launcher._own = {"wait": False}
        monkeypatch.setattr("clusterddp.cli.submit.submit_members", launcher._submit)
    sweep(*options)
    assert f"{expected}\n" in capsys.readouterr().err


def test_at_the_submit_limit_as_many_as_possible_are_submitted(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says how many, and submits the rest when it is called again."""
    slurm.max_submit = 11
    assert sweep("seed=0..23") == 75
    assert sum(map(len, submitted(slurm))) == 11 and slurm.refusals <= 6
    says(noted(capsys))
    assert not member(11).path.exists()
    slurm.max_submit = 100
    assert sweep("seed=0..23") == 0
    assert sorted(name for names in submitted(slurm) for name in names) == sorted(f"seed={n}" for n in range(24))


def test_a_refused_submission_leaves_everything_as_it_was(slurm: Slurm) -> None:
    sweep("seed=0..1")
    slurm.end()
    end(member(0), "failed")
    slurm.max_submit = 0
    with raises(SlurmError):
        sweep("seed=0..3", "--retry", "failed")
    assert member(0).outcome() is not None and member(1).exists() and not member(2).path.exists()
    assert [path.name for path in Path("s/arrays").iterdir()] == ["0"]


def test_a_changed_definition_is_refused_unless_asked_for(slurm: Slurm) -> None:
    sweep("seed=0..1")
    with raises(RunDirectoryError):
        sweep("seed=0..2", "--time", "10")
    assert len(slurm.scripts) == 1
    assert sweep("seed=0..2", "--time", "10", "--change") == 0
    assert submitted(slurm)[1:] == [["seed=2"]] and "--time=0-00:10:00" in slurm.texts["42"]


def test_an_array_that_was_submitted_but_not_recorded_is_found(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was killed between sbatch's answer and the record of it. A task may have handed its run to another
    job since, which stays its holder."""
    with monkeypatch.context() as patched:
        patched.setattr(sweep_submission, "_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sweep("seed=0..2")
    assert holders(member(1)) == []
    lease.take(member(2), member(2).create_attempt(), lease.of_job("41_2"))
    lease.submitted(member(2), "50")
    slurm.tasks |= {"41_2": "COMPLETED", "50": "PENDING"}
    assert sweep("seed=0..3") == 0
    assert jobs_of(holders(member(1))) == ["41_1"]
    assert jobs_of(holders(member(2)))[0] == "50"
    assert submitted(slurm) == [["seed=0", "seed=1", "seed=2"], ["seed=3"]]


def test_an_array_that_was_not_submitted_is_made_again(slurm: Slurm) -> None:
    """The command was killed before sbatch."""

    def killed() -> None:
        raise KeyboardInterrupt

    slurm.on_sbatch = killed
    with pytest.raises(KeyboardInterrupt):
        sweep("seed=0..2")
    slurm.on_sbatch = lambda: None
    assert sweep("seed=0..2") == 0
    assert submitted(slurm) == [["seed=0", "seed=1", "seed=2"]]


def test_ctrl_c_ends_a_question_before_the_submission_at_once_and_leaves_no_member(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def interrupted(*_: object) -> list[str]:
        asked.extend(path.name for path in Path("s").glob("seed=*"))
        os.kill(os.getpid(), signal.SIGINT)
        return []

    monkeypatch.setattr(node_memory, "avoided", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep("seed=0..2")
    assert asked == [] == [path.name for path in Path("s").glob("seed=*")] and not slurm.scripts


def test_without_an_answer_nothing_is_undone_and_nothing_submitted(slurm: Slurm) -> None:
    """Slurm may have the array; it must find the members, and no other array may be submitted before it answers."""

    def lost() -> None:
        slurm.away = True
        raise SlurmUnavailable("`sbatch` failed: Socket timed out on send/recv operation")

    slurm.on_sbatch = lost
    with raises(RunDirectoryError):
        sweep("seed=0..2")
    assert member(0).exists()
    with pytest.raises(SlurmUnavailable):
        sweep("seed=0..2")
    slurm.away, slurm.on_sbatch = False, lambda: None
    slurm.scripts["40"] = Path("s/arrays/0/array.sbatch").absolute()  # it had
    slurm.tasks = {f"40_{task}": "PENDING" for task in range(3)}
    sweep("seed=0..2")
    assert jobs_of(holders(member(2))) == ["40_2"] and list(slurm.scripts) == ["40"]


def test_of_two_commands_at_once_one_submits(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one waits for it."""
    inside = threading.Event()
    codes: list[int] = []

    def meanwhile() -> None:
        slurm.on_sbatch = lambda: None
        other.start()
        inside.wait(1)

    other = threading.Thread(target=lambda: codes.append(sweep("seed=0..4")))
    slurm.on_sbatch = meanwhile
    assert sweep("seed=0..4") == 0
    other.join()
    assert codes == [0] and len(slurm.scripts) == 1
    says(noted(capsys))


def test_a_dry_run_shows_all_and_writes_nothing(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("seed=0..2", "--sweep", "lr=1e-3", "--dry-run") == 0
    shown = capsys.readouterr()
    assert "#SBATCH --array=0-2\n" in shown.out
    assert "      new  seed=2,lr=1e-3\n" in shown.err
    says(shown.err)
    assert not Path("s").exists() and not slurm.scripts


@pytest.mark.parametrize("name", ["job.yaml", "notes.txt"])
def test_a_folder_with_something_else_is_refused(slurm: Slurm, tmp_path: Path, name: str) -> None:
    (tmp_path / "s").mkdir(0o700)
    (tmp_path / "s" / name).write_text("")
    with raises(RunDirectoryError):
        sweep("seed=0..2")


def test_the_members_share_one_snapshot_of_the_code(slurm: Slurm, tmp_path: Path) -> None:
    """Those that are submitted later have the code of their time; those that wait keep theirs."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    sweep("seed=0..1")
    (tmp_path / "train.py").write_text("changed")
    sweep("seed=0..2")
    snapshots = [code_snapshot.present(member(seed)) for seed in range(3)]
    texts = [found and (found.folder(member(seed)) / "train.py").read_text() for seed, found in enumerate(snapshots)]
    assert texts == ["", "", "changed"]
    real = {path.resolve() for seed in range(3) for path in member(seed).code.iterdir() if path.is_dir()}
    assert real == {path for path in (tmp_path / "s" / "code").resolve().iterdir() if path.is_dir()}
    assert code_snapshot.unused(member(0)) == []
