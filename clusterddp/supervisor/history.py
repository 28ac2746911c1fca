"""Writes a run's history: events.jsonl, a message for each event, and the outcome.

The history is read once, when the attempt starts. No later decision depends on another read.

One process writes it at a time. While a supervisor holds the run (``lease.py``), that is the supervisor: the attempt's
history thread while the ranks run, then the main thread. While no process holds the run, these write a single line:
``submit --fork`` before the run's first job, ``clusterddp cancel`` after it marked the run and its holder ended, and
rank 0 of a script that was started without a supervisor, as by torchrun (``training/context.py``). A superseded
supervisor closes its history before it does anything else. ``History.conclude`` writes the outcome.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from clusterddp.history.beginnings import Training
from clusterddp.history.checkpoints import Checkpoint
from clusterddp.history.codec import encode, sentence
from clusterddp.history.ends import Completed, RunEnd
from clusterddp.history.event import Event
from clusterddp.history.outcome import Outcome, in_file
from clusterddp.jobdef.masking import masked
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.json_lines import drop_torn_line
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.control_channel import clip

_E = TypeVar("_E", bound=Event)
#: The most characters of a free text in an event.
_LONGEST_TEXT = 4000


class History:
    """Appends an attempt's events. Events that could not be written are kept, and retried with the next one.

    ``secrets``: values to mask in events. ``printed``: whether their sentences are printed, for the job's log.
    """

    def __init__(self, run: RunDirectory, attempt: int, secrets: Sequence[str] = (), *, printed: bool = True) -> None:
        self._run, self._attempt, self.secrets, self._printed = run, attempt, secrets, printed
        #: Events that could not be written yet.
        self.pending: list[Event] = []
        self._closed = False
        #: Gets every event that is added.
        self.listener: Callable[[Event], None] = lambda _: None
        drop_torn_line(run.events_file)
        #: The run's history, with the events that a full disk has not taken yet.
        self.view = run.history()

    def add(self, event: _E) -> _E:
        """Appends an event of this attempt, unless the history was closed. Without a time, it happens now. Returns the
        event as it is recorded."""
        event = self._presentable(replace(event, time=event.time or time.time(), attempt=self._attempt))
        if self._closed:
            return event
        self.view.add(event)
        self.pending.append(event)
        self._try_to_write()
        self.listener(event)
        words = sentence(event)
        if self._printed and words:  # a local run's terminal shows the events in the file, and our stderr
            print(words, file=sys.stderr if self.pending else sys.stdout, flush=True)
        return event

    def _presentable(self, event: _E) -> _E:
        """Masks secrets in free texts, such as an exception's, and clips them."""
        fields, others = self._clipped(vars(event)), self._clipped(event.others)
        return replace(event, **fields, others={**event.others, **others}) if fields or others else event

    def _clipped(self, values: Mapping[str, Any]) -> dict[str, Any]:
        texts = {name: values[name] for name in ("error", "reason") if isinstance(values.get(name), str)}
        return {name: clip(masked(text, self.secrets), _LONGEST_TEXT) for name, text in texts.items()}

    def write_pending(self) -> None:
        """Writes what could not be written so far. Raises OSError if it still cannot be."""
        while self.pending:
            append_line(self._run.events_file, encode(self.pending[0]))
            del self.pending[0]

    def _try_to_write(self) -> None:
        try:
            self.write_pending()
        except OSError as error:
            if len(self.pending) == 1:
                say(f"could not write the history ({error.strerror}). Will retry with the next event")

    def close(self) -> None:
        """Stops writing, also in other threads, because a newer attempt's supervisor writes the file from now on."""
        self._closed = True

    @property
    def checkpoint(self) -> int | None:
        """The newest checkpoint of this attempt. None if it has saved none."""
        newest = self.view.attempt(self._attempt).last(Checkpoint)
        return None if newest is None else newest.step

    def reached(self) -> int | None:
        """The step that this attempt reached. 0: none. None: the script records none."""
        try:
            line = self._run.last_metrics()
        except OSError as error:  # the run continues: only its checkpoints matter
            say(f"could not read the metrics ({error}). The last step is unknown")
            line = None
        if line and line["attempt"] == self._attempt:
            return int(line["step"]) + 1
        if self.checkpoint is not None:
            return self.checkpoint
        return 0 if any(event.at_step is not None for event in self.view.attempt(self._attempt)) else None

    def conclude(self, end: type[RunEnd], reason: str, *, confirmed: bool = True, step: int | None = None) -> bool:
        """Writes the outcome, outcome.json: the run is over. Its step is None if the script recorded none.

        It is written by

        - the supervisor, once its ranks have exited, in ``Recovery``: if the verdict is complete, fail or cancel
          (``_act``), if a limit forbids another attempt (``_bounded``), or if the run was cancelled while it was being
          resubmitted (``_hand_over``),
        - a supervisor that starts no ranks, because ``done`` is met or a limit is exceeded (``main.conclude``),
        - ``clusterddp cancel``, once no job or process holds the run, if there is no outcome yet.

        The file has no lock: it is replaced atomically. ``main.supervise_one`` excludes a second writer earlier. A
        supervisor exits if the run is over or another live job holds it (``lease.held_by_other``), and claims its
        attempt by an exclusive ``mkdir``. ``Recovery._act`` exits without writing if a newer attempt exists. A run with
        an outcome continues only on a user's request: the submission, or the attempt that it starts, removes the file.

        ``step``: one that the run has reached, which no event may name. ``confirmed``: false if the run completed only
        by exit code 0, and that is doubtful. Returns whether the outcome was written. An error is reported, and does
        not change how the attempt ended.
        """
        step = highest([step, *(event.at_step for event in self.view)])
        # No rank reports the last step in its output, and one on a node that does not respond reports none at all.
        prints_steps = any(event.log is not None for event in self.view.attempt(self._attempt).all(Training))
        if end is Completed or prints_steps:
            step = highest([step, self.reached()])
        event = end(step=step, attempts=self.view.attempts_made, reason=reason)
        if isinstance(event, Completed) and not confirmed:
            event = replace(event, confirmed=False)
        event = self.add(event)
        outcome = Outcome(end.name, event.reason, step, event.attempts, None if confirmed else False)
        try:
            write_json(self._run.outcome_file, in_file(outcome))
        except OSError as error:
            say(f"could not write {self._run.outcome_file} ({error.strerror}). Without it, the run may start again")
            return False
        return True


def highest(steps: Iterable[int | None]) -> int | None:
    """The highest step. None if there is none."""
    return max((step for step in steps if step is not None), default=None)
