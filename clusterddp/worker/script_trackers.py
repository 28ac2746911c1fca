"""The script's own W&B and MLflow runs: an attempt's ranks continue those of earlier attempts. Standard library only.

W&B takes the name of a run from the client, so that each rank is given one. MLflow's server names a run itself: the
rank that starts one records its name, and is given it in later attempts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterddp import protocol
from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import say
from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import Schema, is_text, read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.import_hook import when_imported

_SCHEMA: Schema = {"run_id": is_text}
#: The module of ``mlflow.start_run``.
_FLUENT = "mlflow.tracking.fluent"


def continue_runs(run: RunDirectory, rank: int, environ: MutableMapping[str, str]) -> None:
    """Sets the variables by which W&B and MLflow continue this rank's run, unless the user has set them."""
    if (name := environ.get(protocol.WANDB_NAME)) and "WANDB_RESUME" not in environ:
        # Ranks that each start a run of their own must not share it.
        environ.setdefault("WANDB_RUN_ID", name if rank == 0 else f"{name}-rank{rank}")
        environ["WANDB_RESUME"] = "allow"
    if protocol.MLFLOW not in environ or "MLFLOW_RUN_ID" in environ:
        return
    file = run.private / f"mlflow-rank-{rank}.json"
    try:
        record = read_json(file, _SCHEMA)
    except (OSError, RunDirectoryError) as error:
        say(f"cannot read which MLflow run this rank began ({error}): the script will start a new one")
        return
    if record is not None:
        environ["MLFLOW_RUN_ID"] = record["run_id"]
    else:
        when_imported(_FLUENT, lambda module: _record_first_run(module, file))


def _record_first_run(fluent: ModuleType, file: Path) -> None:
    """Has ``mlflow.start_run`` record the first run that this process creates."""
    start_run, process = fluent.start_run, os.getpid()
    recorded = False

    @functools.wraps(start_run)
    def starting(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorded
        began = start_run(*args, **kwargs)
        named = bool(args) or kwargs.get("run_id") or kwargs.get("nested")
        if not recorded and not named and os.getpid() == process:
            recorded = True
            try:
                write_json(file, {"run_id": began.info.run_id}, mode=0o600)
            except OSError as error:
                say(f"cannot record the MLflow run ({error}): the next attempt will start a new one")
        return began

    fluent.start_run = starting  # type: ignore[attr-defined]
