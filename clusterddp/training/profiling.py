"""Records torch's profiler for a few steps of a rank: by ``clusterddp tell RUN profile=20``, or the key ``profile``.

The main thread starts and ends it at step boundaries. A separate process (``worker/trace_file.py``) stores the result,
and a thread waits for that. A failed profile never ends the training.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from clusterddp.process import module_command
from clusterddp.reporter import in_words

if TYPE_CHECKING:
    from clusterddp.training.settings import Settings

#: Seconds that a rank whose script has ended waits for its profile to be stored.
STORE_S = 20.0
#: The same after an error, when the profile is dropped and only that is reported.
DROP_S = 1.0


@dataclass(frozen=True)
class _Wish:
    """A requested profile. ``request``: the user's request. None for the job definition's profile."""

    steps: int
    request: str | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The field of its events that names the request."""
        return {} if self.request is None else {"request": self.request}


@dataclass
class _Recording:
    """A profile being recorded: from which step on, and how many steps are done."""

    wish: _Wish
    begin: int
    profiler: profile
    step: record_function
    done: int = 0

    def end_step(self) -> None:
        """A step is done."""
        self.done += 1
        self.step.__exit__(None, None, None)


class Profiling:
    """One rank's profiles, one at a time. For the main thread, unless noted.

    Args:
        report: adds events to the history.
        pause: suspends the watchdog in a ``with`` block.
    """

    def __init__(
        self,
        settings: Settings,
        attempt: int,
        device: torch.device,
        report: Callable[..., None],
        pause: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._directory, self._attempt, self._rank = settings.run_dir, attempt, settings.ranks.rank
        self._device, self._report, self._pause = device, report, pause
        planned = settings.job.profile if settings.profile else None
        self._planned = planned if planned is not None and self._rank in planned.ranks else None
        self._planned_at = -1 if self._planned is None else self._planned.at
        self._wish: _Wish | None = None
        self._recording: _Recording | None = None
        self._storing: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        #: Why no further profile is recorded, and whether none is stored either.
        self._over: str | None = None
        self._dropped = False

    def request(self, request: str, steps: int) -> str | None:
        """Records a profile from the next step boundary on. Returns why it does not, or None. Any thread."""
        with self._lock:
            if self._over is not None:
                return self._over
            if self._wish is not None or self._recording is not None:
                return "it is already recording a profile"
            if self._directory is None:
                return "there is no run directory"
            self._wish = _Wish(steps, request)
        return None

    def at_boundary(self, step: int) -> None:
        """Between two steps. ``step`` comes next."""
        if self._wish is None and self._recording is None and step != self._planned_at:
            return
        if (recording := self._recording) is not None:
            recording.end_step()
            if recording.done < recording.wish.steps:
                recording.step = _annotated(step)
                if step == self._planned_at:
                    self._report("not_profiled", reason=f"a different profile is being recorded at step {step}")
                return
            self._finish(recording)
        if step == self._planned_at and self._planned is not None:
            with self._lock:
                self._wish = self._wish or _Wish(self._planned.steps)
        if self._wish is not None:
            self._start(self._wish, step)

    def end(self) -> None:
        """The loop has ended. A profile that is being recorded ends with it."""
        if self._recording is not None and not self._dropped:
            self._recording.end_step()
            self._finish(self._recording)

    def drop(self, reason: str) -> None:
        """The run stops, and waits neither for a profile nor for the profiler's end."""
        self._drop(f"the run stopped ({reason})")

    def _drop(self, why: str) -> None:
        recording, self._dropped = self._recording, True
        self._give_up(why)
        if recording is not None:
            done = f"after {recording.done} of {recording.wish.steps} steps of the profile"
            self._report("not_profiled", reason=f"{self._over} {done}", **recording.wish.named)
        if self._process is not None:
            self._process.terminate()

    def close(self, *, wait: bool) -> None:
        """The script has ended. ``wait``: for its profile. Not after an error."""
        if self._dropped:
            return
        if wait:
            self._give_up("its training ended")
            self.end()
        else:
            self._drop("the script failed")
        if self._storing is not None:
            self._storing.join(STORE_S if wait else DROP_S)

    def _give_up(self, why: str) -> None:
        """Refuses requests from now on, also one that was accepted for the next step."""
        with self._lock:
            self._over = self._over or why
            wish, self._wish = self._wish, None
        if wish is not None:
            self._report("not_profiled", reason=f"{why} before its next step", **wish.named)

    def _start(self, wish: _Wish, step: int) -> None:
        try:
            if torch._C._autograd._profiler_enabled():
                self._reject(wish, "the script is running torch's profiler itself")
                return
            with self._pause():  # a GPU's first profile loads CUPTI
                profiler = profile(activities=activities(self._device, supported()))
                profiler.start()
        except Exception as error:
            self._reject(wish, in_words(error))
            return
        with self._lock:
            self._wish, self._recording = None, _Recording(wish, step, profiler, _annotated(step))
        self._report("profiling", step=step, steps=wish.steps, **wish.named)

    def _reject(self, wish: _Wish, reason: str) -> None:
        with self._lock:
            self._wish = None
        self._report("not_profiled", reason=reason, **wish.named)

    def _finish(self, recording: _Recording) -> None:
        """Ends a recording. The trace goes to a local disk first: torch holds the GIL while it writes."""
        folder = None
        try:
            with self._pause():
                recording.profiler.stop()
                folder = tempfile.mkdtemp(prefix="clusterddp-profile-")
                recording.profiler.export_chrome_trace(f"{folder}/trace.json")
                self._begin_to_store(recording, Path(folder, "trace.json"))
        except Exception as error:
            self._report("not_profiled", reason=in_words(error), **recording.wish.named)
        finally:
            with self._lock:
                self._recording = None
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)  # the process has the file open

    def _begin_to_store(self, recording: _Recording, trace: Path) -> None:
        assert self._directory is not None
        if self._storing is not None:
            self._storing.join()
        target = self._directory.profile_file(self._attempt, self._rank, recording.begin)
        command = [*module_command("clusterddp.worker.trace_file"), str(target)]
        with open(trace, "rb") as file:
            self._process = subprocess.Popen(
                command, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        what = {"step": recording.begin, "steps": recording.done, **recording.wish.named}
        self._storing = threading.Thread(
            target=self._wait, args=(self._process, target.relative_to(self._directory.path), what), daemon=True
        )
        self._storing.name = "profile"
        self._storing.start()

    def _wait(self, process: subprocess.Popen[str], file: Path, what: dict[str, Any]) -> None:
        _, said = process.communicate()
        if process.returncode == 0:
            self._report("profiled", **what, file=str(file))
            return
        lines = said.strip().removeprefix("clusterddp: ").splitlines()
        why = lines[-1] if lines else f"the process that stores it exited with code {process.returncode}"
        named = {"request": what["request"]} if "request" in what else {}
        self._report("not_profiled", reason=f"could not store {file}: {self._over if self._dropped else why}", **named)


def supported() -> Collection[ProfilerActivity]:
    """The activities that this build of torch can record on this machine."""
    return supported_activities()  # type: ignore[no-any-return,no-untyped-call]


def activities(device: torch.device, supported: Collection[ProfilerActivity]) -> list[ProfilerActivity]:
    """What to record: the CPU, and a GPU if the rank has one and this build of torch can."""
    gpu = ProfilerActivity.CUDA
    return [ProfilerActivity.CPU, *([gpu] if device.type == "cuda" and gpu in supported else [])]


def _annotated(step: int) -> record_function:
    """The name of a step in the trace is the one that tools for torch's traces look for."""
    annotation = record_function(f"ProfilerStep#{step}")
    annotation.__enter__()  # type: ignore[no-untyped-call]
    return annotation
