"""The rehearsal of a script: which runs it makes, in which order, and what it concludes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.rehearsal import comparison
from clusterddp.rehearsal.causes import Cause, Finding, Rank
from clusterddp.rehearsal.comparison import Result
from clusterddp.rehearsal.conductor import Baseline, Conductor, Plan
from clusterddp.rehearsal.disturbances import Disturbance, Script
from clusterddp.rehearsal.facts import Loaded
from clusterddp.rehearsal.findings import diagnose
from clusterddp.rehearsal.trial import Start, Stimulus, Trial, Undisturbed
from clusterddp.reporter import counted

#: What torch says on a machine without a GPU.
_NO_GPU = re.compile(
    r"Found no NVIDIA driver|No CUDA GPUs are available|not compiled with CUDA enabled|no GPUs found|"
    r"doesn't have NCCL built in|CUDA is not available|No HIP GPUs are available"
)
#: A disturbed start may take this many times as long as the undisturbed run, and some seconds.
_TIMES_LONGER, _MORE_S = 5.0, 30.0
#: How many of the last lines of a script's output a message shows.
_LINES = 8


@dataclass(frozen=True)
class Tried:
    """One disturbance.

    ``why_not``: why it was not tried. ``with_others``: it passed in one run with others. ``note``: a warning.
    """

    disturbance: Disturbance
    why_not: str | None = None
    with_others: bool = False
    at: str | None = None
    starts: int = 0
    resumed_from: str | None = None
    resumed_step: int | None = None
    repeated_steps: int | None = None
    exit_s: float | None = None
    result: Result | None = None
    note: str | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal. ``unlike``: the step in which two undisturbed runs differ. ``findings``: each once,
    with the disturbances that showed it."""

    script: Script
    tried: Sequence[Tried] = ()
    unlike: int | None = None
    starts: int = 0
    seconds: float = 0.0
    findings: Sequence[tuple[Finding, Sequence[Disturbance]]] = ()

    @property
    def verdict(self) -> str:
        """The rank of the worst finding. Without one, ``not_repeatable``, ``survives`` or ``unfinished``."""
        if self.findings:
            return self.findings[0][0].rank.value
        if self.unlike is not None:
            return "not_repeatable"
        return "survives" if any(one.why_not is None for one in self.tried) else "unfinished"


def rehearse(
    conductor: Conductor,
    wanted: Sequence[Disturbance],
    *,
    ranks: int,
    notice_s: float,
    at: Stimulus | None = None,
    tell: Callable[[str], object],
) -> Rehearsal:
    """Rehearses a script. ``tell`` gets a line for each run. Raises ClusterddpError if it does not run undisturbed."""
    began = time.monotonic()
    undisturbed = _undisturbed(conductor, ranks, tell)
    script = Script.of(undisturbed.start, undisturbed.other.last)
    last = undisturbed.start.steps()[-1]
    baseline = Baseline(undisturbed.one.weights(), last.weights, script.cut)
    if (unlike := comparison.first_unlike(undisturbed.one, undisturbed.other)) is not None:
        tell(f"not repeatable: they differ in step {unlike}, so weights and losses are not compared")
        baseline = Baseline({}, "", script.cut, last.local)
    conductor.limit_s = min(conductor.limit_s, _TIMES_LONGER * undisturbed.start.duration_s + _MORE_S + notice_s)
    run = _Runs(conductor, undisturbed, script, baseline, ranks, notice_s, at, tell)
    tried = run.all(wanted)
    return Rehearsal(script, tried, unlike, conductor.starts, time.monotonic() - began, _collected(tried))


def _undisturbed(conductor: Conductor, ranks: int, tell: Callable[[str], object]) -> Undisturbed:
    trials = []
    for name in ("undisturbed", "undisturbed, again"):
        trial = conductor.run(Plan(ranks))
        _check(trial.last, conductor)
        steps = len(trial.last.steps())
        tell(f"{name}: {counted(steps, 'step')} in {trial.last.duration_s:.1f} s")
        trials.append(trial)
    return Undisturbed(*trials)


