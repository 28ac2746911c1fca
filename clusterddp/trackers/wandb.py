"""W&B: one W&B run for all attempts, which gets each step once, when it is below a checkpoint."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from clusterddp import protocol
from clusterddp.keys.kinds import WORD, matching
from clusterddp.keys.table import Switch
from clusterddp.rundir.deletion import delete_folder
from clusterddp.rundir.files import create_folder, exists, fsync_directory, fsync_file_system, rename
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.delivery import Sent, write_sent
from clusterddp.trackers.tracker import Tracked, Tracker

#: What W&B takes as the name of a project.
PROJECT = matching(r"[^/\\#?%:\s][^/\\#?%:]{0,127}", "a W&B project of at most 128 characters without / \\ # ? % :")


@dataclass(frozen=True)
class Wandb:
    """The W&B run that has this run's metrics."""

    project: Annotated[str | None, PROJECT] = None
    """The project. None: ``job_name``."""
    entity: Annotated[str | None, WORD] = None
    """The user or team of the project. None: W&B's default."""
    group: str | None = None
    """The group that the run belongs to on W&B's pages."""
    mode: Literal["online", "offline"] | None = None
    """``offline`` writes files, for ``wandb sync``. None: as in the variable WANDB_MODE, or online."""


class WeightsAndBiases(Tracker):
    """W&B."""

    key, name = "wandb", "W&B"
    kind = Switch(Wandb, "project", "a W&B project")
    meaning = (
        "Also sends the metrics to W&B: `true`, a project, or `{project: digits, entity: lab, mode: offline}`. "
        "None: no."
    )
    files = "The files of W&B, with the key ``wandb``."
    variables_of_script = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME")

    def options(self, config: Wandb, run: Tracked, environ: Mapping[str, str]) -> Mapping[str, Any] | None:
        """As every tracker."""
        if environ.get("WANDB_MODE") == "disabled":
            return None
        given = {"name": run.name, "config": run.config, **asdict(config), "project": config.project or run.job_name}
        return {name: value for name, value in given.items() if value is not None}

    def variables(self, run: RunDirectory, rank: int, environ: Mapping[str, str]) -> Mapping[str, str]:  # noqa: ARG002
        """As every tracker. W&B takes the name of a run from the client. Ranks that each start their own run must not
        share it."""
        name = environ.get(protocol.RUN_ID)
        if name is None or "WANDB_RESUME" in environ:
            return {}
        of_rank = name if rank == 0 else f"{name}-rank{rank}"
        return {"WANDB_RUN_ID": environ.get("WANDB_RUN_ID", of_rank), "WANDB_RESUME": "allow"}

    def open(self, folder: Path, sent: Sent, options: Mapping[str, Any]) -> WandbRun:
        """As every tracker."""
        return WandbRun(folder, sent, options)

    def described(self, folder: Path, sent: Sent) -> str:
        """As every tracker."""
        if sent.mode == "offline":
            return f"offline. Upload it with: wandb sync {shlex.quote(str(folder))}/offline-run-*-{sent.id}"
        return f"run {sent.id}"


TRACKER = WeightsAndBiases()


class WandbRun:
    """Online, W&B's server has the steps that it got. Offline, each attempt writes files into a folder below ``open``,
    which are complete once they are closed. Until then, W&B keeps up to 32 kB in memory. The folder is then moved out.
    One that was not closed is deleted, and its steps are written again."""

    def __init__(self, folder: Path, sent: Sent, options: Mapping[str, Any]) -> None:
        import wandb

        self._folder, self._open = folder, folder / "open"
        if sent.closing is not None:
            self._move_out(sent.closing)
        if exists(self._open):
            delete_folder(self._open)
        create_folder(self._open)
        sent = replace(sent, id=sent.id or secrets.token_hex(4), closing=None)
        write_sent(folder, sent)  # the id, before W&B's server has it
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(**options, id=sent.id, resume="allow", dir=self._open, settings=settings)
        self._offline = self._run.offline
        #: The first step that W&B lacks.
        self.first = sent.step if self._offline else self._run.starting_step
        self._sent = replace(sent, mode="offline" if self._offline else "online")
        write_sent(folder, self._sent)

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Sends the values of a step. ``at``: when they were logged."""
        self._run.log({**values, "_timestamp": at}, step=step)

    def flush(self, step: int | None) -> Sent:
        """Returns what W&B has for certain, which offline is only the content of closed files."""
        if step is not None and not self._offline:
            self._sent = replace(self._sent, step=step)
        return self._sent

    def close(self, step: int, clean: bool) -> Sent:
        """Waits until W&B has all values."""
        written = Path(self._run.dir).parent
        self._run.finish(exit_code=0 if clean else 1)
        self._sent = replace(self._sent, step=step)
        if self._offline:
            fsync_file_system(written)
            write_sent(self._folder, replace(self._sent, closing=written.name))
            self._move_out(written.name)
        return self._sent

    def _move_out(self, name: str) -> None:
        """Moves a complete folder to those that ``status`` lists for upload, unless that was done."""
        written = self._open / "wandb" / name
        if exists(written):
            rename(written, self._folder / name)
            fsync_directory(self._folder)
