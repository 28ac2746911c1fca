"""The process that is killed: it makes a run directory, saves, starts over in a second attempt, and ends the run.

``python -m tests.crash.subject`` serves: a request, one JSON object a line on its standard input, makes it fork a child
that plays the story. Importing torch takes longer than all of that. The child stops after as many promises as the
request says, until strace holds it and its checkpoint writer; it stops again when a save has failed, if strace is to
let go then.

What the child has been promised by the code under test it says in a file outside of the run directory, one JSON object
a line: after a crash the promises must hold.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from clusterddp.checkpoint.client import CheckpointClient
from clusterddp.history.beginnings import Resumed, Started
from clusterddp.history.checkpoints import Checkpoint, CheckpointFailed
from clusterddp.history.ends import Completed, Failed
from clusterddp.history.event import Event, Reported
from clusterddp.jobdef.job import Checkpointing, Keep
from clusterddp.rundir.files import remove, write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor import lease
from clusterddp.supervisor.history import History
from clusterddp.training.logged_values import Logged
from clusterddp.training.saving import Saver
from clusterddp.worker.rank_process import RankProcess

STEPS_PER_SAVE = 4
#: Per attempt: how many saves, and how many checkpoints it keeps. Attempt 0 makes a first, a second and a pruning save;
#: attempt 1 prunes what attempt 0 wrote, and never has more than the newest.
ATTEMPTS = {0: (3, 2), 1: (2, 1)}
JOB = "name: crash\n"
#: Python reads a module here at its start, in the writer, too.
_ALWAYS_THE_SAME = Path(__file__).with_name("same")


def saver_of(run: RunDirectory, attempt: int, report: Callable[..., None], keep: int = 2) -> Saver:
    """Rank 0's saver, without other ranks."""
    cpu = torch.device("cpu")
    alone: Any = SimpleNamespace(rank=0, world_size=1, device=cpu, collective_device=cpu, control_device=cpu)
    settings = Checkpointing(every_steps=STEPS_PER_SAVE, every_s=None, keep=Keep(keep))
    return Saver(RankProcess(), run, attempt, alone, report, settings)


def save(saver: Saver, step: int, done: Callable[[], bool]) -> None:
    """Saves the state after ``step``, a due one, and asks after it in each of the steps that follow, as training does.

    So the writer's one thread makes all of a save's calls; when someone waits, its two threads share them at random.
    """
    saver.save_if_due(step, lambda: content(step))
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, f"no word of the save of step {step}"
        time.sleep(0.001)
        saver.save_if_due(step + 1, lambda: content(step + 1))


def content(step: int) -> dict[str, Any]:
    """The state after ``step`` steps."""
    weight = torch.full((40, 60), float(step))
    return {"model": {"weight": weight, "bias": torch.arange(5) + step}, "progress": {"step": step}}


def values(step: int) -> dict[str, Any]:
    """The metrics of a step; long, so that what one save makes durable spans several blocks."""
    return {"loss": step / 2, "x" * 400: 1.0}