def _check(start: Start, conductor: Conductor) -> None:
    """Raises ClusterddpError for a script that cannot be rehearsed."""
    errors = "\n".join(start.output.values())
    if start.timed_out:
        made = counted(len(start.steps()), "step")
        raise ClusterddpError(
            f"the undisturbed run did not end within {conductor.limit_s:.0f} s ({made}). Shorten it with the script's "
            "own arguments after --, allow fewer steps with --steps, or more time with --limit"
        )
    if not start.is_done and not start.is_cut:
        if no_gpu := _NO_GPU.search(errors):
            raise ClusterddpError(
                f"the script needs a GPU ({no_gpu[0]}). Rehearse it in a job on a node with GPUs, or pass it arguments "
                "after -- that choose the CPU and gloo"
            )
        if "EOFError" in errors:
            raise ClusterddpError("the script asks for input. In a job there is none: give the values as arguments")
        if "Permission denied" in errors or "PermissionError" in errors:
            lines = [line for line in errors.splitlines() if "ermission" in line]
            raise ClusterddpError(
                f"the script writes outside its folder: {lines[-1].strip()}. A rehearsal allows that only in a copy of "
                "its folder. Give it another output folder with its own arguments after --"
            )
        codes = ", ".join(f"rank {rank}: {code}" for rank, code in start.codes.items())
        printed = next((text for text in start.output.values() if text.strip()), "")
        lines = re.sub(rf"{re.escape(str(conductor.folder))}/run-\d+/", "./", printed).splitlines()
        own = next((at for at, line in enumerate(lines) if '"./' in line), 0)  # the frames below are ours
        raise ClusterddpError(
            "\n".join([f"the script fails undisturbed (exit codes: {codes})", *lines[own:][-_LINES:]])
        )
    if not start.steps() and (loaded := start.of(Loaded)):
        raise ClusterddpError(
            f"the script loads {Path(loaded[-1].file).name}, which was in its folder before, and then makes no step. "
            "If that is the checkpoint of a finished training, move it elsewhere for the rehearsal"
        )
    if not start.steps():
        raise ClusterddpError(
            "the script makes no step of a torch optimizer on rank 0, so there is nothing to disturb. A rehearsal "
            "needs a script that trains in the process that srun starts, and not in other processes that it starts "
            f"itself, as with torch.multiprocessing.spawn, or with torchrun in a subprocess{_printed(start)}"
        )


def _printed(start: Start) -> str:
    """The last lines that rank 0 has printed, as they may say why it ended."""
    lines = []
    for text in (start.printed, start.output.get(0, "")):
        lines += [line.rstrip() for line in text.splitlines() if line.strip()][-_LINES:]
    return "\n".join([". Rank 0 printed:", *lines]) if lines else ""


