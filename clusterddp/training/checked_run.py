"""A run under ``submit --check-resume``: each rank records each step, and all stop at a given step.

The recording is a separate class, so that it costs other runs nothing. It also has the state that the script did not
give to ``ctx.run()`` (``script_objects.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NoReturn

from clusterddp.checkpoint.parts import Stateful
from clusterddp.data import randomness
from clusterddp.rundir.step_records import STOP_REASON, Recording, States, StepRecord
from clusterddp.training import logged_values as logged
from clusterddp.training.loop import Run, Services
from clusterddp.training.run_state import Given
from clusterddp.training.script_objects import Surroundings, of_batch, of_part, of_value


class CheckedRun(Run):
    """A run that records each step, and stops after ``recording.until`` steps as at a preemption."""

    def __init__(self, recording: Recording, given: Given, services: Services) -> None:
        super().__init__(given, services)
        self._recording, self._own_values = recording, given.values
        self._parts = {**given.parts, **{f"per_rank {name}": part for name, part in given.per_rank.parts.items()}}
        self._surroundings = Surroundings(self._parts, given.loader.given)
        self._file = recording.file(self._group.rank)
        self._file.touch(mode=0o600)
        self._before: States | None = None
        self._batch: dict[str, str] = {}
        self._logged: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._recorded = False

    def _steps(self, total: int) -> Iterator[Any]:
        with closing(super()._steps(total)) as batches:  # type: ignore[type-var]
            for batch in batches:
                with randomness.preserved():
                    self._batch, self._logged = of_batch(batch), {}
                    others, self._variables = self._surroundings.states()
                    self._before = None if self._recorded else self._states(others)
                yield batch

    def log(self, *unnamed: NoReturn, reduce: logged.Reduction | None = None, **values: Any) -> None:
        super().log(*unnamed, reduce=reduce, **values)
        if self._making:
            self._logged |= {name: of_value(logged.number(name, value)) for name, value in values.items()}

    def _boundary(self) -> None:
        if self.step >= self._recording.until and not self._making:
            self.stop(STOP_REASON)
        super()._boundary()

    def _finish_step(self) -> None:
        step, (epoch, epoch_steps) = self.step, self._epoch()
        super()._finish_step()
        with randomness.preserved():
            after = self._states(self._surroundings.states()[0])
        made = self._batch, self._variables, self._logged
        record = StepRecord(step, epoch, epoch_steps, *made, after, self._before)
        with open(self._file, "a") as file:
            file.write(record.to_line())
        self._recorded = True

    def _epoch(self) -> tuple[int | None, int | None]:
        """The epoch of the step, and the steps of an epoch. None if there is none, or it is unknown."""
        epoch = steps = None
        with suppress(TypeError):
            epoch = self.epoch
            steps = self._loader.steps_in(1)
        return epoch, steps

    def _states(self, others: dict[str, dict[str, str]]) -> States:
        parts = {name: self._digests(part) for name, part in self._parts.items()}
        if self._own_values:
            parts["script_state"] = {name: of_value(value) for name, value in self._own_values.state_dict().items()}
        return States(parts, others)

    def _digests(self, part: Stateful) -> dict[str, str]:
        try:
            return of_part(part)
        except Exception:  # the script's own code, which a checkpoint calls only on rank 0
            if self._group.rank == 0:
                raise
            return {}
