"""The protocol between the processes of a run, besides events: control messages and environment variables.

Events are in history/, and exit codes in errors.py. docs/reference/events.md is also generated from this module, and
a test compares it with the messages that the code writes and reads.
"""

from __future__ import annotations

from collections.abc import Mapping

# --- the control channel: one JSON object per line

#: The prefix of a folder in which a rank writes a script's own save, beside the file that it replaces.
SAVING = ".clusterddp-save-"

#: A device's state in a heartbeat: working, waiting for other ranks, or idle because the host gave it no work.
OWN, WAIT, IDLE = "own", "wait", "idle"

#: A rank's first message, and the supervisor's answer once rank 0 has joined: the address of rank 0's store, whether it
#: is open, and the number of this rank's events that have arrived.
HELLO, ANSWER, REFUSAL = "token rank port host pid process", "host port open known term_notice_s?", "refused"
#: Reasons of the order to stop, others are in ``supervisor/attempt_state.Stop``: the time limit, and what a user asks
#: for, of which Slurm sends no signal.
TIME_LIMIT, HOLD, REQUEUE, DRAIN = "time limit", "clusterddp stop", "clusterddp requeue", "clusterddp drain"
GPU_HOURS = "limits.gpu_hours"
REQUESTED_STOPS = frozenset((HOLD, REQUEUE, DRAIN, GPU_HOURS))

# --- environment variables


class Variable(str):
    """The name of an environment variable. ``meaning``: who sets it, who reads it, and its content."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Variable:
        variable = super().__new__(cls, name)
        variable.meaning = meaning
        return variable


RUN_DIR = Variable("CLUSTERDDP_RUN_DIR", "supervisor to ranks and scripts: the run directory")
RUN_INODE = Variable("CLUSTERDDP_RUN_INODE", "supervisor to ranks: the inode of the run directory's folder")
ATTEMPT = Variable("CLUSTERDDP_ATTEMPT", "supervisor to ranks and scripts: the attempt's number")
DEVICE = Variable("CLUSTERDDP_DEVICE", "supervisor to ranks and scripts: cpu or cuda")
LAUNCHER = Variable("CLUSTERDDP_LAUNCHER", "supervisor to ranks: slurm or local. User to ranks: torchrun")
SUPERVISOR = Variable("CLUSTERDDP_SUPERVISOR", "supervisor to ranks: HOST:PORT of the control channel")
INTERFACE = Variable(
    "CLUSTERDDP_INTERFACE", "supervisor to ranks: the network interfaces that a node may use, by commas"
)
TOKEN = Variable("CLUSTERDDP_TOKEN", "supervisor to ranks: the attempt's secret for the control channel")
USR2_NOTICE_S = Variable("CLUSTERDDP_USR2_NOTICE_S", "supervisor to ranks: seconds from USR2 to the time limit")
PREFLIGHT = Variable("CLUSTERDDP_PREFLIGHT", "supervisor to ranks: on if the nodes are checked before training")
HYDRA = Variable(
    "CLUSTERDDP_HYDRA", "supervisor to ranks: when the run began, in unix seconds, for a Hydra app, otherwise empty"
)
WATCHDOG = Variable("CLUSTERDDP_WATCHDOG", "supervisor to ranks: on or off")
PROTECT_SAVES = Variable("CLUSTERDDP_PROTECT_SAVES", "supervisor to ranks: off if the script's saves are not protected")
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
RESUMABLE = Variable(
    "CLUSTERDDP_RESUMABLE",
    "supervisor to ranks: the file that `resume` names, or an empty text, and other files that match, as JSON",
)
COMMITTED = Variable(
    "CLUSTERDDP_COMMITTED",
    "supervisor to ranks: the step of the last attempt's newest checkpoint, if ranks have moved to other nodes since",
)
TERM_NOTICE_S = Variable(
    "CLUSTERDDP_TERM_NOTICE_S", "rank's entry point to clusterddp.init(): seconds from TERM to KILL, if known"
)
RANK_PROCESS = Variable(
    "CLUSTERDDP_RANK_PROCESS",
    "rank to the processes that it starts: the process, the job step and the launcher's variables of the rank",
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
    "supervisor to ranks and scripts: the run's first Slurm job, or the run's name if it began locally",
)
SUBMITIT = Variable(
    "CLUSTERDDP_SUBMITIT", "user to submitit: 1 submits with clusterddp, local starts the ranks on this machine"
)
RUN_ID = Variable(
    "CLUSTERDDP_RUN_ID", "supervisor to ranks: a random id of the run, for runs that its script starts in W&B"
)
TRACKERS = Variable(
    "CLUSTERDDP_TRACKERS", "supervisor to ranks: the trackers in which runs that the script starts continue"
)
RUNS = Variable("CLUSTERDDP_RUNS", "user to submit and launch(): the folder for new run directories, instead of ./runs")
SITE_CONFIG = Variable(
    "CLUSTERDDP_SITE_CONFIG",
    "site to submit and launch(): its configuration file, instead of /etc/clusterddp/config.yaml",
)
STOP_SIGNAL = Variable(
    "CLUSTERDDP_STOP_SIGNAL",
    "supervisor to ranks: the signal that a script which does not use clusterddp gets at a stop, such as USR1",
)
REHEARSAL = Variable("CLUSTERDDP_REHEARSAL", "rehearse to ranks: the file that says what they observe")
REHEARSAL_WRITABLE = Variable("CLUSTERDDP_REHEARSAL_WRITABLE", "rehearse to ranks: the folders that they may write to")
PREEMPT = Variable(
    "CLUSTERDDP_PREEMPT",
    "clusterddp's own tests to `submit --local`: when each attempt is preempted, as JSON: after a step (120), after "
    "seconds (2.5), or at a line that matches",
)
DEBUG = Variable("CLUSTERDDP_DEBUG", "user to commands and supervisor: 1 shows tracebacks")


def module_of_rank(environment: Mapping[str, str]) -> str:
    """The module that a rank starts with: the rank's own entry point or, in a rehearsal, the one that observes it."""
    return "clusterddp.rehearsal.rank" if REHEARSAL in environment else "clusterddp.worker"


#: Set for each rank. A job definition may not set them, and a job that is submitted from a rank does not inherit them.
FOR_RANKS = (
    *(
        RUN_DIR,
        RUN_INODE,
        ATTEMPT,
        DEVICE,
        LAUNCHER,
        SUPERVISOR,
        INTERFACE,
        TOKEN,
        USR2_NOTICE_S,
        WATCHDOG,
        TERM_NOTICE_S,
    ),
    *(COMMITTED, CODE, CHECKOUT, PREFLIGHT, HYDRA, DEVICE_MEMORY, FIRST_JOB, RUN_ID),
    *(TRACKERS, SAVED, SAVED_ITEMS, RESUMABLE, CHECKPOINT, PLACEHOLDERS, STOP_SIGNAL, DEBUG_RANK),
    *(PROTECT_SAVES, SEE_STEPS, RANK_PROCESS, INTERFACE),
)