@dataclass(frozen=True)
class _Runs:
    """The disturbed runs."""

    conductor: Conductor
    undisturbed: Undisturbed
    script: Script
    baseline: Baseline
    ranks: int
    notice_s: float
    at: Stimulus | None
    tell: Callable[[str], object]

    def all(self, wanted: Sequence[Disturbance]) -> list[Tried]:
        """All wanted disturbances, those that can be tried together in one run first."""
        done: dict[Disturbance, Tried] = {}
        for one in wanted:
            if reason := self.script.why_not(one) or self.conductor.not_tried.get(one):
                done[one] = Tried(one, reason)
            elif one is Disturbance.RANKS and self.ranks == 1:
                done[one] = Tried(one, "there is one rank")
        remaining = [one for one in wanted if one not in done]
        stimuli = self.conductor.together(self.script, remaining, self.notice_s)
        after_others: Tried | None = None
        if len(stimuli) > 2:  # two would save one start, and cost three if there is a difference
            passed, after_others = self._together(stimuli)
            done |= passed
        for one in wanted:
            if one not in done:
                done[one] = self._alone(one)
        if after_others is not None and not any(one.findings for one in done.values()):
            done[after_others.disturbance] = after_others
            (finding, *_) = after_others.findings
            self.tell(f"{after_others.disturbance.value}, after the others: {finding.rank.words}: {finding.detail}")
        return [done[one] for one in wanted]

    def _together(self, planned: Mapping[Disturbance, Stimulus]) -> tuple[dict[Disturbance, Tried], Tried | None]:
        """Those that passed in one run with all of them. If its result is wrong, none, and the last one of that run
        with what is wrong in its result, which may show only after several resumes."""
        disturbances, stimuli = list(planned), list(planned.values())
        trial = self._run(stimuli)
        findings = diagnose(self.undisturbed, trial)
        resumes = comparison.resumes(self.undisturbed.start, trial)
        reached = [start.disturbed for start in trial.starts[: len(stimuli)]]
        passed = not findings and comparison.result_of(self.undisturbed, trial) is Result.SAME
        names = ", ".join(one.value for one, was in zip(disturbances, reached, strict=False) if was)
        if not passed:
            self.tell(
                f"{', '.join(one.value for one in disturbances)}, in one run: a difference, so each is tried alone"
            )
            wrong = [one for one in findings if one.rank is Rank.WRONG_RESULT]
            if not wrong:
                return {}, None
            index = min(len(stimuli), len(trial.starts)) - 1
            last = self._described(disturbances[index], trial, index, resumes[index] if index < len(resumes) else None)
            later = [replace(one, detail=f"{one.detail}. This shows only after several resumes") for one in wrong]
            return {}, replace(last, findings=tuple(later))
        self.tell(f"{names}, in one run: ok")
        found = {}
        for index, (one, was) in enumerate(zip(disturbances, reached, strict=False)):
            if was:
                resume = resumes[index] if index < len(resumes) else None
                found[one] = replace(self._described(one, trial, index, resume), with_others=True)
        return found, None

    def _alone(self, disturbance: Disturbance) -> Tried:
        own = self.at if disturbance is Disturbance.AT else None
        stimuli = [own] if own else self.script.stimuli(disturbance, self.notice_s)
        later = max(1, self.ranks // 2) if disturbance is Disturbance.RANKS else None
        trial = self._run(stimuli, toggle=disturbance is Disturbance.WORKERS, later_ranks=later)
        failed = trial.last.completed is False and not trial.last.is_cut
        if not trial.starts[0].disturbed and not failed:
            tried = Tried(disturbance, "the script did not come to that place again", starts=len(trial.starts))
            self.tell(f"{disturbance.value}: {tried.why_not}")
            return tried
        resumes = comparison.resumes(self.undisturbed.start, trial)
        tried = self._described(disturbance, trial, 0, resumes[0] if resumes else None)
        why_not, findings = None, diagnose(self.undisturbed, trial)
        note = None
        if disturbance is Disturbance.WORKERS:
            # The script does not run like this, so that it is only a warning. Random numbers of samples then come from
            # another process, in any script.
            lost = [one for one in findings if one.rank is not Rank.WRONG_RESULT]
            note, findings = (lost[0].detail if lost else None), []
        if later:
            why_not, findings = _with_other_ranks(self.undisturbed, trial)
        tried = replace(tried, findings=tuple(findings), why_not=why_not, note=note)
        said = f"{findings[0].rank.words}: {findings[0].detail}" if findings else why_not or note or "ok"
        self.tell(f"{disturbance.value}: {said}")
        return tried

    def _run(self, stimuli: Sequence[Stimulus], *, toggle: bool = False, later_ranks: int | None = None) -> Trial:
        return self.conductor.run(Plan(self.ranks, stimuli, self.baseline, toggle, later_ranks))

    def _described(self, disturbance: Disturbance, trial: Trial, index: int, resume: comparison.Resume | None) -> Tried:
        start = trial.starts[index]
        reached = start.reached
        at = None
        if reached is not None:
            steps = reached.number if reached.number is not None else reached.local
            at = f"after {counted(steps, 'step')}" + (f", {reached.where}" if reached.where else "")
        loaded = resume.loaded if resume else None
        return Tried(
            disturbance,
            at=at,
            starts=len(trial.starts),
            resumed_from=loaded.file.rsplit("/", 1)[-1] if loaded else None,
            resumed_step=resume.at if resume else None,
            repeated_steps=resume.repeated if resume else None,
            exit_s=start.exit_s,
            result=comparison.result_of(self.undisturbed, trial),
        )


def _with_other_ranks(undisturbed: Undisturbed, trial: Trial) -> tuple[str | None, list[Finding]]:
    """With another number of ranks only the samples of a step, those of all ranks together, are compared.

    Returns why they are not, and the findings.
    """
    if len(trial.starts) < 2 or not trial.starts[1].steps():
        return None, [one for one in diagnose(undisturbed, trial) if one.cause is Cause.RESTART_FAILS]
    expected, start = undisturbed.start, trial.starts[1]
    made = start.steps()[0]
    if made.number is None or made.number >= len(expected.steps()):
        return "the restart does not continue at a step of the undisturbed run", []
    was, now = _samples(expected, made.number), _samples(start, 0)
    if was != _samples(undisturbed.other.last, made.number):
        return "the samples of a step differ between two undisturbed runs", []
    if not was:
        return "no DataLoader with a map-style dataset was seen", []
    if len(was) != len(now):
        return f"a step takes {len(now)} samples instead of {len(was)}, as the batch of a rank is fixed", []
    if was == now:
        return None, []
    text = f"step {made.number} has other samples on {counted(len(start.facts), 'rank')} than on {len(expected.facts)}"
    return None, [Finding(Cause.ORDER_DEPENDS_ON_RANKS, text)]


def _samples(start: Start, local: int) -> list[int]:
    """The samples of a step of a start, of all ranks."""
    return sorted(
        index for rank in start.facts for made in start.steps(rank)[local : local + 1] for index in made.samples
    )


def _collected(tried: Sequence[Tried]) -> list[tuple[Finding, Sequence[Disturbance]]]:
    """Each cause once, the worst first, with the disturbances that showed it."""
    found: dict[Cause, tuple[Finding, list[Disturbance]]] = {}
    for one in tried:
        for finding in one.findings:
            found.setdefault(finding.cause, (finding, []))[1].append(one.disturbance)
    order = list(Cause)
    return sorted(found.values(), key=lambda one: order.index(one[0].cause))
