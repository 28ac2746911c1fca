"""What a rank adds to a Hydra app: separate files in the output folder, a common time, and the return value."""

from __future__ import annotations

import os
import re
from datetime import datetime
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from clusterddp import protocol
from clusterddp.reporter import say
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory


class RunCallback(Callback):
    """Added to the configuration of every rank by ``clusterddp.worker``."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Gives ``${now:...}`` the time at which the run began, and keeps other ranks from writing rank 0's files.

        All ranks and attempts share the output folder: the other ranks log to separate files, and write no
        ``.hydra``.
        """
        began = datetime.fromtimestamp(float(os.environ[protocol.HYDRA]))
        OmegaConf.register_new_resolver("now", began.strftime, use_cache=True, replace=True)
        OmegaConf.clear_cache(config)
        rank = int(os.environ["RANK"])
        if rank == 0:
            return
        with read_write(config), open_dict(config):
            config.hydra.output_subdir = None
            for handler in (OmegaConf.select(config, "hydra.job_logging.handlers") or {}).values():
                if "filename" in handler:
                    own = OmegaConf.to_container(handler, resolve=False)["filename"]  # may have interpolations
                    handler.filename = re.sub(r"(\.\w+)?\Z", rf".rank-{rank}\1", str(own), count=1)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:  # noqa: ARG002
        """Stores what the task function returned, for ``Handle.result()`` and Hydra's sweepers."""
        if job_return.status != JobStatus.COMPLETED:
            return
        run, attempt = RunDirectory(os.environ[protocol.RUN_DIR]), int(os.environ[protocol.ATTEMPT])
        try:
            content = cloudpickle.dumps(job_return.return_value)
        except Exception as error:
            say(f"could not pickle and store the return value of {job_return.task_name}: {error}")
            return
        write_atomically(run.result_file(attempt, int(os.environ["RANK"])), content, mode=0o600)
