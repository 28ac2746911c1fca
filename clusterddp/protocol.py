"""What the processes of a run say to each other: events, messages of the control channel, environment variables.

Readers ignore events and fields that they do not know, and accept missing ones: a run's history and ranks may be of an
older or a newer version. Exit codes are in errors.py. docs/reference/protocol.md is generated from this module, and a
test compares it with what the code writes and reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# --- events: the lines of events.jsonl, each with "time", "attempt" and "event" besides


class Event(NamedTuple):
    """An event's fields (``step? reason``: "step" may be missing), and what it says."""

    fields: str
    meaning: str


#: Reported by ranks over the control channel. The supervisor writes them into the history, and adds "rank".
RANK_EVENTS: Mapping[str, Event] = {
    "rejoined": Event("host pid address", "the rank lost its connection to the supervisor and reconnected"),
    "preflight": Event("seconds warnings", "the nodes have passed the checks of `preflight: true`"),
    "progress": Event("step steps", "a loop to `steps` begins, or has just ended, at `step`"),
    "initialized": Event("part file missing unexpected", "a part starts from a file: `ctx.run(init_from=...)`"),
    "training": Event(
        "step redone? log?",
        "the attempt starts from step 0, or from the one before `log`, the first in rank 0's output",
    ),
    "steps_seen": Event(
        "out? err?",
        "rank 0 has made its first step in a script without clusterddp; its number is unknown; `out` and `err`: the "
        "size of the files with its output, in bytes",
    ),
    "apart": Event("ranks group", "rank 0 has made its first step in a process group of `group` ranks, or without one"),
    "resumed": Event("step parent inexact redone?", "the attempt resumes from checkpoint `step` of attempt `parent`"),
    "order_changed": Event("step was now", "the resumed run's order has other weights in steps to come"),
    "whole_batches": Event("step samples most", "more samples per rank than batch_size, without `run.micro()`"),
    "waits_for_data": Event("step percent advice", "rank 0 waits for batches in `percent` % of its time; said once"),
    "interval": Event("step seconds stall_s between_s", "`every: auto` chose a new interval between checkpoints"),
    "checkpoint": Event(
        "step blocked_s durable_s bytes best?", "a checkpoint is committed; `best`: the metric in which it is the best"
    ),
    "device_memory": Event("bytes", "the most GPU memory that rank 0's allocator has reserved, after its first step"),
    "room_made": Event("step deleted", "the disk was full; the older checkpoints `deleted` made room for `step`"),
    "checkpoint_failed": Event("step reason", "a checkpoint was not saved; training continues"),
    "checkpoint_damaged": Event("step reason", "a checkpoint cannot be read; the previous one is tried"),
    "not_finite": Event("step metrics count", "metrics became NaN or infinite"),
    "tracker": Event("tracker problem", "TensorBoard, W&B or MLflow does not get all values; training continues"),
    "media_left_out": Event("step kind name reason", "an image, histogram or text was not written; said once"),
    "uneven_calls": Event("step explanation", "some ranks call `run.every()` more often than others; said once"),
    "shapes_changed": Event("step explanation", "torch.compile has seen changing shapes; said once"),
    "per_rank_grows": Event(
        "step names bytes limit", "the per-rank state takes more than half of what a checkpoint holds; said once"
    ),
    "diverged": Event("step parts explanation", "the state differs between ranks"),
    "handler_replaced": Event("signal handler", "the script replaced a signal handler of clusterddp"),
    "signal": Event("signal", "a stop signal reached the rank"),
    "notified": Event("reason", "the supervisor's request to stop reached the rank"),
    "overdue": Event(
        "seconds behind?", "no rank's step ended within `seconds` of the notice; rank 0 exits; `behind`: the late ranks"
    ),
    "saved": Event(
        "file items? written?",
        "the script has saved its state in `file` and called `requeue(saved=file)`; with `clusterddp.continue_epoch()` "
        "also how many `items` of its epoch it had trained on, and when the file was `written`",
    ),
    "not_read": Event("file", "the script has made its first step without opening `file`, saved at its last stop"),
    "stopping": Event("step reason", "all ranks stop after `step`"),
    "finishing": Event("step", "all steps are done; the last checkpoint is being saved"),
    "left_loop": Event("step steps by?", "the script left its loop, by a `break` or an `exception`"),
    "phase": Event("phase", "rank 0 has begun another phase, one of PHASES"),
    "evaluated": Event("seconds", "rank 0 has spent `seconds` in evaluations since the last such event"),
    "no_best": Event("metric logged", "all steps are done, and the metric of the best checkpoint was never logged"),
    "result": Event("step *", "`run.log()` outside a step"),
    "skipped": Event(
        "step batches batch request? epoch_steps?",
        "`batches` global batches are skipped, so that `step` takes global batch `batch`; `epoch_steps`: those of an "
        "epoch, if more than these are skipped",
    ),
    "profiling": Event("step steps request?", "the rank records a profile of `steps` steps from `step` on"),
    "profiled": Event("step steps file request?", "the rank has stored a profile of `steps` steps in `file`"),
    "not_profiled": Event("reason request?", "the rank did not record or store a profile"),
}

