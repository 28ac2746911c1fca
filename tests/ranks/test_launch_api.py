"""``clusterddp.launch()`` from Python: scripts and functions as runs, with real processes and real preemptions."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from submitit.helpers import DelayedSubmission

import clusterddp
from clusterddp.errors import Declined, JobDefinitionError, RunDirectoryError, RunFailed, StoppedAlone, UsageError
from clusterddp.messages.reports import End
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.verdict import Action, RankEnd, judge
from clusterddp.worker import function
from tests.conftest import Launch
from tests.waiting import preempt_local, story, wait_until
from tests.wording import raises


def wait_for_marks(handle: clusterddp.Handle, folder: Path, count: int = 2) -> None:
    """Until so many ranks have left a file in ``folder``."""
    run = RunDirectory(handle.path)
    try:
        wait_until(lambda: len(list(folder.iterdir())) >= count, f"{count} ranks", timeout=60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story(run)}") from None


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def test_a_function_runs_on_every_rank_and_its_values_are_returned(launch: Launch, tmp_path: Path) -> None:
    """Rank 0's, or all; another process, or another call, gets them from the run directory alone."""

    def train(number: float, *, times: float) -> tuple[int, float]:
        import clusterddp

        ctx = clusterddp.init()
        ctx.print("training", number)
        return ctx.rank, ctx.all_reduce_sum(number * times)  # type: ignore[return-value]

    times = {"times": 1.0}
    handle = launch(train, 3.5, fn_kwargs=times)
    assert handle.result() == (0, 7.0)
    assert handle.result(all_ranks=True) == [(0, 7.0), (1, 7.0)]
    assert handle.logs().startswith("training 3.5")
    assert handle.status().state == "completed"
    assert (tmp_path / "run" / "job.yaml").read_text().startswith("job_name: train\n")
    assert launch(train, 3.5, fn_kwargs=times).result() == (0, 7.0)
    assert clusterddp.Handle(handle.path).result() == (0, 7.0)


def test_a_function_that_raises_raises_its_first_failure_here(launch: Launch) -> None:
    """With the rank and the traceback."""

    def broken() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("the data is gone")
        threading.Event().wait()

    with pytest.raises(RunFailed, match=r"rank 1 \(\S+\) raised ValueError: the data is gone(.|\n)*in broken"):
        launch(broken).result()


def test_a_preempted_function_is_called_again(launch: Launch, marks: Path) -> None:
    """A plain one from its beginning."""

    def again() -> str:
        if os.environ["CLUSTERDDP_ATTEMPT"] == "0":
            (marks / os.environ["RANK"]).touch()
            threading.Event().wait()
        return os.environ["CLUSTERDDP_ATTEMPT"]

    handle = launch(again)
    wait_for_marks(handle, marks)
    preempt_local(RunDirectory(handle.path))
    assert handle.result(all_ranks=True) == ["1", "1"]


def test_a_preempted_training_in_a_function_resumes_at_its_step(launch: Launch, marks: Path) -> None:
    """ctx.run() in it saves and resumes as in a script."""

    def train() -> tuple[int, int]:
        import time

        import torch

        import clusterddp
        from tests.descent import Descent

        ctx = clusterddp.init()
        model = torch.nn.Linear(2, 1)
        optimizer = Descent(model)
        loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(64, 2)), batch_size=4)
        run = ctx.run(model=model, optimizer=optimizer, loader=loader)
        first = run.step
        for (x,) in run.steps(40):
            model(x).square().mean().backward()
            optimizer.step()
            run.log(made=1)
            (marks / str(ctx.rank)).touch()
            time.sleep(0.5 if first == 0 else 0)  # it is preempted long before the end
        return first, run.step

    handle = launch(train, gpus_per_node=1)
    wait_for_marks(handle, marks, 1)
    preempt_local(RunDirectory(handle.path))
    first, last = handle.result()
    assert 0 < first < 40, story(RunDirectory(handle.path))
    assert last == 40
    assert [line["step"] for line in RunDirectory(handle.path).metrics()] == list(range(40))


class Counting:
    """A callable as it is written for submitit: ``checkpoint()`` carries its state over.

    Each of its first ``waits`` calls waits for the end of the attempt, unless it is made again.
    """

    def __init__(self, marks: Path, waits: int = 1) -> None:
        self.marks, self.waits, self.calls, self.checkpointed_on = marks, waits, 0, []  # type: ignore[var-annotated]

    def __call__(self, word: str) -> Any:
        import submitit

        place = submitit.JobEnvironment()
        self.calls += 1
        mark = self.marks / f"{self.calls}-{place.global_rank}"
        if self.calls <= self.waits and not mark.exists():
            mark.touch()
            while True:
                threading.Event().wait(0.05)
        return word, self.calls, self.checkpointed_on, place.num_tasks

    def checkpoint(self, word: str) -> DelayedSubmission:
        self.checkpointed_on.append(os.environ["RANK"])
        return DelayedSubmission(self, word + " again")


