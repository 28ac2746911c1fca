"""The writer of a run's history: events, printed as sentences too, and the outcome at the end.

It is read once, when the attempt starts, and kept: nothing that a supervisor decides later depends on another read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clusterddp.jobdef.secrets import masked
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.records import drop_torn_line
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.limits import attempts_made
from clusterddp.supervisor.messages import sentence
from clusterddp.worker.control_channel import clip

#: Characters of a free text in an event that are kept.
_LONGEST_TEXT = 4000


class History:
    """Appends an attempt's events. A disk that does not take them stops nothing: they are kept and written later.

    ``secrets``: what no event may show.
    """

    def __init__(self, run: RunDirectory, attempt: int, secrets: Sequence[str] = ()) -> None:
        self._run, self._attempt, self.secrets = run, attempt, secrets
        self._pending: list[dict[str, Any]] = []
        self._closed = False
        self.newest_step: int | None = None
        self.newest_checkpoint: int | None = None
        drop_torn_line(run.events_file)
        #: All events of the run, oldest first, with those that a full disk has not taken yet.
        self.events = run.events()

    def add(self, event: str, /, **values: Any) -> None:
        """Appends one event, unless the history was closed."""
        line = {"time": time.time(), "attempt": self._attempt, "event": event, **self._presentable(values)}
        if self._closed:
            return
        self.newest_step = _highest([self.newest_step, values.get("step")])
        if event == "checkpoint":
            self.newest_checkpoint = values["step"]
        self.events.append(line)
        self._pending.append(line)
        self._write_pending()
        written = not self._pending
        words = sentence(line)
        if words:  # a local run's terminal shows what is in the file, and the supervisor's standard error
            print(words, file=sys.stdout if written else sys.stderr, flush=True)

    def _presentable(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of which the free texts, such as an exception's, are without secrets and not too long."""
        texts = {name: values[name] for name in ("error", "reason") if isinstance(values.get(name), str)}
        return {**values, **{name: clip(masked(text, self.secrets), _LONGEST_TEXT) for name, text in texts.items()}}

    def _write_pending(self) -> None:
        try:
            while self._pending:
                append_line(self._run.events_file, self._pending[0])
                del self._pending[0]
        except OSError as error:
            if len(self._pending) == 1:
                say(f"cannot write the history ({error.strerror}); retrying with the next event")

    def close(self) -> None:
        """Nothing is written any more, from any thread: a newer attempt's supervisor is the file's writer now."""
        self._closed = True

    def saved(self) -> dict[str, Any]:
        """Where this attempt came to (0: no further; None: it records no steps), and its newest checkpoint, if any."""
        try:
            line = self._run.last_metrics()
        except OSError as error:  # the run continues all the same: its checkpoints are what counts
            say(f"cannot read the metrics ({error}): the last step is unknown")
            line = None
        done = line["step"] + 1 if line and line["attempt"] == self._attempt else self.newest_checkpoint
        if done is None and self.newest_step is not None:
            done = 0
        return {"step": done, "checkpoint": self.newest_checkpoint}

    def conclude(self, state: str, reason: str) -> bool:
        """Writes the outcome, once: the run is over. Its step is None where the script recorded none.

        A disk that does not take it is said to be so, and changes nothing of what the attempt came to: the answer is
        whether it is written.
        """
        events = self.events
        step = _highest(event.get("step") for event in events)
        values = self._presentable({"step": step, "attempts": attempts_made(events), "reason": reason})
        self.add(state, **values)
        try:
            write_json(self._run.outcome_file, {"state": state, **values})
        except OSError as error:
            words = f"cannot be written ({error.strerror}): no later start will know that the run is {state}"
            say(f"{self._run.outcome_file} {words}")
            return False
        return True


def _highest(steps: Iterable[int | None]) -> int | None:
    """The highest of those that are known."""
    return max((step for step in steps if step is not None), default=None)