#: What rank 0 can be doing outside of saves: ``report/booking.py`` books the time by it.
PHASES: Mapping[str, str] = {
    "importing": "the script's imports, and all else that it does before its loop, such as building the model",
    "rendezvous": "clusterddp.init() waits for all ranks",
    "restoring": "ctx.run() checks its parts and restores the newest checkpoint",
    "first_step": "the first step of the attempt: compilation, the first collectives, the first batch",
    "repeating": "steps that an earlier attempt made, but did not save",
    "training": "steps",
    "after_loop": "what the script does after its loop, other than evaluations",
    "ending": "the script has ended",
}

#: How an attempt can end so that the run continues, now or later.
_ENDS: Mapping[str, Event] = {
    "restarted": Event("reason cause step checkpoint file? made?", "the ranks are restarted in place"),
    "requeued": Event("reason cause step checkpoint file? made? window_s", "the job is requeued"),
    "resubmitted": Event("reason cause step checkpoint file? made? job", "the run continues as job `job`"),
    "stopped": Event(
        "reason cause step checkpoint file? made? then?",
        "the run can be continued; `file`: the script's own checkpoint; `made`: so many steps of the attempt, at least",
    ),
}

#: ``then`` of an attempt that is ``stopped`` while Slurm is requeueing its job by itself.
BY_SLURM = "requeued by Slurm"

#: How a run can end; also the "state" in outcome.json.
RUN_ENDS: Mapping[str, Event] = {
    "completed": Event(
        "step attempts reason confirmed?",
        "all ranks finished; `confirmed` is false if that is doubtful: a restarted script may have exited with code 0 "
        "without training",
    ),
    "failed": Event("step attempts reason", "the run failed"),
    "cancelled": Event("step attempts reason", "the run was cancelled"),
}

#: After these an attempt has no ranks.
ATTEMPT_ENDS: Mapping[str, Event] = {**_ENDS, **RUN_ENDS}

#: Events of an attempt that never started its ranks. Any other event shows that it did, even if `started` is missing.
WITHOUT_RANKS = frozenset(("submitted", "forked", "completed", "failed", "cancelled"))