class Story:
    """What one child does. ``promise`` is called with what must hold from then on."""

    def __init__(self, path: Path, promises: int, stop_after: int, once: bool, stop: Callable[[Any], None]) -> None:
        self._run, self._promises = RunDirectory(path), promises
        self._stop_after, self._once, self._stop = stop_after, once, stop
        self._saver: Saver | None = None
        self._made = 0

    def play(self) -> None:
        self._count()
        self._submit()
        for attempt in ATTEMPTS:
            self._attempt(attempt)
        self._run.mark_cancelled()
        self.promise(cancelled=True)

    def promise(self, **what: Any) -> None:
        os.write(self._promises, (json.dumps(what) + "\n").encode())
        self._made += 1
        self._count()

    def _count(self) -> None:
        if self._made == self._stop_after:
            writers = [client._writer for client in self._clients()]
            self._stop([writer.pid for writer in writers if writer is not None and writer.poll() is None])

    def _clients(self) -> list[CheckpointClient]:
        """What has writers."""
        client = self._saver._client if self._saver else None
        return [client] if isinstance(client, CheckpointClient) else []

    def _submit(self) -> None:
        self._run.create()
        self.promise(created=True)
        write_atomically(self._run.job_file, JOB)
        self.promise(job=JOB)
        lease.submitted(self._run, "41")
        self.promise(pending="41")

    def _attempt(self, expected: int) -> None:
        number = self._run.create_attempt()
        self.promise(attempt=number)
        assert number == expected
        if expected > 0:
            remove(self._run.outcome_file)
            self.promise(outcome=None)
        me = lease.of_job(str(41 + number))
        lease.take(self._run, number, me)
        self.promise(pending=None, holder=me.job)
        history = History(self._run, number)
        self._event(history, Started(job=me.job, nodes="n1", ranks=1, code={}, changed=()))
        self._train(number, history)
        end = Failed if number < max(ATTEMPTS) else Completed
        written = history.conclude(end, "the story says so")
        self.promise(events=len(self._run.events()), **({"outcome": end.name} if written else {}))

    def _train(self, number: int, history: History) -> None:
        saves, keep = ATTEMPTS[number]
        heard: list[str] = []

        def report(event: Reported) -> None:
            heard.append(event.name)
            if isinstance(event, Checkpoint):
                self.promise(saved=event.step)
                event = Checkpoint(step=event.step, blocked_s=0.0, durable_s=0.0, bytes=1)
            elif isinstance(event, CheckpointFailed):
                self.promise(not_saved=event.step, reason=event.reason)
                if self._once:
                    self._once = False
                    self._stop("let go")
            self._event(history, event)

        saver = self._saver = saver_of(self._run, number, report, keep)
        found = saver.restore()
        parent = found[1] if found else None
        saver.record_resume(parent)
        self.promise(resumed=number)
        first = parent[1] if parent else 0
        of = {"attempt": parent[0], "step": parent[1]} if parent else {}
        self._event(history, Resumed(step=first, parent=of))
        saver.prepare(lambda: content(first))
        for step in range(first, first + saves * STEPS_PER_SAVE):
            saver.log(step, Logged(values(step)))
            if (step + 1) % STEPS_PER_SAVE == 0:
                before = len(heard)
                save(saver, step + 1, lambda before=before: len(heard) > before)  # type: ignore[misc]
        saver.close()
        self._saver = None
        self.promise(trained=number)

    def _event(self, history: History, event: Event) -> None:
        history.add(event)
        if not history.pending:
            self.promise(event=event.name, events=len(self._run.events()))


def serve(story: type[Story]) -> None:
    """Answers each request with the child's exit status; a child lives no longer than its request."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_play_traced(story, **json.loads(line))), flush=True)


def _play_traced(
    story: type[Story], run: str, promises: str, stop_after: int, once: bool, strace: list[str]
) -> dict[str, Any]:
    stopped, tell = os.pipe()
    go, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(stopped), os.close(let_go)
        _play(story, Path(run), promises, stop_after, once, tell, go)
    os.close(tell), os.close(go)
    said = ""
    with open(stopped) as told:
        if line := told.readline():
            processes = [str(pid) for pid in (child, *json.loads(line))]
            attach = [part for pid in processes for part in ("-p", pid)]
            tracer = subprocess.Popen([*strace, *attach], stderr=subprocess.PIPE, text=True)
            assert tracer.stderr is not None
            while said.count("attached") < len(processes) and (line := tracer.stderr.readline()):
                said += line
            os.write(let_go, b"g")
            if told.readline():
                tracer.terminate()
                tracer.wait()
                os.write(let_go, b"g")
            said += tracer.stderr.read()  # It ends with the last process that it follows.
            tracer.wait()
    os.close(let_go)
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "strace": said}


def _play(story: type[Story], run: Path, promises: str, stop_after: int, once: bool, tell: int, go: int) -> None:
    """The child's life."""
    ctypes.CDLL(None).prctl(0x59616D61, -1)  # PR_SET_PTRACER: strace is no ancestor
    # The same names and contents every time:
    secrets.token_hex = lambda size=4: "0" * 2 * size  # type: ignore[assignment, operator]
    time.time = lambda: 1.7e9
    os.environ["PYTHONPATH"] = str(_ALWAYS_THE_SAME)
    errors = os.open(f"{promises}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(errors, standard)
    said = os.open(promises, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def stop(word: Any) -> None:
        os.write(tell, f"{json.dumps(word)}\n".encode())
        os.read(go, 1)

    code = 1
    try:
        story(run, said, stop_after, once, stop).play()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(Story)