@pytest.mark.product  # test_submitit_launchers.py has callables
def test_a_submitit_callable_continues_from_its_checkpoint(launch: Launch, marks: Path) -> None:
    """Each attempt calls it once, on rank 0. Every rank of the next attempt calls what it returned."""
    handle = launch(Counting(marks, waits=2), "trained")
    run = RunDirectory(handle.path)
    for preemption in (1, 2):
        wait_for_marks(handle, marks, 2 * preemption)
        preempt_local(run)
    assert handle.result(all_ranks=True) == [("trained again again", 3, ["0", "0"], 2)] * 2, story(run)
    assert [event["event"] for event in run.events()].count("requeued") == 2


class Ending(Counting):
    def checkpoint(self, word: str) -> None:  # type: ignore[override]
        return None


# The next test but one has what follows, test_a_submitit_callable_continues a real callable.
@pytest.mark.product
def test_a_submitit_callable_may_decline_to_continue(launch: Launch, marks: Path) -> None:
    """As with submitit, the run has then failed."""
    handle = launch(Ending(marks), "trained", gpus_per_node=1)
    wait_for_marks(handle, marks, 1)
    preempt_local(RunDirectory(handle.path))
    with pytest.raises(RunFailed):
        handle.result()
    assert RunDirectory(handle.path).attempts() == [0]


def test_a_checkpoint_is_called_after_a_stop_of_a_clusterddp_training_too(tmp_path: Path) -> None:
    """A callable may have both: the training has saved, and the callable's own state is kept as well."""
    run = RunDirectory(tmp_path)
    run.create()
    attempt = run.create_attempt()

    class Both:
        def __call__(self) -> None:
            raise clusterddp.Stopped(7, "signal TERM")

        def checkpoint(self) -> DelayedSubmission:
            return DelayedSubmission(str, "next")

    before = {number: signal.getsignal(number) for number in function.STOP_SIGNALS}
    try:
        with pytest.raises(clusterddp.Stopped) as stopped:
            function.PreemptibleCall(run, attempt, 0, DelayedSubmission(Both())).carry_out()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not isinstance(stopped.value, StoppedAlone)
    assert function.load_function(function.newest_function(run, attempt + 1)).result() == "next"
    assert function.newest_function(run, attempt) == function.function_file(run)


def test_a_rank_that_declines_ends_the_run_for_any_cause() -> None:
    """The controller is not asked."""
    ends = [RankEnd(0, "n1", End.DECLINED, 1.0, error=str(Declined("no more"))), RankEnd(1, "n1", End.DIED, 2.0)]
    verdict = judge(ends, 1, True, lambda: pytest.fail("asked"))
    assert verdict.action is Action.FAIL
    assert "no more" in verdict.reason


@pytest.mark.parametrize("what", ["file", "folder", "owner"])
def test_a_pickle_that_others_could_have_written_is_not_loaded(tmp_path: Path, what: str) -> None:
    """It is code."""
    if what == "owner" and os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    run = RunDirectory(tmp_path / "run")
    run.create()
    path = function.function_file(run)
    function.save_function(path, function.pickled(DelayedSubmission(print, "loaded")))
    assert path.stat().st_mode & 0o777 == 0o600
    assert run.private.stat().st_mode & 0o777 == 0o700
    function.load_function(path)
    if what == "owner":
        os.chown(path, 12345, -1)
    else:
        (path if what == "file" else run.private).chmod(0o770)
    with pytest.raises(RunDirectoryError):
        function.load_function(path)


def test_a_script_is_launched_as_by_submit(launch: Launch, tmp_path: Path) -> None:
    """Its arguments are text, its result is None, and its failure is raised."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('given', *sys.argv[1:])\nassert sys.argv[1] == '1'\n")
    handle = launch(script, 1, "two", gpus_per_node=1)
    assert handle.wait() == "completed"
    assert handle.result() is None
    assert handle.logs() == "given 1 two\n"
    with pytest.raises(RunDirectoryError):
        launch(script, 2, gpus_per_node=1)
    with pytest.raises(RunFailed):
        launch(script, 2, run_dir=tmp_path / "other").result()


def test_cancel_ends_a_run_for_good(launch: Launch, marks: Path) -> None:
    """And wait() has a bound."""

    def endless() -> None:
        (marks / os.environ["RANK"]).touch()
        threading.Event().wait()

    handle = launch(endless)
    wait_for_marks(handle, marks)
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0)
    handle.cancel()
    assert handle.wait() == "cancelled"
    with pytest.raises(RunFailed):
        handle.result()


def test_mistakes_are_raised_here_and_nothing_is_written(launch: Launch, tmp_path: Path) -> None:
    """As on the command line."""
    with raises(JobDefinitionError):
        launch(print, partitoin="gpu")
    with pytest.raises(UsageError):
        launch(print, threading.Lock())
    with raises(UsageError):
        launch(print, args=["x"])
    with raises(UsageError):
        launch("train.py", fn_kwargs={"lr": 0.1})
    with pytest.raises(JobDefinitionError):
        launch("no_such_script.py")
    assert not (tmp_path / "run").exists()