EVENTS: Mapping[str, Event] = {
    "forked": Event("step source", "`submit --fork` copied checkpoint `step` of the run `source`"),
    "submitted": Event("job submitted", "when the job was submitted"),
    "started": Event("job? restarts? pid? nodes ranks code changed seen?", "the ranks are being started"),
    "allocated": Event(
        "submitted? eligible? begun limit?",
        "when the job was queued, could start, and got its nodes; of a task of an array, how many may run at a time",
    ),
    **RANK_EVENTS,
    "slow": Event("rank host own_s ratio", "a straggler"),
    "kept_up": Event("rank host", "a rank that was slow is not slow any more"),
    "hung": Event(
        "rank late host step? seconds what stalled_s? suspect?",
        "a hang: all ranks are being ended; `suspect`: the node whose GPU hung",
    ),
    "notice": Event("why", "the supervisor asks the ranks to stop"),
    "requested": Event(
        "request nodes? steps? ranks? batches?",
        "the user asked for `request`; the next jobs exclude `nodes` for a day; a profile is of `steps` on `ranks`; "
        "`batches` are to be skipped",
    ),
    "own_resume": Event(
        "file? written? before_s? arguments? passed_over? patterns? from_start?",
        "the attempt continues from the script's own checkpoint `file`, with these arguments; without `file`: none of "
        "`patterns` matches a complete one",
    ),
    "own_checkpoint": Event("file written", "the script has written a complete checkpoint in its own format"),
    "no_match": Event("file patterns", "the script has saved `file`, and no file matches `patterns`"),
    "no_rank": Event("", "a process that a rank has started calls `clusterddp.stop_requested()`, which is False there"),
    "controller_away": Event("error", "Slurm's controller is unreachable; training continues"),
    "controller_back": Event("", "Slurm's controller answers again"),
    "controller_missing": Event("error", "Slurm's commands are not installed here"),
    "node_lost": Event("node suspect unkillable?", "a node does not answer, or these ranks outlived a KILL"),
    "rank_failed": Event(
        "rank host error step? suspect? since? raised? lacks_gpus?",
        "the first failure of the attempt; `raised`: its exception, line and step; `lacks_gpus`: the node has too few",
    ),
    "excluded": Event("nodes failures", "nodes that the next jobs exclude, for a day"),
    "not_excluded": Event("reason", "a failed node is not excluded"),
    "requeue_refused": Event("error", "Slurm refused the requeue; the run is resubmitted"),
    **ATTEMPT_ENDS,
}

#: The sentence of an event that both the rank and the supervisor print.
HANDLER_REPLACED = (
    "the script replaced the {signal} handler of clusterddp.init() with {handler}: if it exits or raises when {signal} "
    "arrives, steps since the last checkpoint are repeated; remove it, as clusterddp saves and stops the run on its own"
)

#: The same, of a process that a rank has started and the supervisor.
NO_RANK = (
    "clusterddp.stop_requested() is always False in a process that a rank has started: have clusterddp start a rank "
    "per GPU (--gpus), instead of starting processes in the script (torch.multiprocessing.spawn)"
)

#: What the hook of a job definition is told.
HOOK_EVENTS: Mapping[str, str] = {
    "preempted": "the job is being preempted, and the run continues: it is requeued or resubmitted",
    "resumed": "an attempt continues from a checkpoint",
    "stopped": "nothing trains the run until someone continues it",
    "completed": "all ranks finished",
    "failed": "the run failed",
    "cancelled": "the run was cancelled while an attempt ran",
}

# --- the control channel: one JSON object per line

#: How the name of a folder begins in which a rank writes a script's own save, beside the file that it replaces.
SAVING = ".clusterddp-save-"

#: What a device does, in a heartbeat: the rank's own work, a wait for other ranks, or nothing, as the host gave it
#: nothing else to do.
OWN, WAIT, IDLE = "own", "wait", "idle"

#: A rank's first message, and the supervisor's answer once rank 0 has joined: where rank 0's store is, whether it is
#: open, and how many of this rank's events it has.
HELLO, ANSWER, REFUSAL = "token rank port host pid process", "host port open known term_notice_s?", "refused"
#: Then the rank sends events, and the supervisor may send an order with its reason.
ORDERS: Mapping[str, str] = {
    "connect": "rank 0's store accepts connections",
    "stop": "stop at a step boundary",
    "flight_record": "write torch's flight record of the last collectives",
    "stacks": "answer with the stacks of all threads; the text is the request's number",
    "save": "rank 0: save at the next step boundary; the text is the request's number",
    "profile": "record a profile from the next step on; the text is the request's number and how many steps",
    "skip": "rank 0: have all ranks skip batches; the text is the request's number and how many batches",
    "leave": "exit now",
}
#: Events that are not written into the history.
CHANNEL_EVENTS: Mapping[str, Event] = {
    "joined": Event("host pid address", "made by the supervisor from a rank's first message"),
    "serving": Event("", "rank 0's store accepts connections"),
    "alive": Event(
        "count step age_s allowed_s own_s? step_s? timing? timing_age_s? histograms? made? place? waits? line? "
        "still_s? device? collectives? stood_s?",
        "the rank's heartbeat; `timing`: the steps timed `timing_age_s` ago, and the seconds of each phase in them; "
        "`made`: `step` is not that of the run, but counted from the attempt's beginning; "
        "after a timeout, `device`: its step, what it does there and for how many seconds, and `collectives`: of each "
        "process group, the number of the last complete one, of the last one, and which one is not complete; "
        "`stood_s`: for how long the rank was stopped since its last heartbeat",
    ),
    "wrote": Event("file", "the script's first save in this folder of a file with such a suffix"),
    "stacks": Event("request place threads", "a rank's stacks, for a request"),
    "saving": Event("request step? committed?", "rank 0 will save; without `step` it has no run to save"),
    "will_profile": Event("request refused?", "the rank will record a profile, or `refused` says why not"),
    "will_skip": Event("request refused?", "rank 0 has asked all ranks to skip batches, or `refused` says why not"),
    "left": Event(
        "rank host started ended? end error? traceback? step? reason? exit_code? left_loop? alone? read_saved? "
        "used_clusterddp?",
        "how the rank ended; its last message; `read_saved`: it made no step, but opened the file that the script had "
        "named in `requeue(saved=...)` at its last stop",
    ),
}

