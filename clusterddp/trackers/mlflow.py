"""MLflow: one MLflow run for all attempts, which gets each step once, when it is below a checkpoint."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException

from clusterddp.trackers.sent import Sent, write_sent

#: The most values, and the most parameters, that MLflow's server takes at once.
MOST_METRICS, MOST_PARAMS = 1000, 100
#: The tag that identifies a run whose name was not recorded, and the prefix of its value in ``Sent.id``.
TAG, CREATING = "clusterddp", "creating "
#: Characters that MLflow does not take in the name of a metric or a parameter.
_ODD = re.compile(r"[^\w\-. :/]")


class MLflow:
    """The server has the last step of each metric, so that values which were sent just before this process was killed
    are not sent twice."""

    #: Takes only steps that no later attempt repeats, because MLflow cannot replace the values of a step.
    live = False

    def __init__(self, folder: Path, sent: Sent, attempt: int, options: Mapping[str, Any]) -> None:
        self._folder, self._client = folder, MlflowClient(options.get("tracking_uri"))
        self._sent = replace(sent, attempt=attempt)
        run = self._own_run(options)
        self._id = run.info.run_id
        #: The first step that MLflow may lack.
        self.first = sent.step
        self._last = {metric.key: metric.step for metric in run.data._metric_objs}
        self._metrics: list[Metric] = []
        missing = {_ODD.sub("_", name): value for name, value in options["config"].items()}
        params = [Param(name, str(value)) for name, value in missing.items() if name not in run.data.params]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])
        self._client.update_run(self._id, "RUNNING")

    def _own_run(self, options: Mapping[str, Any]) -> Run:
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
                self._metrics.append(Metric(key, float(value), round(at * 1000), step))
        if len(self._metrics) >= MOST_METRICS:
            self._send()

    def _send(self) -> None:
        for begin in range(0, len(self._metrics), MOST_METRICS):
            self._client.log_batch(self._id, self._metrics[begin : begin + MOST_METRICS])
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
        self._client.set_terminated(self._id, "FINISHED" if clean else "FAILED")
        return sent
