"""Messages: one line per event, for `submit --local`, the job's log and `status`, and the box about a failure."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.failures.stacks import different_calls, end_of_log
from clusterddp.jobdef.secrets import masked
from clusterddp.protocol import HANDLER_REPLACED, NO_RANK
from clusterddp.reporter import counted, duration, printable
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.records import is_unconfirmed
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.limits import SAVED_ITSELF, STEPPED
from clusterddp.supervisor.verdict import RankEnd

Event = Mapping[str, Any]
#: The most characters of a reason that a message shows.
LONGEST_REASON = 500
#: What to do about a completion that is not confirmed.
CONFIRM = (
    "If the training is complete, name its mark: `clusterddp submit --run-dir RUN --change --set done=FILE`. If not, "
    "correct what is wrong, and continue with `clusterddp submit --run-dir RUN`"
)
#: What follows most failures.
RESTARTING = "restarting all ranks in place"


def sentence(event: Event) -> str | None:
    """One line for an event; None for events that are only recorded."""
    words = _SENTENCES.get(event["event"])
    try:
        text = words(event) if words else None
    except (KeyError, TypeError, ValueError, AttributeError):  # written by another version of clusterddp
        text = event["event"]
    return f"attempt {event['attempt']}: {printable(text)}" if text else None


def at_step(step: int | None) -> str:
    """`` at step 7``; empty if no step was recorded, as by a script that does not use clusterddp."""
    return "" if step is None else f" at step {step}"


def over_already(run: RunDirectory, outcome: Event) -> str:
    """The message of a command that has nothing to do because the run is over."""
    return f"{run}: already {outcome['state']}{at_step(outcome['step'])}"


def how_it_ended(outcome: Event) -> str:
    """The state of a run that is over, its step, and the reason if that says more than the state."""
    if is_unconfirmed(outcome):
        return f"{outcome['state']}{at_step(outcome['step'])}, {outcome['reason']}"
    reason = f": {outcome['reason']}" if outcome["reason"] != outcome["state"] else ""
    return f"{outcome['state']}{at_step(outcome['step'])}{reason}"


def _completed(event: Event) -> str:
    attempts = f"completed{at_step(event['step'])} after {counted(event['attempts'], 'attempt')}"
    if is_unconfirmed({**event, "state": "completed"}):
        return f"{attempts}, {event['reason']}. {CONFIRM}"
    return f"{attempts}; {event['reason']}" if event["reason"].startswith("done: ") else attempts


def _started(event: Event) -> str:
    who = f"job {event['job']}" if "job" in event else f"process {event['pid']}"
    again = f", restart {event['restarts']}" if event.get("restarts") else ""
    changed = f"; the code changed since the last attempt: {', '.join(event['changed'])}" if event["changed"] else ""
    return f"started ({who} on {event['nodes']}{again}){changed}"


def _initialized(event: Event) -> str:
    sides = (("missing in it", event["missing"]), ("not in the model", event["unexpected"]))
    lists = "".join(f"; {what}: {', '.join(names[:5])}{', ...' * (len(names) > 5)}" for what, names in sides if names)
    return f"{event['part']} starts from {event['file']}{lists}"


def _repeated(event: Event) -> str:
    return f", {counted(event['redone'], 'step')} repeated" if event.get("redone") is not None else ""


def _resumed(event: Event) -> str:
    inexact = f" (not bit-exact: {'; '.join(event['inexact'])})" if event.get("inexact") else ""
    return f"resumed from step {event['step']}{_repeated(event)}{inexact}"


def _own_resume(event: Event) -> str | None:
    """Where a script that loads its own checkpoints continues from."""
    passed = f"; not used: {'; '.join(event['passed_over'])}" if event.get("passed_over") else ""
    if "file" in event:
        words = shlex.join(event["arguments"])
        resumed = "resumed from" if words else "the newest checkpoint of the script is"
        age = duration(event["before_s"])
        return f"{resumed} {event['file']}, written {age} before the stop{f', with {words}' if words else ''}{passed}"
    if event["attempt"] == 0:
        return passed.removeprefix("; ")
    start = ": starts from the beginning" if event["from_start"] else ""
    return f"no complete checkpoint matches {' or '.join(event['patterns'])}{start}{passed}"


def added_arguments(run: RunDirectory, events: Iterable[Event], attempt: int) -> str:
    """What ``resume`` added to the arguments of an attempt that failed before it made progress; empty otherwise."""
    own = [event for event in events if event["attempt"] == attempt]
    resumed = next((event for event in own if event["event"] == "own_resume"), None)
    if resumed is None or any(event["event"] in _PROGRESS for event in own):
        return ""
    if not resumed.get("arguments"):
        return "" if "file" in resumed else "`resume` added no arguments: there was no complete checkpoint"
    there = "exists" if (run.path / resumed["file"]).exists() else "does not exist"
    return f"arguments added for {resumed['file']}, which {there}: {shlex.join(resumed['arguments'])}"


#: Events of an attempt that has begun to train, or saved.
_PROGRESS = (*STEPPED, *SAVED_ITSELF)


def _ended(event: Event, then: str) -> str:
    """Why an attempt ended, what was saved, what was not, and what happens next."""
    reason, step, checkpoint = event["reason"].rstrip("."), event.get("step"), event.get("checkpoint")
    clause = not re.search("[.,:;]", reason)  # such as ``preempted``; a failure's is a sentence, or several
    facts = [f"at step {step}"] if step else []
    if clause and facts:
        reason = f"{reason} {facts.pop()}"
    if "file" in event and checkpoint is None:
        facts.append(f"newest checkpoint {event['file']}")
    elif step is None:
        facts.append(f"at least {counted(event['made'], 'step')} made" if "made" in event else "no steps recorded")
    elif step == 0:
        facts.append("nothing new to save")
    elif checkpoint is None:
        facts.append("no checkpoint committed")
    else:
        repeated = f" ({counted(step - checkpoint, 'step')} will be repeated)" if step > checkpoint else ""
        facts.append(f"checkpoint {checkpoint} committed{repeated}")
    rest = ", ".join([*facts, then])
    return f"{reason}, {rest}" if clause else f"{reason}. {rest[0].upper()}{rest[1:]}"


def _requested(event: Event) -> str:
    if event["request"] == "profile":
        who = "rank" if event["ranks"].isdecimal() else "ranks"
        return f"requested by `clusterddp tell profile={event['steps']}`: a profile of {who} {event['ranks']}"
    if event["request"] == "skip":
        return f"requested by `clusterddp tell skip={event['batches']}`: all ranks skip batches, and save"
    command = "requeue" if event["request"] == "requeue" else f"tell {event['request']}"
    without = f", without {', '.join(event['nodes'])}" if event.get("nodes") else ""
    return f"requested by `clusterddp {command}`: {_REQUESTS.get(event['request'], event['request'])}{without}"


def _times(numbers: Sequence[int]) -> str:
    return f"{' and '.join(map(str, numbers))} {'time' if numbers == [1] else 'times'}"


def _node_lost(event: Event) -> str:
    if ranks := event.get("unkillable"):
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        return f"node {event['node']} lost: {who} did not exit after SIGKILL"
    return f"node {event['node']} lost: it no longer responds"


def _failed(event: Event) -> str:
    reason = event["reason"]
    shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."
    return f"failed{at_step(event['step'])}: {shown}"


def _not_finite(event: Event) -> str:
    """Names the first metric, and counts the others."""
    (name, value), *others = event["metrics"].items()
    more = max(len(others), event["count"] - 1)
    also = f", and {counted(more, 'other metric')} became NaN or infinite" if more else ""
    return f"{name} became {value} at step {event['step']}{also}; training continues"


def _left_loop(event: Event) -> str:
    """Only a script that left it on purpose needs the advice; an older event does not say."""
    ways = {"break": "break or return", "exception": "an exception or close()"}
    by = ways.get(event.get("by", ""), "break or an exception")
    advice = "" if event.get("by") == "exception" else "; to end a run early, call run.finish(), which saves"
    return (
        f"the script left its loop by {by} after step {event['step']} of {event['steps']}: steps since the newest "
        f"checkpoint are not saved{advice}"
    )


_REQUESTS = {
    "save": "a checkpoint at the next step boundary",
    "stop": "all ranks save and stop, and the run is held",
    "requeue": "all ranks save and stop, and the run is requeued",
}
_SENTENCES: Mapping[str, Callable[[Event], str | None]] = {
    "submitted": lambda e: f"submitted as job {e['job']}",
    "started": _started,
    "forked": lambda e: f"starts from checkpoint {e['step']} of {e['source']}",
    "initialized": _initialized,
    "training": lambda e: f"rank 0 prints steps from {e['log']} on{_repeated(e)}" if "log" in e else None,
    "resumed": _resumed,
    "own_resume": _own_resume,
    "no_match": lambda e: (
        f"the script has saved {e['file']}, but no file matches {' or '.join(e['patterns'])} so far: check "
        "`resume.checkpoint`"
    ),
    "preflight": lambda e: "; ".join([f"all nodes passed the preflight in {e['seconds']:.1f} s", *e["warnings"]]),
    "order_changed": lambda e: f"the weights of the mixture from now on: {e['now']}; they were: {e['was']}",
    "whole_batches": lambda e: (
        f"each rank takes {e['samples']} samples at once, more than its batch_size of {e['most']}: "
        "the script does not call run.micro()"
    ),
    "waits_for_data": lambda e: f"rank 0 waited for data in {e['percent']}% of the last steps' time: {e['advice']}",
    "skipped": lambda e: (
        f"{counted(e['batches'], 'batch', 'batches')} skipped: step {e['step']} takes global batch {e['batch']}"
        + (f"; that is more than an epoch, which has {counted(e['epoch_steps'], 'step')}" if "epoch_steps" in e else "")
    ),
    "profiled": lambda e: (
        f"rank {e['rank']} recorded a profile of {counted(e['steps'], 'step')} from step {e['step']}: {e['file']}"
    ),
    "not_profiled": lambda e: f"rank {e['rank']}: no profile: {e['reason']}",
    "tracker": lambda e: f"{e['tracker']} {e['problem']}",
    "media_left_out": lambda e: (
        f"run.log_media: the {e['kind']} {e['name']!r} of step {e['step']} was not written, and others may follow: "
        f"{e['reason']}"
    ),
    "diverged": lambda e: str(e["explanation"]),
    "uneven_calls": lambda e: str(e["explanation"]),
    "shapes_changed": lambda e: str(e["explanation"]),
    "per_rank_grows": lambda e: (
        f"the per-rank state of all ranks ({', '.join(e['names'])}) takes {e['bytes'] / 1e6:,.0f} MB, more than half "
        f"of the {e['limit'] / 1e6:,.0f} MB that a checkpoint holds; beyond that the run fails: save less of it"
    ),
    "left_loop": _left_loop,
    "saved": lambda e: (
        f"the script saved {e['file']}" + (f", {counted(e['items'], 'item')} into its epoch" if "items" in e else "")
    ),
    "not_read": lambda e: (
        f"the script made its first step without opening {e['file']}, which it saved at its last stop: it may have "
        "started from an older checkpoint, or from the beginning"
    ),
    "no_rank": lambda _: NO_RANK,
    "apart": lambda e: (
        f"the script's process group has {counted(e['group'], 'rank')}, but the run has {e['ranks']}: each group "
        "trains a separate model"
        if e["group"] > 1
        else f"rank 0 trains alone, though the run has {e['ranks']} ranks: it is in no process group with them"
    ),
    "no_best": lambda e: (
        f"no best checkpoint: the script has never logged {e['metric']!r}, only {', '.join(e['logged']) or 'nothing'}"
    ),
    "overdue": lambda e: (
        f"the step did not end within {e['seconds']:.0f} s of the notice"
        f"{f' ({behind})' if (behind := e.get('behind')) else ''}: exiting with the newest checkpoint; "
        "rank 0's log has its stacks"
    ),
    "stopping": lambda e: f"stop requested ({e['reason']}): all ranks stop after step {e['step']}",
    "room_made": lambda e: (
        f"the disk is full: deleted checkpoint{'s' * (len(e['deleted']) > 1)} {', '.join(map(str, e['deleted']))} "
        f"to make room for {e['step']}"
    ),
    "checkpoint_failed": lambda e: f"checkpoint {e['step']} was not saved: {e['reason']}; training continues",
    "checkpoint_damaged": lambda e: f"{e['reason']}; skipped",
    "interval": lambda e: (
        f"saving every {e['seconds']:.0f} s: a save blocks training for {1000 * e['stall_s']:.0f} ms, and this run is "
        f"interrupted every {e['between_s'] / 3600:.1f} hours on average"
    ),
    "not_finite": _not_finite,
    "controller_away": lambda e: f"Slurm controller unreachable, training continues: {e['error']}",
    "controller_missing": lambda e: (
        f"{e['error']}: the ranks stop only when they are signalled, and the cause of a stop cannot be determined"
    ),
    "handler_replaced": lambda e: HANDLER_REPLACED.format(**e),
    "controller_back": lambda _: "Slurm controller reachable again",
    "notice": lambda e: f"{e['why']}: telling the ranks to stop",
    "requested": _requested,
    "stopped": lambda e: _ended(e, e.get("then", "stopped")),
    "restarted": lambda e: _ended(e, RESTARTING),
    "requeued": lambda e: _ended(e, "requeued"),
    "requeue_refused": lambda e: f"requeue refused ({e['error']}), resubmitting",
    "resubmitted": lambda e: _ended(e, f"resubmitted as job {e['job']}"),
    "hung": lambda e: f"{e['what']}; terminating all ranks",
    "slow": lambda e: (
        f"rank {e['rank']} ({e['host']}) is slow: {e['own_s']:.3g} s of compute per step, {e['ratio']:.1f} times the "
        "others' median; they wait for it"
    ),
    "rank_failed": lambda e: f"rank {e['rank']} ({e['host']}) failed first{at_step(e.get('step'))}: {e['error']}",
    "rejoined": lambda e: f"rank {e['rank']} ({e['host']}) lost its connection to the supervisor and reconnected",
    "node_lost": _node_lost,
    "excluded": lambda e: (
        f"{' and '.join(e['nodes'])} failed this run {_times(e['failures'])}: excluded from its jobs for 24 hours"
    ),
    "not_excluded": lambda e: f"no further node is excluded: {e['reason']}",
    "failed": _failed,
    "cancelled": lambda e: f"cancelled{at_step(e['step'])}; it will not run again",
    "completed": _completed,
}


#: The most other ranks that a box lists.
MOST_OTHERS = 8
#: How many bytes at the end of a rank's log are searched for a stack.
_LOG_BYTES = 1 << 20


def failure_box(
    run: RunDirectory,
    attempt: int,
    failure: RankEnd,
    others: Sequence[RankEnd],
    step: int | None,
    now: float,
    secrets: Sequence[str] = (),
    then: Sequence[str] = (),
) -> str:
    """The first failure in a box: rank, host, time, its traceback or the end of its log, and the failures it caused.

    ``step``: the number of completed steps, if known. ``secrets``: values to mask in the log. ``then``: further lines.
    """
    logs = [run.attempt_logs(attempt) / f"rank-{failure.rank}.{kind}" for kind in ("err", "out")]
    log = next((log for log in logs if end_of_file(log).strip()), logs[0])  # some programs report errors on stdout
    body = failure.traceback or end_of_log(masked(end_of_file(log), secrets))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(failure.lost_at, now)))
    lines = [failure.sentence(), f"attempt {attempt}{at_step(step)}, {when}", "", *body.rstrip().splitlines(), ""]
    lines += [*_who_waited(failure, others), *_different_calls(failure, others, body)]
    lines += [f"likely cause: {failure.known.cause}"] if failure.known is not None else []
    lines += [f"log: {log}", *filter(None, then), *_other_ends(failure, others)]
    wrapped = [
        piece for line in lines for piece in (textwrap.wrap(printable(line), 116, drop_whitespace=False) or [""])
    ]
    rule = "-" * 118
    return "\n".join([f"+{rule}", *(f"| {line}" for line in wrapped), f"+{rule}"])


def end_of_file(log: Path) -> str:
    """The last MiB of a log; empty if it cannot be read."""
    try:
        with open_binary(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _who_waited(failure: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """The traceback of a rank that waited for one that exited early, which has none of its own."""
    exited = failure.end in ("early", "unfinished")
    waiting = next((end for end in others if end.traceback), None) if exited else None
    return [f"rank {waiting.rank} waited for it:", *waiting.traceback.splitlines(), ""] if waiting else []


def _different_calls(failure: RankEnd, others: Sequence[RankEnd], body: str) -> list[str]:
    """Where the ranks were, if they were in different collectives."""
    texts = {failure.rank: body, **{end.rank: end.traceback for end in others}}
    said = different_calls(f"{failure.error}\n{body}", texts)
    return [said, ""] if said else []


def _other_ends(failure: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """How the other ranks ended, independent failures first."""
    ordered = sorted(others, key=lambda end: (not end.own, end.rank))
    lines = [_other_end(end, failure) for end in ordered[:MOST_OTHERS]]
    if len(ordered) > MOST_OTHERS:
        lines.append(f"as a result: {counted(len(ordered) - MOST_OTHERS, 'more rank')}")
    return ["", *lines] if lines else []


def _other_end(end: RankEnd, failure: RankEnd) -> str:
    """How another rank ended; the launcher kills the peers of a failed rank."""
    if end.own:
        return f"also failed: {end.sentence()}"
    if not end.ended_by_us:
        return f"as a result: {end.sentence()}"
    hung, exited = failure.end.startswith("hung"), failure.end in ("early", "unfinished")
    what = "hung" if hung else "exited" if exited else "failed"
    return f"as a result: rank {end.rank} ({end.host}) ended by clusterddp after rank {failure.rank} {what}"