#: A user's request, the first and only message of a connection: the token, the kind of request and its values. The
#: supervisor answers with any number of `news`, and one of the others as the last.
REQUEST = "token request values"
REQUESTS: Mapping[str, Event] = {
    "stacks": Event("ranks", "the stacks of these ranks' threads, such as 0,3-5; null: of all ranks"),
    "save": Event("", "save at the next step boundary"),
    "profile": Event("steps ranks", "record a profile of so many steps on these ranks, such as 0,3-5"),
    "skip": Event("batches", "skip so many global batches from a step boundary on, and save"),
    "stop": Event("", "save, stop, and hold the run until it is submitted again"),
    "requeue": Event("nodes?", "save, stop, and continue in the queue; in a job without `nodes`, if they are given"),
    "child": Event("", "of a process that a rank has started: it has called `stop_requested()`; there is no answer"),
}
ANSWERS: Mapping[str, Event] = {
    "news": Event("news", "a sentence for the user who waits"),
    "refused": Event("refused", "why nothing was done"),
    "stacks": Event(
        "stacks unanswered starting exited hosts", "ranks with equal stacks together, and ranks without an answer"
    ),
    "profiles": Event(
        "profiles ended? request?",
        "each rank's `profiled` or `not_profiled`; once all ranks have exited (`ended`), those that came before, and "
        "the request's number in the history",
    ),
    "checkpoint": Event(
        "checkpoint skipped?", "the step of the checkpoint that is committed; `skipped`: of the event that it contains"
    ),
    "ended": Event("ended request?", "all ranks have exited; the history will tell how the attempt ended"),
}

# --- environment variables


