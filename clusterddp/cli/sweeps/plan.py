"""What a command has to do for a sweep: the state of each member, and which members are submitted.

The same command again submits what is missing: members that are new, that never started, or that nothing trains any
more. Those that failed or were cancelled are submitted only on request. Members that a job or process holds never
are, nor those that their user has stopped with ``clusterddp tell stop``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.cli.recording import Plant
from clusterddp.cli.submission import check_continues
from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.reporter import counted, show
from clusterddp.rundir.summary import Summary, summarize
from clusterddp.slurm.cause import Cause
from clusterddp.slurm.run_states import RunState, run_states
from clusterddp.supervisor.lease import held_by_other
from clusterddp.sweeps.folder import Record, SweepFolder, read_record
from clusterddp.sweeps.members import Values, text_of

#: The states of members that a command submits unasked, and those that it submits on request (``--retry``).
MISSING = ("new", "missing", "stopped")
RETRIED = ("failed", "cancelled")
#: The state of a member that its user has stopped: no sweep continues it.
STOPPED_BY_USER = Cause.STOP_REQUESTED.value
#: How many members a message names.
_NAMED = 10


@dataclass(frozen=True)
class Sweep:
    """What a user asked for. ``job``: the definition that the members vary. ``plants``: what else is written into the
    run directory of a member that is submitted. ``source``: the file of a launched function. ``retry_option``: how the
    user asks for members in a state."""

    folder: SweepFolder
    job: Job
    members: Mapping[str, Values]
    jobs: Mapping[str, Job]
    retry: Collection[str] = ()
    change: bool = False
    max_running: int | None = None
    plants: Mapping[str, Plant] = field(default_factory=dict)
    source: Path | None = None
    retry_option: str = "--retry {}"


@dataclass(frozen=True)
class Plan:
    """The members by state, and those of earlier definitions that the present one has not."""

    states: Mapping[str, str]
    submit: list[str]
    left: list[str]

    def in_state(self, *states: str) -> list[str]:
        """The members in these states."""
        return [name for name, state in self.states.items() if state in states]


@contextmanager
def planned(sweep: Sweep, settle: Callable[[SweepFolder], None]) -> Iterator[Plan]:
    """Records the sweep and holds its lock, while the body carries out the plan.

    ``settle`` is called with the lock held, and completes what an earlier command left.
    """
    folder = sweep.folder
    folder.check()
    folder.create(sweep.job.share)
    with folder.locked():
        settle(folder)
        plan = make_plan(sweep)
        for name in plan.submit:
            check_continues(folder.member(name), sweep.jobs[name], sweep.change)
        before = read_record(folder.path)
        known = {**before.members, **before.left} if before else {}
        members = {name: {key: text_of(node) for key, node in values.items()} for name, values in sweep.members.items()}
        folder.write(Record(sweep.job, members, {name: known[name] for name in plan.left}))
        yield plan


def make_plan(sweep: Sweep) -> Plan:
    """Reads the folder and decides; writes nothing. RunDirectoryError if the recorded definition differs."""
    before = read_record(sweep.folder.path)
    states = _states(sweep)
    known = {**before.members, **before.left} if before else {}
    kept = [name for name in known if name not in sweep.members and sweep.folder.member(name).exists()]
    if before and (kept or set(states.values()) != {"new"}) and not sweep.change:
        _check_same(sweep, before)
    return Plan(states, [name for name, state in states.items() if state in (*MISSING, *sweep.retry)], kept)


def _check_same(sweep: Sweep, before: Record) -> None:
    if differences := list_differences(before.job, without_secrets(sweep.job)[0]):
        raise RunDirectoryError(
            f"{sweep.folder} was started with another definition: {'; '.join(differences)}. Use the recorded one, add "
            "--change to submit members with the new one, or choose another --run-dir"
        )


def _states(sweep: Sweep) -> dict[str, str]:
    """The state of each member, with one query of the controller: ``new``, ``missing`` (it never started), ``stopped``,
    ``held``, ``unknown``, or the state of its outcome."""
    summaries = {name: summarize(run) for name in sweep.members if (run := sweep.folder.member(name)).exists()}
    seen = run_states(list(summaries.values()))
    found = dict(zip(summaries, map(_state, summaries.values(), seen), strict=True))
    for name, state in found.items():
        if state in sweep.retry and held_by_other(sweep.folder.member(name)):  # its job is just ending
            found[name] = "held"
    return {name: found.get(name, "new") for name in sweep.members}


def _state(summary: Summary, seen: RunState) -> str:
    if seen.word in ("pending", "held", "running"):
        return "held"
    if (seen.word, seen.reason) == ("stopped", STOPPED_BY_USER):
        return STOPPED_BY_USER
    return "missing" if seen.word == "stopped" and not summary.attempts else seen.word


def tell(sweep: Sweep, plan: Plan) -> None:
    """Prints what is known of the members, and names those that need the user."""
    count = {state: len(plan.in_state(state)) for state in _TOLD}
    words = ", ".join(f"{number} {_WORDS.get(state, state)}" for state, number in count.items() if number)
    show(f"{sweep.folder}: {counted(len(plan.states), 'member')}: {words}")
    for state in RETRIED:
        if (names := plan.in_state(state)) and state not in sweep.retry:
            show(f"{state}: {listed(names)}; {sweep.retry_option.format(state)} submits them again")
    if names := plan.in_state(STOPPED_BY_USER):
        show(f"continued only by `clusterddp submit --run-dir`: {listed(names)}")
    if names := plan.in_state("unknown"):
        show(f"not submitted, because `clusterddp status` cannot see their state: {listed(names)}")
    if plan.left:
        show(f"no longer in the sweep, and left as they are: {listed(plan.left)}")


_TOLD = (*MISSING, "held", "completed", *RETRIED, STOPPED_BY_USER, "unknown")
_WORDS = {"missing": "never started", "held": "queued or running"}


def listed(names: Collection[str]) -> str:
    """Names for a message, the first few of them."""
    first, more = list(names)[:_NAMED], len(names) - _NAMED
    return " ".join(first) + (f" and {more} more" if more > 0 else "")
