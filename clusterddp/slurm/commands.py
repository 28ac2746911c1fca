"""Runs Slurm's commands, all but srun. Parsers are pure functions of the commands' text.

All use text with explicit fields: the JSON of squeue and sacct changes between versions.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from clusterddp.errors import (
    RunDirectoryError,
    SlurmError,
    SlurmInterrupted,
    SlurmMissing,
    SlurmUnavailable,
    SubmissionForbidden,
)
from clusterddp.protocol import FOR_RANKS
from clusterddp.reporter import say
from clusterddp.slurm.refusals import is_forbidden, is_refusal
from clusterddp.slurm.sbatch_variables import without_overridden

T = TypeVar("T")

#: The second one is where slurmd and sackd put the file that they get from slurmctld (configless).
CONFIGURATION_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")

TIMEOUT_S = 60.0
#: For how long a command of a user asks a controller that does not answer again, in seconds.
PATIENCE_S = 20.0

#: Job states in which a job holds, or will hold, its run.
LIVE_STATES = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "RESIZING", "REQUEUED"),
    *("REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT"),
}

#: Prefixes of the states of nodes that get no job.
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "maint", "reboot", "inval", "powered_down", "powering_down")

#: SLURM_* variables that a job does not set, but a user exports.
_EXPORTED = {
    *("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_ACCOUNT", "SLURM_PARTITION", "SLURM_QOS", "SLURM_RESERVATION"),
    *("SLURM_WCKEY", "SLURM_JWT", "SLURM_TIME_FORMAT"),
}
_SET_BY_A_JOB = re.compile(
    r"(SLURM|SLURMD|SRUN|TORCHELASTIC|OMPI_COMM_WORLD)_.*|PMIX_(NAMESPACE|RANK)|PMI_(RANK|SIZE|FD|JOBID)"
    r"|SUBMITIT_(EXECUTOR|FOLDER|LOCAL_.*)"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)",
    re.DOTALL,
)
_CHANGES_OUTPUT = re.compile(r"(SQUEUE|SACCT|SINFO|SCONTROL)_.*|SLURM_TIME_FORMAT", re.DOTALL)

#: Partitions that are hidden from listings, and their jobs, count like others.
_ALL = {"SCONTROL_ALL": "1", "SINFO_ALL": "1", "SQUEUE_ALL": "1"}
#: All times in unix seconds: a local time without an offset is ambiguous in the hour that is repeated in autumn.
#: scontrol and squeue honour it (seen on 22.05.8). Not for sbatch, from which the job would inherit it.
_UNIX_TIMES = {"SLURM_TIME_FORMAT": "%s"}


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without the variables of a surrounding job, which a new submission would inherit, or sbatch refuse."""

    def set_by_a_job(name: str) -> bool:
        return name in FOR_RANKS or (name not in _EXPORTED and _SET_BY_A_JOB.fullmatch(name) is not None)

    return {name: value for name, value in environ.items() if not set_by_a_job(name)}


def scrub_job_variables() -> dict[str, str]:
    """Does the same to this process's environment. Returns the removed variables."""
    return {name: os.environ.pop(name) for name in os.environ.keys() - scrub(os.environ).keys()}


def for_parsing(environ: Mapping[str, str]) -> dict[str, str]:
    """``scrub``, also without variables that change the output format of squeue, sacct, sinfo and scontrol."""
    return {name: value for name, value in scrub(environ).items() if not _CHANGES_OUTPUT.fullmatch(name)}


def use_own_cluster() -> None:
    """For a process of a job, and its children: all commands of Slurm are about the job's own cluster.

    To find a cluster that the environment names, even this one, they would ask slurmdbd, which nodes may not reach.
    srun would then fail (seen on 22.05.8), and scontrol for as long as the job runs.
    """
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        os.environ.pop(name, None)


@dataclass(frozen=True)
class JobInfo:
    """The controller's record of a job. Times are unix seconds, None if unknown."""

    job_id: str
    state: str
    reason: str
    nodes: str
    restarts: int
    preempt_time: float | None
    end_time: float | None
    run_time_s: float = 0.0
    time_limit_s: float = 0.0
    """0 for no limit."""
    submit_time: float | None = None
    """When it was requeued, if it was."""
    eligible_time: float | None = None
    """Since when only the queue kept it from starting, and no hold, dependency or begin time."""
    start_time: float | None = None
    task_limit: int = 0
    """How many tasks of its array may run at a time, as `--max-running` says; 0 without a limit."""
    batch_host: str = ""
    """The node of the batch script, while the job has one; Slurm may have taken it out of ``nodes``."""

    def __str__(self) -> str:
        """``job_id 41, state RUNNING, reason None, nodes n1``: what is known."""
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value not in (None, "", 0))

    @property
    def live(self) -> bool:
        """Whether the job runs or may yet run."""
        return self.state in LIVE_STATES

    @property
    def ran_out(self) -> bool:
        """Whether it reached its time limit."""
        return self.run_time_s >= self.time_limit_s > 0