class Variable(str):
    """The name of an environment variable. ``meaning``: who sets it, who reads it, what it holds."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Variable:
        variable = super().__new__(cls, name)
        variable.meaning = meaning
        return variable


RUN_DIR = Variable("CLUSTERDDP_RUN_DIR", "supervisor to ranks and scripts: the run directory")
ATTEMPT = Variable("CLUSTERDDP_ATTEMPT", "supervisor to ranks and scripts: the attempt's number")
DEVICE = Variable("CLUSTERDDP_DEVICE", "supervisor to ranks and scripts: cpu or cuda")
LAUNCHER = Variable("CLUSTERDDP_LAUNCHER", "supervisor to ranks: slurm or local; user to ranks: torchrun")
SUPERVISOR = Variable("CLUSTERDDP_SUPERVISOR", "supervisor to ranks: HOST:PORT of the control channel")
TOKEN = Variable("CLUSTERDDP_TOKEN", "supervisor to ranks: the attempt's secret for the control channel")
USR2_NOTICE_S = Variable("CLUSTERDDP_USR2_NOTICE_S", "supervisor to ranks: seconds from USR2 to the time limit")
PREFLIGHT = Variable("CLUSTERDDP_PREFLIGHT", "supervisor to ranks: on if the nodes are checked before training")
PROFILE = Variable("CLUSTERDDP_PROFILE", "supervisor to ranks: on if the job's `profile` is not recorded yet")
HYDRA = Variable(
    "CLUSTERDDP_HYDRA", "supervisor to ranks: when the run began, in unix seconds, for a Hydra app; else empty"
)
CHECK_RESUME = Variable(
    "CLUSTERDDP_CHECK_RESUME",
    "submit --check-resume to ranks: STEPS:FOLDER, when to stop and where to record steps",
)
WATCHDOG = Variable("CLUSTERDDP_WATCHDOG", "supervisor to ranks: on or off")
PROTECT_SAVES = Variable("CLUSTERDDP_PROTECT_SAVES", "supervisor to ranks: off if the script's saves are left alone")
SEE_STEPS = Variable("CLUSTERDDP_SEE_STEPS", "supervisor to ranks: off if torch's optimizer steps are not counted")
DEVICE_MEMORY = Variable(
    "CLUSTERDDP_DEVICE_MEMORY", "supervisor to ranks: bytes that an earlier attempt used on each GPU, if known"
)
DEBUG_RANK = Variable("CLUSTERDDP_DEBUG_RANK", "supervisor to ranks: the rank whose breakpoint() has a terminal")
SAVED = Variable(
    "CLUSTERDDP_SAVED",
    "supervisor to ranks: the file that the script named in `requeue(saved=...)` in the last attempt",
)
SAVED_ITEMS = Variable(
    "CLUSTERDDP_SAVED_ITEMS",
    "supervisor to ranks: the items of its epoch that the script had trained on when it saved that file",
)
TERM_NOTICE_S = Variable(
    "CLUSTERDDP_TERM_NOTICE_S", "rank's entry point to clusterddp.init(): seconds from TERM to KILL, if known"
)
CHECKPOINT = Variable(
    "CLUSTERDDP_CHECKPOINT",
    "supervisor to ranks and scripts: the script's own checkpoint that the attempt continues from",
)
PLACEHOLDERS = Variable(
    "CLUSTERDDP_PLACEHOLDERS", "supervisor to ranks: the variables whose placeholders each rank fills in"
)
CODE = Variable("CLUSTERDDP_CODE", "supervisor to ranks and scripts: the snapshot of the code, if the run uses one")
CHECKOUT = Variable("CLUSTERDDP_CHECKOUT", "supervisor to ranks and scripts: the repository that it is a copy of")
FIRST_JOB = Variable(
    "CLUSTERDDP_FIRST_JOB",
    "supervisor to ranks and scripts: the run's first Slurm job; the run's name if it began locally",
)
SUBMITIT = Variable(
    "CLUSTERDDP_SUBMITIT", "user to submitit: 1 has AutoExecutor submit with clusterddp, local start the ranks here"
)
WANDB_NAME = Variable(
    "CLUSTERDDP_WANDB_NAME", "supervisor to ranks: the id of the W&B run that the script itself starts"
)
MLFLOW = Variable("CLUSTERDDP_MLFLOW", "supervisor to ranks: on if the script's own MLflow run continues")
RUNS = Variable("CLUSTERDDP_RUNS", "user to submit and launch(): the folder for new run directories, instead of ./runs")
SITE_CONFIG = Variable(
    "CLUSTERDDP_SITE_CONFIG", "site to submit and launch(): its profile, instead of /etc/clusterddp/config.yaml"
)
STOP_SIGNAL = Variable(
    "CLUSTERDDP_STOP_SIGNAL",
    "supervisor to ranks: the signal that a script which does not use clusterddp gets at a stop, such as USR1",
)
DEBUG = Variable("CLUSTERDDP_DEBUG", "user to commands and supervisor: 1 shows tracebacks")

#: Set for each rank: a job definition may not set them, and a job that is submitted from a rank does not inherit them.
FOR_RANKS = (
    *(RUN_DIR, ATTEMPT, DEVICE, LAUNCHER, SUPERVISOR, TOKEN, USR2_NOTICE_S, WATCHDOG, TERM_NOTICE_S),
    *(CODE, CHECKOUT, PREFLIGHT, PROFILE, HYDRA, CHECK_RESUME, DEVICE_MEMORY, FIRST_JOB, WANDB_NAME),
    *(MLFLOW, SAVED, SAVED_ITEMS, CHECKPOINT, PLACEHOLDERS, STOP_SIGNAL, DEBUG_RANK, PROTECT_SAVES, SEE_STEPS),
)
