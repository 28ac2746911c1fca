"""jobs/optuna_search.py, with stand-ins for Optuna and for runs: what it asks for, prunes, reports and continues."""

from __future__ import annotations

import enum
import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "jobs" / "optuna_search.py"


class State(enum.Enum):
    RUNNING, COMPLETE, PRUNED, FAIL = range(4)

    def is_finished(self) -> bool:
        return self is not State.RUNNING


@dataclass
class Trial:
    number: int
    params: dict[str, Any] = field(default_factory=dict)
    state: State = State.RUNNING
    value: float | None = None
    reported: list[tuple[int, float]] = field(default_factory=list)

    def suggest_float(self, name: str, low: float, high: float, log: bool) -> None:
        self.params[name] = low

    def suggest_categorical(self, name: str, choices: list[int]) -> None:
        self.params[name] = choices[0]

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return self.number == 1


class Study:
    def __init__(self, *trials: Trial) -> None:
        self.trials = list(trials)

    def ask(self) -> Trial:
        self.trials.append(Trial(len(self.trials)))
        return self.trials[-1]

    def tell(self, number: int, value: float | None = None, state: State = State.COMPLETE) -> None:
        self.trials[number].value, self.trials[number].state = value, state


class Run:
    """A run that is under way at the first look, and has ended at the second."""

    def __init__(self, path: Path, *states: str) -> None:
        self.path, self.states = path, [*states]
        path.mkdir(parents=True, exist_ok=True)
        (path / "job.yaml").touch()
        number = int(path.name.rpartition("-")[2])
        lines = [{"step": 19, "f1": 0.1 * number}, {"step": 20}, {"step": 39, "f1": 0.2 * number}]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        self.cancelled = False

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(state=self.states.pop(0) if len(self.states) > 1 else self.states[0])

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "optuna", ModuleType("optuna"))
    monkeypatch.setitem(sys.modules, "optuna.trial", SimpleNamespace(TrialState=State))
    spec = importlib.util.spec_from_file_location("optuna_search", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trials_are_runs_with_the_values_that_optuna_chose(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last evaluation is the trial's value; a hopeless one is cancelled, and one that failed is told as such."""
    started: list[tuple[str, tuple[Any, ...]]] = []
    runs: list[Run] = []

    def launch(job: Path, *words: Any, run_dir: Path, local: bool) -> Run:
        started.append((run_dir.name, words[4:]))
        runs.append(Run(run_dir, "pending", "running", "failed" if run_dir.name == "trial-2" else "completed"))
        return runs[-1]

    monkeypatch.setattr(script, "clusterddp", SimpleNamespace(launch=launch))
    study = Study()
    script.search(study, tmp_path, trials=4, at_once=2, look_s=0)
    assert started == [(f"trial-{number}", ("--lr", 1e-4, "--batch-size", 8)) for number in range(4)]
    assert [trial.state for trial in study.trials] == [State.COMPLETE, State.PRUNED, State.FAIL, State.COMPLETE]
    assert [trial.value for trial in study.trials] == [0.0, None, None, pytest.approx(0.6)]
    assert [run.cancelled for run in runs] == [False, True, False, False]
    assert [step for step, _ in study.trials[3].reported] == [19, 39]