@dataclass(frozen=True)
class NodeShape:
    """A node: CPUs and memory in MiB that jobs can get, and GPUs by type ('' if Slurm has none)."""

    cpus: int
    memory_mib: int | None
    """None if Slurm does not know it: an unset RealMemory is 1."""
    gpus: Mapping[str, int]
    threads: int = 1
    """CPUs per core."""
    features: frozenset[str] = frozenset()

    def gpus_of(self, gpu_type: str | None) -> int:
        """The number of GPUs of a type, or of all types."""
        return self.gpus.get(gpu_type, 0) if gpu_type else sum(self.gpus.values())

    def may_satisfy(self, constraint: str | None) -> bool:
        """Whether it may be a node of a job with this constraint. With counts, brackets and alternatives, each name in
        it may be for other nodes."""
        text = constraint or ""
        names = set(re.findall(r"[^\s&|,()\[\]]+", re.sub(r"\*\d+", "", text)))
        alternatives = set("|[(*") & set(text)
        return bool(names & self.features) if alternatives else names <= self.features


@dataclass(frozen=True)
class Cluster:
    """The nodes of a cluster by name, those of each partition, and the partition of jobs that name none."""

    nodes: Mapping[str, NodeShape]
    partitions: Mapping[str, Sequence[str]]
    default: str | None

    def of(self, partitions: str | None) -> list[NodeShape]:
        """The nodes of one or several partitions, such as ``a,b``. None: all nodes."""
        if partitions is None:
            return [*self.nodes.values()]
        names = dict.fromkeys(node for name in partitions.split(",") for node in self.partitions.get(name, ()))
        return [self.nodes[name] for name in names]


def submission_cluster(environ: Mapping[str, str]) -> str | None:
    """The cluster that a submission goes to: SLURM_CLUSTERS, else ClusterName in slurm.conf if it is readable."""
    if "SLURM_CLUSTERS" in environ:
        return environ["SLURM_CLUSTERS"]
    for path in [environ["SLURM_CONF"]] if "SLURM_CONF" in environ else CONFIGURATION_FILES:
        with suppress(OSError):
            text = Path(path).read_text(errors="replace")
            named = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
            return named[1] if named else None
    return None


def named_cluster(environ: Mapping[str, str]) -> str | None:
    """The same in lower case. Asks slurmctld if this host has no slurm.conf at a usual place."""
    name = submission_cluster(environ)
    if name is None and shutil.which("scontrol"):
        with suppress(SlurmError):
            found = re.search(r"^ClusterName\s*=\s*(\S+)", run("scontrol", "show", "config"), re.MULTILINE)
            name = found[1] if found else None
    return name.lower() if name else None


def cluster_name(environ: Mapping[str, str]) -> str | None:
    """The cluster that job ids belong to, inside or outside a job, or None if unknown."""
    name = environ.get("SLURM_CLUSTER_NAME") or submission_cluster(environ) or ""
    return name.lower() if re.fullmatch(r"[^\s,]+", name) and name.lower() != "all" else None


def own_job_id(environ: Mapping[str, str]) -> str | None:
    """The id of the job that this process runs in. ``<array>_<task>`` for a task of an array.

    The array's id alone would requeue or cancel all of its tasks.
    """
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def require(*commands: str) -> None:
    """Raises SlurmMissing unless all commands are on PATH. There is no fallback to a local run."""
    for command in commands:
        if shutil.which(command) is None:
            raise SlurmMissing(
                f"{command} not found on PATH ({os.environ.get('PATH', '')})",
                "Submit from a Slurm login node, load the site's Slurm module, or add --local to run on this machine "
                "without Slurm",
            )


def run(*command: str, timeout_s: float | None = TIMEOUT_S) -> str:
    """A command's standard output. Raises SlurmError with Slurm's message if Slurm refuses the request, else, if the
    command fails or does not answer, SlurmUnavailable: the request may have been carried out."""
    return _completed(command, timeout_s).stdout


