"""``hydra/launcher=clusterddp``: the members of a Hydra multirun as runs of clusterddp, in a Slurm job array.

Each member is a run of the app itself with its overrides, ``python app.py lr=1 hydra.run.dir=...``, in a run directory
``SWEEP_DIR/runs/NUM``. Its ranks report what the task function returned (``clusterddp/integrations/hydra.py``). Hydra
imports this module for every app, so the modules for submissions are imported only when a multirun begins.
"""

# Without `from __future__ import annotations`: Hydra executes a plugin before the module is in sys.modules, where
# dataclasses would look names up.

import argparse
import copy
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from clusterddp.errors import ClusterddpError, RunFailed, SlurmError, UsageError
from clusterddp.jobdef.job import KEYS
from clusterddp.jobdef.masking import MASK, is_secret
from clusterddp.jobdef.program import hydra_text

if TYPE_CHECKING:
    from clusterddp.jobdef.job import Job
    from clusterddp.rundir.run_directory import RunDirectory
    from clusterddp.runs.sweep_submission import Sweep

#: Keys of a job definition that a multirun sets itself.
_PROGRAM = ("script", "module", "args", "hydra")


@dataclass
class _Options:
    """Options that are not in a job definition."""

    _target_: str = "hydra_plugins.clusterddp_launcher.ClusterddpLauncher"
    #: Whether the multirun waits until all members are over. Otherwise it returns once Slurm has them.
    wait: bool = True
    #: Run the members one at a time on this machine.
    local: bool = False
    #: Maximum number of members that run at a time.
    max_running: Optional[int] = None  # noqa: UP045
    #: ``[failed]``, ``[cancelled]``: with the ``hydra.sweep.dir`` of an earlier multirun, also continue these members.
    retry: list[str] = field(default_factory=list)


_OWN = ("wait", "local", "max_running", "retry")
_KEYS = [key for key in KEYS if key not in _PROGRAM]
_CONFIG: DictConfig = OmegaConf.structured(_Options)
with open_dict(_CONFIG):  # no class has the keys as fields, because one of them is Python's word `continue`
    _CONFIG.update(dict.fromkeys(_KEYS))
ConfigStore.instance().store(group="hydra/launcher", name="clusterddp", provider="clusterddp", node=_CONFIG)


class MemberFailed(RunFailed, CompactHydraException):
    """A member that did not complete. Hydra prints it without a traceback of the launcher."""


class Submitted(JobReturn):
    """A member of a multirun that does not wait. Its status is unknown, and its return value is its handle."""

    @property
    def return_value(self) -> Any:
        """The ``clusterddp.Handle`` of the member."""
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


@dataclass(frozen=True)
class _Member:
    """A member as Hydra sees it. ``overrides``: its own; ``output``: its output folder."""

    number: int
    overrides: Sequence[str]
    config: DictConfig
    output: Path

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return str(self.number)


