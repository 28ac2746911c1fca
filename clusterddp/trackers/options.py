"""Which trackers a job has, and how its W&B and MLflow runs are made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import without_secrets

NAMES = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow"}


def wanted(job: Job, run_name: str, environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The trackers of a job, and how their runs are made."""
    found: dict[str, dict[str, Any]] = {"tensorboard": {}} if job.tensorboard else {}
    if job.wandb is not None and environ.get("WANDB_MODE") != "disabled":
        options: dict[str, Any] = {"name": run_name, "config": config(without_secrets(job)[0]), "mode": job.wandb.mode}
        options |= {"project": job.wandb.project or job.name, "entity": job.wandb.entity, "group": job.wandb.group}
        found["wandb"] = {name: value for name, value in options.items() if value is not None}
    if job.mlflow is not None:
        options = {"name": run_name, "config": config(without_secrets(job)[0])}
        options |= {"experiment": job.mlflow.experiment or job.name, "tracking_uri": job.mlflow.tracking_uri}
        found["mlflow"] = {name: value for name, value in options.items() if value is not None}
    return found


def config(job: Job) -> dict[str, Any]:
    """What the tables of runs of W&B and MLflow can be filtered by: the script's options, and the job's facts."""
    facts = {"seed": job.seed, "world_size": job.world_size, "global_batch": job.global_batch}
    return {name: value for name, value in facts.items() if value is not None} | options_in(job.args)


def options_in(words: Sequence[str]) -> dict[str, Any]:
    """The long options among a script's arguments: ``--lr 1e-3``, ``--lr=1e-3``, ``--amp``."""
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, assigned, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        found[name] = _value(value if assigned else following) if assigned or not following.startswith("--") else True
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