def errors_of(*command: str) -> str:
    """The same for its standard error."""
    return _completed(command, TIMEOUT_S).stderr


def _completed(command: Sequence[str], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    require(command[0])
    try:
        done = subprocess.run(
            command,
            env=_environment(command),
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # names and comments are the users' and administrators'
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"`{_shown(command)}` did not answer within {timeout_s:.0f} s") from error
    except OSError as error:  # no memory or file descriptor left at the moment, or the disk does not answer
        raise SlurmUnavailable(f"could not start `{_shown(command)}`: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        kind = SlurmError if is_refusal(command, lines) else SlurmUnavailable
        kind = SubmissionForbidden if is_forbidden(command, lines) else kind
        said = lines[-8:]  # a site's plugin explains a refusal in several
        raise kind(f"`{_shown(command)}` failed: {', '.join(said)}")
    return done


def _shown(command: Sequence[str]) -> str:
    """A command in a message. A word, such as the ids of many jobs, may be long."""
    return " ".join(word if len(word) < 200 else f"{word[:60]}..." for word in command)


def _environment(command: Sequence[str]) -> dict[str, str]:
    environ = for_parsing(os.environ)
    if command[0] != "sbatch":
        return environ | _UNIX_TIMES | _ALL
    return without_overridden(environ, Path(command[-1]))


def show_job(job_id: str) -> JobInfo | None:
    """The controller's record of a job, or None if it has none, or not any more (MinJobAge after its end)."""
    try:
        return parse_job(run("scontrol", "show", "job", "-o", job_id))
    except SlurmError as error:
        if "Invalid job id" in str(error) or str(error).endswith(f"Job {job_id} not found"):  # a task of an array
            return None
        raise


def patiently(
    ask: Callable[[], T],
    patience_s: float = PATIENCE_S,
    pause_s: float = 1.0,
    errors: tuple[type[Exception], ...] = (SlurmUnavailable,),
) -> T:
    """The result of ``ask``, which is retried, with a message, while the controller does not answer.

    Slurm's commands retry for 9 to 18 s themselves (22.05.8). The pauses double, up to 30 s.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except (SlurmMissing, SlurmInterrupted):
            raise
        except errors as error:
            if time.monotonic() + pause_s > deadline:
                raise
            say(f"retrying in {pause_s:g} s: {error}")
            time.sleep(pause_s)
            pause_s = min(30.0, 2 * pause_s)


def requeue(job_id: str) -> None:
    """Ends the running job and queues it again under the same id."""
    run("scontrol", "requeue", job_id)


def submit(script: Path, *options: str, timeout_s: float | None = TIMEOUT_S) -> str:
    """Submits a batch script, whose options override SBATCH_*. Returns the job id.

    Raises RunDirectoryError if sbatch succeeds without printing one.
    """
    answer = run("sbatch", "--parsable", *options, str(script), timeout_s=timeout_s)
    if (job_id := parse_submitted(answer) or jobs_by_script(ended=False).get(str(script))) is None:
        raise RunDirectoryError(
            f"sbatch accepted {script}, but printed no job id: {answer[:200]!r}. Look for the job with `squeue --me`"
        )
    return job_id


def parse_submitted(answer: str) -> str | None:
    """The job id that sbatch printed: ``41``, or ``41;cluster``. None if that is not certain.

    A site's wrapper may print more, before and after it, in colour, or leave out ``--parsable``.
    """
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", answer).splitlines()]
    form = r"(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?"
    found = {match[1] for line in lines if (match := re.fullmatch(form, line))}
    return found.pop() if len(found) == 1 else None


def jobs_by_script(ended: bool = True, without: str = "") -> dict[str, str]:
    """The id of the job, or array, that each batch script was submitted as: the user's jobs that Slurm still knows.

    ``ended``: whether jobs that have ended count, too. ``without``: a job that does not count.
    """
    states = ["--states=all"] if ended else []
    return parse_scripts(run("squeue", "--noheader", "--me", *states, "--format=%F|%o"), without)


def parse_scripts(text: str, without: str = "") -> dict[str, str]:
    """Reads lines ``41|/sweep/arrays/0/array.sbatch``. Of several jobs of a script, the newest counts."""
    rows = (line.partition("|") for line in text.splitlines())
    found = [(int(job), script) for job, _, script in rows if job.isdecimal() and job != without]
    return {script: str(job) for job, script in sorted(found)}


def lift_hold(job_id: str) -> None:
    """Lets a requeued job start now, despite its hold. The job's owner may do so."""
    run("scontrol", "update", f"JobId={job_id}", "StartTime=now")


def set_requeue(job_id: str, allowed: bool) -> None:
    """Whether Slurm may requeue the job by itself (24.11 requeues one that ends within a grace period)."""
    run("scontrol", "update", f"JobId={job_id}", f"Requeue={allowed:d}")


def cancel(job_id: str) -> None:
    """Cancels a job. One that is already over is no error."""
    run("scancel", job_id)


def steps(job_id: str) -> list[tuple[int, str]]:
    """A job's steps: the pid of the srun that asked for it, and its state, such as RUNNING. PENDING: srun waits until
    the job's nodes can take the step."""
    lines = run("scontrol", "show", "step", "-o", job_id).splitlines()
    found = (re.search(r"\bState=(\w+)\b.*\bSrunHost:Pid=\S*:(\d+)", line) for line in lines)
    return [(int(match[2]), match[1]) for match in found if match]


def default_partition() -> str | None:
    """The partition of jobs that request none, if there is one."""
    lines = run("sinfo", "-h", "-o", "%P").splitlines()
    return next((line.rstrip("*") for line in lines if line.endswith("*")), None)


def node_address(node: str) -> str:
    """The address by which Slurm reaches a node. Raises SlurmError if there is no such node."""
    text = run("scontrol", "show", "node", "-o", node)
    if (found := re.search(r"\bNodeAddr=(\S+)", text)) is None:
        raise SlurmError(f"scontrol printed no address for node {node}: {text[:200]!r}")
    return found[1]


def read_cluster() -> Cluster:
    """All nodes and partitions, also hidden ones."""
    text = run("sinfo", "-h", "-N", "-o", "%R|%P|%N|%G")
    with understood("sinfo", text):
        lines = [line.split("|") for line in text.splitlines()]
        gpus = {node: parse_gres(gres) for _, _, node, gres in lines}
    partitions: dict[str, list[str]] = {}
    for name, _, node, _ in lines:
        partitions.setdefault(name, []).append(node)
    text = run("scontrol", "show", "node", "-a", "-o") if gpus else ""
    with understood("scontrol", text):
        shapes = parse_nodes(text)
        nodes = {node: replace(shapes[node], gpus=of_node) for node, of_node in gpus.items()}
    return Cluster(nodes, partitions, next((line[0] for line in lines if line[1].endswith("*")), None))


def parse_nodes(text: str) -> dict[str, NodeShape]:
    """The nodes in ``scontrol show node -o`` by name, without their GPUs.

    sbatch refuses a job that requests what CoreSpecCount and MemSpecLimit reserve (seen on 22.05), and sinfo's %c and
    %m include that. CPUEfctv leaves out reserved CPUs. Releases before 22.05 do not print it. A core has one CPU where
    the site counts cores as CPUs, whatever ThreadsPerCore is.
    """
    nodes = {}
    for line in re.findall("^NodeName=.*", text, re.MULTILINE):  # not the rest of a reason with several lines
        # A node's comment and reason may imitate fields. They come last.
        found = dict(reversed(re.findall(r"(?<=\s)(\w+)=(\d+)(?=\s)", f"{line} ")))
        cores = int(found.get("Sockets", 0)) * int(found.get("CoresPerSocket", 0))
        threads = max(1, int(found["CPUTot"]) // cores) if cores else int(found["ThreadsPerCore"])
        reserved = int(found.get("CoreSpecCount", 0)) * threads
        memory = int(found["RealMemory"])
        features = re.search(r"\sAvailableFeatures=(\S+)", line)
        nodes[line.split()[0].removeprefix("NodeName=")] = NodeShape(
            cpus=int(found["CPUEfctv"]) if "CPUEfctv" in found else int(found["CPUTot"]) - reserved,
            memory_mib=memory - int(found.get("MemSpecLimit", 0)) if memory > 1 else None,
            gpus={},
            threads=threads,
            features=frozenset(features[1].split(",")) - {"(null)"} if features else frozenset(),
        )
    return nodes


@contextmanager
def understood(command: str, text: str) -> Iterator[None]:
    """Raises SlurmError, with the beginning of the output, if the body cannot parse it."""
    try:
        yield
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        said = f"{text[:200]!r}{' ...' if len(text) > 200 else ''}"
        raise SlurmError(f"could not parse the output of {command} ({error!r:.80}): {said}") from error


def usable_nodes(partition: str | None, routed: bool = False) -> list[str]:
    """The nodes of a partition, or of several such as ``a,b``, that can run jobs. None: of the default one, or of all
    if none is, or if the site chooses (``routed``)."""
    text = run("sinfo", "-h", "-N", "-o", "%R|%P|%N|%T")
    with understood("sinfo", text):
        return parse_usable(text.splitlines(), partition, routed)


def parse_usable(lines: list[str], partition: str | None, routed: bool = False) -> list[str]:
    """Usable nodes in lines ``PARTITION|PARTITION*|NODE|STATE``. In a state with ``*``, the node does not respond."""
    rows = [line.split("|") for line in lines]
    names = partition.split(",") if partition else [row[0] for row in rows if routed or row[1].endswith("*")]
    wanted = [row for row in rows if not names or row[0] in names]
    usable = (node for _, _, node, state in wanted if not state.endswith("*") and not state.startswith(_UNUSABLE))
    return [*dict.fromkeys(usable)]


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by type in a node's GRES: ``gpu:a100:4(S:0-1),shard:8`` gives ``{"a100": 4}``, ``gpu:2`` ``{"": 2}``."""
    gpus: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        words = item.split(":")
        if words[0] == "gpu":
            gpu_type = words[1] if len(words) == 3 else ""
            gpus[gpu_type] = gpus.get(gpu_type, 0) + int(words[-1])
    return gpus


#: What follows the job's name.
_HEAD = re.compile(r" UserId=[^=]*\(\d+\) GroupId=[^=]*\(\d+\) ")


def parse_job(text: str) -> JobInfo | None:
    """Reads one line of ``scontrol show job -o``, or None if it has no job."""
    if "JobId=" not in text:
        return None
    job_id = re.match(r"\s*JobId=(\d+)", text)
    array = re.search(r"ArrayJobId=(\d+) ArrayTaskId=(\d+) (?:ArrayTaskThrottle=(\d+) )?", text)
    # The job's name comes first. Its command and, since 26.05, its submit line come last. Any of them may imitate
    # fields: only those between are Slurm's.
    head = _HEAD.search(text)
    own = text[head.end() :].partition(" Command=")[0] if head else ""
    fields = dict(re.findall(r"(\w+)=(\S*)", own))
    with understood("scontrol", text):
        run_time_s, limit_s = _seconds(fields.get("RunTime")), _seconds(fields.get("TimeLimit"))
        start = unix_time(fields.get("StartTime"), time.time() - run_time_s)
        return JobInfo(
            job_id=f"{array[1]}_{array[2]}" if array else job_id[1] if job_id else "",
            state=fields["JobState"],
            reason=fields.get("Reason", "None"),
            nodes=fields.get("NodeList", "").replace("(null)", ""),
            restarts=int(fields.get("Restarts", 0)),
            preempt_time=unix_time(fields.get("PreemptTime")),
            end_time=unix_time(fields.get("EndTime"), start + limit_s if start and limit_s else None),
            run_time_s=run_time_s,
            time_limit_s=limit_s,
            submit_time=unix_time(fields.get("SubmitTime")),
            eligible_time=unix_time(fields.get("EligibleTime")),
            start_time=start,
            task_limit=int(array[3] or 0) if array else 0,
            batch_host=fields.get("BatchHost", ""),
        )


def _seconds(text: str | None) -> float:
    """Seconds in Slurm's D-HH:MM:SS. 0 for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9}):(\d{1,9}):(\d{1,9})", text or "")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return 86400 * days + 3600 * hours + 60 * minutes + seconds


def unix_time(text: str | None, near: float | None = None) -> float | None:
    """Unix seconds of a time of Slurm. None for None, Unknown, N/A and the like.

    A local time, ``2026-01-31T12:00:00``, comes from a command that ignores SLURM_TIME_FORMAT, such as a site's
    wrapper. In the hour that is repeated in autumn, the reading counts that is nearer to ``near`` (None: now).
    """
    if re.fullmatch(r"\d{1,11}", text or "", re.ASCII):
        return float(text or 0)
    try:
        local = time.strptime(text or "", "%Y-%m-%dT%H:%M:%S")
        readings = [time.mktime((*local[:8], is_summer)) for is_summer in (0, 1)]
        # mktime corrects the reading that does not exist
        real = [at for at in readings if time.localtime(at)[:6] == local[:6]] or [time.mktime(local)]
        return min(real, key=lambda at: abs(at - (time.time() if near is None else near)))
    except (ValueError, OverflowError):
        return None