class ClusterddpLauncher(Launcher):
    """Submits the members of a multirun and, unless ``wait=false``, returns how each ended."""

    def __init__(self, **_: Any) -> None:
        self._members: dict[str, _Member] = {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:  # noqa: ARG002
        """Called by Hydra before ``launch``."""
        self._context, self._config = hydra_context, config
        values = OmegaConf.to_container(config.hydra.launcher, resolve=True)
        assert isinstance(values, dict)
        self._own = {str(key): value for key, value in values.items() if key in _OWN}
        self._keys = {str(key): value for key, value in values.items() if key in _KEYS and value is not None}
        self._folder = Path(str(config.hydra.sweep.dir)).absolute()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submits a batch of members, as one job array where they request the same resources."""
        try:
            return self._launch(job_overrides, initial_job_idx)
        except ClusterddpError as error:
            raise CompactHydraException(f"hydra/launcher=clusterddp: {error}") from error  # without a traceback

    def _launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        self._check()
        batch = [self._member(initial_job_idx + i, overrides) for i, overrides in enumerate(job_overrides)]
        _check_distinct([*self._members.values(), *batch])
        self._members |= {member.name: member for member in batch}
        from clusterddp.api import without_job_variables

        with without_job_variables():
            sweep = self._sweep(batch)
            _check_same(sweep)
            if self._own["local"]:
                self._run_here(sweep)
            else:
                self._submit(sweep)
        return [self._returned(sweep.folder.member(member.name), member) for member in batch]

    # --- the request

    def _check(self) -> None:
        if isinstance(time := self._keys.get("time"), int):  # OmegaConf reads 8:00:00 as 28800, as YAML 1.1 does
            raise UsageError(f"hydra.launcher.time: got the number {time}. Write '8:00:00' in quotes")
        if unknown := set(self._own["retry"]) - {"failed", "cancelled"}:
            raise UsageError(f"hydra.launcher.retry: expected [failed], [cancelled] or both, got {', '.join(unknown)}")
        if (most := self._own["max_running"]) is not None and (most < 1 or self._own["local"]):
            expected = "expected at least 1, without local=true, which runs one member at a time"
            raise UsageError(f"hydra.launcher.max_running={most}: {expected}")
        if self._own["wait"]:
            return
        if self._own["local"]:
            raise UsageError("hydra.launcher.wait=false cannot be combined with hydra.launcher.local=true")
        sweeper = str(self._config.hydra.sweeper.get("_target_"))
        if not sweeper.endswith(".BasicSweeper"):
            raise UsageError(
                f"hydra.launcher.wait=false: {sweeper} chooses its next members by the results of the last ones. "
                "Remove it, or use the basic sweeper (hydra/sweeper=basic)"
            )

    def _member(self, number: int, overrides: Sequence[str]) -> _Member:
        """Composes the configuration of a member, as Hydra's other launchers do."""
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            output = self._folder / str(config.hydra.sweep.subdir)
        finally:
            HydraConfig.instance().cfg = before
        return _Member(number, tuple(overrides), config, output)

    def _sweep(self, batch: Sequence[_Member]) -> "Sweep":
        """These members. Those of earlier batches stay in the same folder, and in its record."""
        from clusterddp.jobdef.yaml12 import Node, Place
        from clusterddp.runs.recording import Content
        from clusterddp.runs.submission import describe
        from clusterddp.runs.sweep_submission import Sweep, SweepFolder

        values = {**self._keys, **_program(), "args": _config_options(sys.argv[1:]), "hydra": True}
        job = describe(None, values, {})
        own = varied({name: member.overrides for name, member in self._members.items()})
        members = {
            one.name: {key: Node(value, value, Place(f"{key}=")) for key, value in own[one.name].items()}
            for one in batch
        }
        jobs = {one.name: replace(job, args=(*job.args, *self._arguments(one))) for one in batch}
        return Sweep(
            SweepFolder(self._folder / "runs"), job, members, jobs, tuple(self._own["retry"]),
            max_running=self._own["max_running"], retry_option="hydra.launcher.retry=[{}]",
            contents={one.name: Content(hydra_output=one.output) for one in batch},
        )  # fmt: skip

    def _arguments(self, member: _Member) -> list[str]:
        """The overrides of a member's own process: those of the multirun's ``hydra`` section, its own, its place."""
        place = {
            "hydra.mode": "RUN",
            "hydra.job.num": member.number,
            "hydra.job.id": member.number,
            "hydra.sweep.dir": hydra_text(str(self._folder)),
            "hydra.run.dir": hydra_text(str(member.output)),
        }
        section = OmegaConf.to_container(self._config.hydra.overrides.hydra)
        assert isinstance(section, list)
        replaced = {*place, *(f"hydra.launcher.{key}" for key in _OWN)}
        return [
            *(
                one
                for one in map(str, section)
                if one.partition("=")[0].lstrip("+") not in replaced and _is_visible(one)
            ),
            *member.overrides,
            *(f"{key}={value}" for key, value in place.items()),
        ]

    # --- starting and waiting

    def _submit(self, sweep: "Sweep") -> None:
        """Submits the members, and waits for them. Slurm may take the rest only once some have ended."""
        from clusterddp.errors import INTERRUPTED
        from clusterddp.reporter import counted, enumerated, show
        from clusterddp.rundir.run_directory import as_typed
        from clusterddp.runs import sweep_submission
        from clusterddp.runs.sweep_submission import planned, tell
        from clusterddp.runs.waiting import wait

        while True:
            with planned(sweep) as plan:
                tell(sweep, replace(plan, left={}))
                done = sweep_submission.submit(sweep, plan)
            if done.job_ids:
                show(f"Submitted {counted(len(done.members), 'member')} as {enumerated('job', done.job_ids)}")
            show(f"See them with: clusterddp list {as_typed(sweep.folder.path)}")
            if not self._own["wait"]:
                if done.refused:
                    raise SlurmError(
                        f"submitted {len(done.members)} of {len(plan.submit)} members before this error: {done.refused}"
                    )
                return
            awaited = {*done.members, *plan.in_state("held", "unknown")}
            if (
                awaited
                and wait([sweep.folder.member(name) for name in sorted(awaited, key=int)], resubmit=True) == INTERRUPTED
            ):
                raise KeyboardInterrupt
            if not done.refused:
                return
            sweep = replace(sweep, retry=())

    def _run_here(self, sweep: "Sweep") -> None:
        from clusterddp.errors import INTERRUPTED
        from clusterddp.runs import sweep_submission
        from clusterddp.runs.submission import check_ranks
        from clusterddp.runs.sweep_submission import planned, tell

        check_ranks(sweep.job, "--local")
        with planned(sweep) as plan:
            tell(sweep, replace(plan, left={}))
        if sweep_submission.run_all(sweep, plan) == INTERRUPTED:
            raise KeyboardInterrupt

    def _returned(self, run: "RunDirectory", member: _Member) -> JobReturn:
        """How a member ended, as Hydra's sweepers read it."""
        from clusterddp.api import Handle
        from clusterddp.reporter import show

        handle = Handle(run.path)
        result = JobReturn() if self._own["wait"] else Submitted()
        result.overrides = [str(one) for one in filter_overrides(member.overrides)]
        result.hydra_cfg = OmegaConf.create({"hydra": member.config.hydra})
        result.cfg = copy.deepcopy(member.config)
        with read_write(result.cfg), open_dict(result.cfg):
            del result.cfg["hydra"]
        result.working_dir, result.task_name = str(member.output), self._config.hydra.job.name
        if not self._own["wait"]:
            result.return_value = handle
            return result
        try:
            result.return_value, result.status = handle.result(), JobStatus.COMPLETED
        except RunFailed as error:
            result.return_value, result.status = MemberFailed(str(error)), JobStatus.FAILED
        if (outcome := run.outcome()) and outcome.unconfirmed:
            show(f"member {member.name}: {outcome.reason}")
        return result


def varied(overrides: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """The values of each member by key, without the overrides that all members have, secrets masked."""
    lists = [set(own) for own in overrides.values()]
    common = set.intersection(*lists) if len(lists) > 1 else set[str]()
    pairs = {name: [one.partition("=") for one in own if one not in common] for name, own in overrides.items()}
    return {name: {key: MASK if is_secret(key) else value for key, _, value in own} for name, own in pairs.items()}


def _is_visible(override: str) -> bool:
    """Whether a member's own command line has it. It has no variables, which may be secrets, and no tables of the
    launcher, which the member's job definition has."""
    return not re.match(r"\+*hydra\.launcher\.(env\b|[^=]*=\{)", override)


def _program() -> dict[str, Any]:
    """The app that this process runs: ``python app.py`` or ``python -m package.app``."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return {"module": spec.name.removesuffix(".__main__")}
    if file := getattr(main, "__file__", None):
        return {"script": str(Path(file).absolute())}
    raise UsageError("hydra/launcher=clusterddp starts the app again for each member. Start it as python APP.py -m ...")


def _config_options(arguments: Sequence[str]) -> list[str]:
    """The options of the app's command line that choose its configuration. The overrides have the rest."""
    parser = argparse.ArgumentParser(add_help=False)
    for short, long in (("-cp", "--config-path"), ("-cn", "--config-name"), ("-cd", "--config-dir")):
        parser.add_argument(short, long)
    given: Mapping[str, str | None] = vars(parser.parse_known_args(arguments)[0])
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def _check_distinct(members: Sequence[_Member]) -> None:
    """Refuses members with the same output folder, or with one among the run directories."""
    known: dict[Path, str] = {}
    for member in members:
        if (other := known.setdefault(member.output, member.name)) != member.name:
            raise UsageError(
                f"members {other} and {member.name} would have the same output folder, {member.output}. Set a "
                "different hydra.sweep.subdir for each, such as ${hydra.job.num}"
            )


def _check_same(sweep: "Sweep") -> None:
    """Refuses an existing member with other overrides. Members are found by their numbers."""
    from clusterddp.jobdef.differences import list_differences
    from clusterddp.jobdef.load import load_resolved
    from clusterddp.jobdef.secrets import without_secrets

    def shown(job: "Job") -> "Job":
        return without_secrets(replace(sweep.job, args=job.args))[0]

    for name, job in sweep.jobs.items():
        run = sweep.folder.member(name)
        if run.exists() and (differences := list_differences(shown(load_resolved(run.job_file)), shown(job))):
            raise UsageError(
                f"{run} is a member with different overrides: {', '.join(differences)}. Choose a different "
                "hydra.sweep.dir, or repeat the earlier multirun to continue it"
            )
