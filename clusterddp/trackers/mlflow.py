"""MLflow: one MLflow run for all attempts, which gets each step once, when it is below a checkpoint."""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from clusterddp.errors import RunDirectoryError
from clusterddp.import_hooks import when_imported
from clusterddp.keys.kinds import WORD
from clusterddp.keys.table import Switch
from clusterddp.reporter import say
from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import Schema, is_text
from clusterddp.trackers.delivery import Sent, write_sent
from clusterddp.trackers.tracker import Tracked, Tracker

_SCHEMA: Schema = {"run_id": is_text}
#: The module of ``mlflow.start_run``.
_FLUENT = "mlflow.tracking.fluent"

#: The most parameters that MLflow's server takes at once.
MOST_PARAMS = 100
#: The tag that identifies a run whose name was not recorded, and the prefix of its value in ``Sent.id``.
TAG, CREATING = "clusterddp", "creating "
#: Characters that MLflow does not take in the name of a metric or a parameter.
_ODD = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True)
class Mlflow:
    """The MLflow run that has this run's metrics."""

    experiment: str | None = None
    """The experiment, created if it does not exist. None: ``job_name``."""
    tracking_uri: Annotated[str | None, WORD] = None
    """The server, such as ``http://mlflow:5000``. None: as in the variable MLFLOW_TRACKING_URI, or MLflow's default."""


class MLflow(Tracker):
    """MLflow."""

    key, name = "mlflow", "MLflow"
    kind = Switch(Mlflow, "experiment", "an MLflow experiment")
    meaning = (
        "Also sends the metrics to MLflow: `true`, an experiment, or `{experiment: digits, tracking_uri: URL}`. "
        "None: no."
    )
    files = "A record of what MLflow has, with the key ``mlflow``."
    variables_of_script = ("MLFLOW_RUN_ID",)

    def options(self, config: Mlflow, run: Tracked, environ: Mapping[str, str]) -> Mapping[str, Any]:  # noqa: ARG002
        """As every tracker."""
        server = {} if config.tracking_uri is None else {"tracking_uri": config.tracking_uri}
        return {"name": run.name, "config": run.config, "experiment": config.experiment or run.job_name, **server}

    def variables(self, run: RunDirectory, rank: int, environ: Mapping[str, str]) -> Mapping[str, str]:
        """As every tracker. MLflow's server names a run itself, so the rank that starts one records its name, and gets
        it in later attempts. An empty variable of the user's starts a new run in each attempt."""
        if "MLFLOW_RUN_ID" in environ:
            return {}
        file = run.private / f"mlflow-rank-{rank}.json"
        try:
            record = read_json(file, _SCHEMA)
        except (OSError, RunDirectoryError) as error:
            say(f"could not determine which MLflow run this rank started ({error}). The script will start a new one")
            return {}
        if record is not None:
            return {"MLFLOW_RUN_ID": record["run_id"]}
        when_imported(_FLUENT, lambda module: _record_first_run(module, file))
        return {}

    def open(self, folder: Path, sent: Sent, options: Mapping[str, Any]) -> MlflowRun:
        """As every tracker."""
        return MlflowRun(folder, sent, options)


TRACKER = MLflow()


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
                say(f"could not record the MLflow run ({error}). The next attempt will start a new one")
        return began

    fluent.start_run = starting  # type: ignore[attr-defined]


class MlflowRun:
    """The server has the last step of each metric, so that values which were sent just before this process was killed
    are not sent twice."""

    #: The most values that the server takes at once.
    most_metrics = 1000

    def __init__(self, folder: Path, sent: Sent, options: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient, entities

        self._folder, self._client = folder, MlflowClient(options.get("tracking_uri"))
        self._metric = entities.Metric
        self._sent = sent
        run = self._own_run(options)
        self.run_id = run.info.run_id
        #: The first step that MLflow may lack.
        self.first = sent.step
        self._last = {metric.key: metric.step for metric in run.data._metric_objs}
        self._metrics: list[Any] = []
        missing = {_ODD.sub("_", name): value for name, value in options["config"].items()}
        params = [entities.Param(name, str(value)) for name, value in missing.items() if name not in run.data.params]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[begin : begin + MOST_PARAMS])
        self._client.update_run(self.run_id, "RUNNING")

    def _own_run(self, options: Mapping[str, Any]) -> Any:
        """The run in MLflow: that of earlier attempts, or a new one."""
        if self._sent.id is not None and not self._sent.id.startswith(CREATING):
            return self._client.get_run(self._sent.id)
        token = secrets.token_hex(16) if self._sent.id is None else self._sent.id.removeprefix(CREATING)
        experiment = self._experiment(options["experiment"])
        found = self._client.search_runs([experiment], f"tags.{TAG} = '{token}'")
        if not found:
            write_sent(self._folder, replace(self._sent, id=CREATING + token))  # before the server has the run
            found = [self._client.create_run(experiment, tags={TAG: token}, run_name=options["name"])]
        self._sent = replace(self._sent, id=found[0].info.run_id)
        write_sent(self._folder, self._sent)
        return self._client.get_run(found[0].info.run_id)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run may have just created it
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Sends the values of a step. ``at``: when they were logged."""
        for name, value in values.items():
            key = _ODD.sub("_", name)
            if step > self._last.get(key, -1):
                self._metrics.append(self._metric(key, float(value), round(at * 1000), step))
        if len(self._metrics) >= self.most_metrics:
            self._send()

    def _send(self) -> None:
        for begin in range(0, len(self._metrics), self.most_metrics):
            self._client.log_batch(self.run_id, self._metrics[begin : begin + self.most_metrics])
        self._metrics.clear()

    def flush(self, step: int | None) -> Sent:
        """Sends the added values. Returns what MLflow has for certain."""
        self._send()
        if step is not None:
            self._sent = replace(self._sent, step=step)
        return self._sent

    def close(self, step: int, clean: bool) -> Sent:
        """Ends the run in MLflow, which a later attempt continues."""
        sent = self.flush(step)
        self._client.set_terminated(self.run_id, "FINISHED" if clean else "FAILED")
        return sent
