"""A search by Optuna whose trials are runs: ``python jobs/optuna_search.py searches/digits --trials 20 --at-once 4``.

Optuna proposes, clusterddp trains. FOLDER holds the study and a run directory per trial. Each run survives
preemptions, and the same command continues a search that was stopped, with the same runs. Needs ``pip install optuna``.
"""

import argparse
import json
import time
from pathlib import Path

import clusterddp

JOB = Path(__file__).with_name("digits.yaml")
METRIC, DIRECTION = "f1", "maximize"


def propose(trial):
    """The values that Optuna chooses."""
    trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    trial.suggest_categorical("batch-size", [8, 16, 32])


def start(folder, number, params, local):
    """Starts the run of a trial, or continues one that has stopped."""
    run_dir = folder / f"trial-{number}"
    if (run_dir / "job.yaml").exists() and (handle := clusterddp.Handle(run_dir)).status().state != "stopped":
        return handle
    words = [word for name, value in params.items() for word in (f"--{name}", value)]
    return clusterddp.launch(JOB, "--steps", 240, "--eval-every", 20, *words, run_dir=run_dir, local=local)


def evaluations(handle):
    """The metric by step, up to the run's newest step."""
    path = handle.path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line[METRIC] for line in lines if METRIC in line}


def search(study, folder, trials, at_once, local=False, look_s=5.0):
    """Runs trials until the study has ``trials``, at most ``at_once`` at a time."""
    from optuna.trial import TrialState

    asked = {}  # the trials that this process has asked for, which Optuna may prune, and the steps reported of each
    runs = {
        old.number: start(folder, old.number, old.params, local) for old in study.trials if not old.state.is_finished()
    }
    while runs or len(study.trials) < trials:
        while len(runs) < at_once and len(study.trials) < trials:
            trial = study.ask()
            propose(trial)
            asked[trial.number] = trial, set()
            runs[trial.number] = start(folder, trial.number, trial.params, local)
        for number, handle in list(runs.items()):
            state, found = handle.status().state, evaluations(handle)
            if state in ("pending", "held", "running"):
                if number in asked and is_hopeless(*asked[number], found):
                    handle.cancel()
                    study.tell(number, state=TrialState.PRUNED)
                    del runs[number]
            elif state == "completed" and found:
                study.tell(number, found[max(found)])
                del runs[number]
            elif state in ("completed", "failed", "cancelled"):
                study.tell(number, state=TrialState.FAIL)
                del runs[number]
            elif state == "stopped":
                runs[number] = start(folder, number, study.trials[number].params, local)
        time.sleep(look_s)


def is_hopeless(trial, reported, found):
    """Whether Optuna would prune the trial, by its evaluations so far."""
    for step in sorted(found.keys() - reported):
        trial.report(found[step], step)
        reported.add(step)
    return bool(found) and trial.should_prune()


if __name__ == "__main__":
    import optuna

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4, help="maximum number of runs at a time")
    parser.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(options.folder / "study.log"))
    study = optuna.create_study(
        study_name="search", storage=optuna.storages.JournalStorage(backend), direction=DIRECTION, load_if_exists=True
    )
    search(study, options.folder, options.trials, options.at_once, options.local)
    print(f"best: trial {study.best_trial.number}, {METRIC} {study.best_value:.4f}, {study.best_params}")
    print(f"Export it with: clusterddp export {options.folder}/trial-{study.best_trial.number} model.safetensors")
