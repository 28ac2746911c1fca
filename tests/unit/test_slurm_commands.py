"""Parsing Slurm's output: recorded answers of scontrol and sinfo."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from clusterddp.errors import RunDirectoryError, SlurmError, SlurmUnavailable, SubmissionForbidden
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import queue
from tests.fake_slurm import FakeSlurm
from tests.wording import raises, says

# scontrol show job -o, 22.05.8, shortened at the end; the job's name imitates Slurm's own fields.
RUNNING = (
    "JobId=12 JobName=x JobState=COMPLETED UserId=ddp(997) GroupId=ddp(997) MCS_label=N/A Priority=4294901757 Nice=0 "
    "Account=team QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=00:00:07 TimeLimit=00:30:00 TimeMin=N/A SubmitTime=2026-11-20T06:35:01 "
    "EligibleTime=2026-11-20T06:35:01 AccrueTime=2026-11-20T06:35:01 StartTime=2026-11-20T06:35:02 "
    "EndTime=2026-11-20T07:05:02 Deadline=N/A PreemptEligibleTime=2026-11-20T06:35:02 PreemptTime=None "
    "SuspendTime=None SecsPreSuspend=0 Partition=low NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=4 NumTasks=4 "
    "Command=/x JobState=FAILED PreemptTime=2026-11-20T06:35:09 WorkDir=/tmp "
)


def test_a_jobs_fields_are_read_despite_the_users_own_text() -> None:
    """Name and command are the user's text and must not be read as Slurm's."""
    job = slurm.parse_job(RUNNING)
    assert job is not None
    assert (job.job_id, job.state, job.nodes, job.restarts) == ("12", "RUNNING", "n[1-2]", 2)
    assert job.preempt_time is None
    assert job.end_time is not None and job.start_time is not None and job.submit_time is not None
    assert (job.end_time - job.start_time, job.start_time - job.submit_time) == (1800, 1)
    assert job.eligible_time == job.submit_time
    assert job.live


#: Where clocks are put back, and when: the hour before is repeated.
PUT_BACK = {"Europe/Berlin": 1792890000, "America/New_York": 1793512800, "Australia/Sydney": 1775318400}


@pytest.fixture(params=PUT_BACK)
def put_back(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The moment at which this machine's clock is put back by an hour."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    moment = PUT_BACK[request.param]
    assert time.localtime(moment - 1).tm_isdst and not time.localtime(moment).tm_isdst
    yield moment
    monkeypatch.undo()
    time.tzset()


def test_a_jobs_end_is_read_exactly_in_the_hour_that_is_repeated(
    put_back: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour early would stop the run too soon, an hour late leave it to be killed."""
    scontrol = tmp_path / "scontrol"  # as 22.05.8 writes times
    scontrol.write_text(
        f"""#!/bin/sh
echo '{RUNNING}' | sed "s/EndTime=[^ ]*/EndTime=$(date -d @$4 "+${{SLURM_TIME_FORMAT:-%FT%T}}")/"
"""
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for end in range(put_back - 5400, put_back + 5400, 1500):
        job = slurm.show_job(str(end))
        assert job is not None and job.end_time == end


def test_a_job_does_not_inherit_the_form_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own squeue would print unix seconds."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 41${SLURM_TIME_FORMAT:+0}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm.submit(Path("x")) == "41"


@pytest.mark.parametrize("asked_before_s", [-7200, 7200])
def test_a_local_time_of_that_hour_is_read_by_what_is_known_besides(put_back: int, asked_before_s: int) -> None:
    """From a wrapper that ignores the form of times; glibc's own reading depends on what it was asked before."""

    def shown(at: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))

    time.mktime(time.localtime(put_back + asked_before_s))
    for end in range(put_back - 5400, put_back + 5400, 300):
        assert slurm.unix_time(shown(end), near=end + 1500) == slurm.unix_time(shown(end), near=end - 1500) == end
        start = end - 1800
        times = {"StartTime": start, "EndTime": end}
        text = RUNNING.replace("RunTime=00:00:07", f"RunTime={_clock(time.time() - start - 60)}")
        for name, at in times.items():
            text = re.sub(rf" {name}=\S+", f" {name}={shown(at)}", text)
        job = slurm.parse_job(text)
        assert job is not None and (job.start_time, job.end_time) == (start, end)


def _clock(seconds: float) -> str:
    """As Slurm writes a duration."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minute:02}:{second:02}"


def test_a_jobs_record_reads_as_text() -> None:
    """What is known of it, for the log of a job whose end nothing explains."""
    text = str(slurm.parse_job(RUNNING))
    assert text.startswith("job_id 12, state RUNNING, reason None, nodes n[1-2], restarts 2, end_time ")
    assert "preempt_time" not in text and "(" not in text


def test_an_arrays_member_keeps_its_own_id() -> None:
    """The bare id would requeue all members."""
    job = slurm.parse_job(RUNNING.replace("JobId=12 ", "JobId=14 ArrayJobId=12 ArrayTaskId=3 "))
    assert job is not None
    assert (job.job_id, job.task_limit) == ("12_3", 0)
    limited = slurm.parse_job(RUNNING.replace("JobId=12 ", "JobId=14 ArrayJobId=12 ArrayTaskId=3 ArrayTaskThrottle=2 "))
    assert limited is not None and (limited.job_id, limited.task_limit) == ("12_3", 2)
    environ = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert slurm.own_job_id(environ) == "12_3"
    assert slurm.own_job_id({"SLURM_JOB_ID": "14"}) == "14"


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2", {"": 2}),
        ("gpu:a100:4(S:0-1),shard:8", {"a100": 4}),
        ("gpu:a100:4,gpu:v100:2", {"a100": 4, "v100": 2}),
        ("(null)", {}),
        ("shard:8", {}),
    ],
)
def test_gpus_are_counted_by_type(gres: str, gpus: dict[str, int]) -> None:
    """As sinfo prints a node's GRES."""
    assert slurm.parse_gres(gres) == gpus


FAILED = "sbatch: error: Batch job submission failed"


class Answers(Protocol):
    def __call__(self, name: str, words: str, first: str = "") -> None:
        """Makes a command of Slurm that runs ``first``, and fails with these words."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Commands of Slurm that answer as a test chooses."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def make(name: str, words: str, first: str = "") -> None:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{first}\ncat >&2 <<'WORDS'\n{words}\nWORDS\nexit 1\n")
        file.chmod(0o755)

    return make


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "Unexpected message received for job 1",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "slurm_load_jobs error: Protocol authentication error",
        "slurm_load_jobs error: Message receive failure",
        "slurm_load_jobs error: Slurm backup controller in standby mode",
        "Job can not be altered now, try again later for job 1",
        "sbatch: error: Batch job submission failed: Invalid authentication credential",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
        "sbatch: error: Munge decode failed: Invalid credential",
        "sbatch: error: slurm_unpack_received_msg: Invalid Protocol Version 9984 from uid=0 at 10.0.0.1:6817",
        "sbatch: error: Batch job submission failed: I/O error writing script/environment to file",
        "the site's own wrapper is not available",
        "",
    ],
)
@pytest.mark.parametrize("request_", [("sbatch", "x"), ("scontrol", "requeue", "1"), ("scontrol", "show", "job", "1")])
def test_only_a_known_refusal_is_one(command: Answers, words: str, request_: tuple[str, ...]) -> None:
    """A busy, restarting or unreachable controller fails in many ways, and each of them may pass."""
    command(request_[0], words)
    with pytest.raises(SlurmUnavailable):
        slurm.run(*request_)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (("scontrol", "show", "job", "1"), "slurm_load_jobs error: Invalid job id specified"),
        (("scontrol", "show", "node", "n9"), "Node n9 not found"),
        (("scontrol", "show", "config"), "slurm_load_ctl_conf error: Access/permission denied"),
        (("sacctmgr", "show", "assoc"), "You are not running a supported accounting_storage plugin"),
        (("scontrol", "requeue", "1"), "Requested operation is presently disabled for job 1"),
        (("scontrol", "requeue", "1_0"), "1_0: Job is pending execution"),
        (("scontrol", "update", "JobId=1", "Requeue=0"), "Job/step already completing or completed for job 1"),
        (("scancel", "1"), "scancel: error: Kill job error on job id 1: Access/permission denied"),
        (("sbatch", "x"), f"sbatch: error: AssocMaxSubmitJobLimit\n{FAILED}: Job violates accounting/QOS policy (job)"),
        (("sbatch", "x"), f"sbatch: error: no hours left\n{FAILED}: Unspecified error"),
        (("sbatch", "x"), f"sbatch: error: invalid partition: low\n{FAILED}: Invalid partition name specified"),
        (("sbatch", "x"), f"{FAILED}: Requested node configuration is not available"),
        (("sbatch", "x"), f"{FAILED}: Invalid account or account/partition combination specified"),
        (("sbatch", "x"), "sbatch: error: Invalid --time specification"),
        (("sbatch", "x"), "sbatch: unrecognized option --nonsense\nTry \"sbatch --help\" for more information"),
    ],
)  # fmt: skip
def test_a_refusal_is_final(command: Answers, request_: tuple[str, ...], words: str) -> None:
    """In the words of 22.05, 24.11 and 26.05."""
    command(request_[0], words)
    with pytest.raises(SlurmError) as caught:
        slurm.run(*request_)
    assert type(caught.value) is SlurmError


@pytest.mark.parametrize(
    "words",
    [
        f"{FAILED}: Access/permission denied",
        "ERROR: sbatch is not available on compute nodes",
        "Please submit jobs from a login node.",
    ],
)
def test_a_node_that_may_not_submit_jobs_is_known_by_what_slurm_or_the_sites_wrapper_says(
    command: Answers, words: str
) -> None:
    """To repeat it would hold the nodes."""
    command("sbatch", words)
    with pytest.raises(SubmissionForbidden):
        slurm.run("sbatch", "x")


def test_what_a_change_is_refused_with_is_no_answer_to_a_question(command: Answers) -> None:
    """No question is refused with these words, so they come from a controller that is not ready."""
    command("scontrol", "slurm_load_jobs error: Requested operation is presently disabled")
    with pytest.raises(SlurmUnavailable):
        slurm.show_job("1")


@pytest.mark.parametrize("accepted", [True, False])
def test_a_submission_whose_answer_is_lost_is_looked_for_before_it_is_repeated(
    command: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    """A second sbatch would make a second job of the run."""
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
    script, calls = tmp_path / "job.sbatch", tmp_path / "calls"
    command(
        "sbatch",
        "Zero Bytes were transmitted or received",
        f"echo >> {calls}; [ $(wc -l < {calls}) = 2 ] && echo 42 && exit",
    )
    command("squeue", "", f"echo '40|/other'; {str(accepted).lower()} && echo '41|{script}'; exit 0")
    assert queue.submit(script) == ("41" if accepted else "42")
    assert len(calls.read_text()) == (1 if accepted else 2)


@pytest.mark.parametrize(
    ("answer", "job"),
    [
        ("41\n", "41"),
        ("41;alpha\n", "41"),
        ("Welcome to Alpha!\nquota: 5 of 10 TB\n41\nSee https://alpha/2026\n", "41"),
        ("\x1b[32m41\x1b[0m \r\n", "41"),
        ("  41;alpha  ", "41"),
        ("Submitted batch job 41 on cluster alpha\n", "41"),
        ("your quota: 41\n", None),
        ("2026\n41\n", None),
        ("", None),
    ],
)
def test_the_job_id_is_found_among_what_a_site_prints(answer: str, job: str | None) -> None:
    """A banner, colours, or a wrapper that leaves out --parsable."""
    assert slurm.parse_submitted(answer) == job


def test_a_job_whose_id_sbatch_hides_is_found_in_the_queue(command: Answers, tmp_path: Path) -> None:
    """The job exists, and would train without being known as the run's."""
    script = tmp_path / "job.sbatch"
    command("sbatch", "", "echo 'your quota: 5, your job: 41'; exit 0")
    command("squeue", "", f"echo '41|{script}'; exit 0")
    assert slurm.submit(script) == "41"
    command("squeue", "", "exit 0")
    with raises(RunDirectoryError):
        slurm.submit(script)


def test_hidden_partitions_and_their_jobs_are_listed(command: Answers) -> None:
    """sinfo, squeue and scontrol leave them out by default."""
    for name in ("sinfo", "squeue", "scontrol"):
        command(name, "", f"echo ${name.upper()}_ALL; exit 0")
        assert slurm.run(name, "-h").strip() == "1"


def test_a_job_that_was_submitted_before_is_not_taken_for_the_new_one(
    command: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost node keeps an ended job in the queue for minutes."""
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
    script, calls = tmp_path / "job.sbatch", tmp_path / "calls"
    command("sbatch", "Message receive failure", f"echo >> {calls}; [ $(wc -l < {calls}) = 2 ] && echo 42 && exit")
    command("squeue", "", f"echo '41|{script}'; exit 0")
    assert queue.submit(script, is_new=lambda job: job != "41") == "42"


def test_a_controller_that_does_not_answer_is_queried_again_and_that_is_reported(
    fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """With growing pauses; an answer, or another error, ends it."""
    ask, away = partial(slurm.run, "sinfo"), SlurmUnavailable("Unable to contact slurm controller")
    fake_slurm["sinfo"] = [away, away, away, "yes"]
    assert slurm.patiently(ask) == "yes"
    assert fake_slurm.pauses == [1, 2, 4]
    says(capsys.readouterr().err)
    fake_slurm["sinfo"] = SlurmError("Invalid job id specified")
    with raises(SlurmError):
        slurm.patiently(ask)
    fake_slurm["sinfo"] = [away, "yes"]
    with pytest.raises(SlurmUnavailable):
        slurm.patiently(ask, patience_s=0.5)


def test_a_missing_command_names_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a traceback, and no local run instead."""
    monkeypatch.setenv("PATH", "/nowhere")
    with raises(SlurmUnavailable):
        slurm.run("squeue")


@pytest.mark.parametrize(
    ("old", "new"),
    [("JobState=RUNNING", "JobState RUNNING"), ("Restarts=2", "Restarts=two"), ("Restarts=2", "Restarts=")],
)
def test_an_answer_in_an_unknown_form_is_a_slurm_error_that_quotes_it(old: str, new: str) -> None:
    """Of a future version: the supervisor keeps asking and does not end."""
    with raises(SlurmError):
        slurm.parse_job(RUNNING.replace(f" {old} ", f" {new} "))


def test_a_partition_in_an_unknown_form_is_a_slurm_error(fake_slurm: FakeSlurm) -> None:
    """Not a ValueError at submit time."""
    fake_slurm |= {"sinfo": "low|low*|n1|gpu:many\n", "scontrol": "NodeName=n1 CPUEfctv=many\n"}
    for command, instead in (("sinfo", "low|low*|n1|gpu:2\n"), ("scontrol", "")):
        with raises(SlurmError) as refused:
            slurm.read_cluster()
        assert command in str(refused.value)
        fake_slurm[command] = instead


def test_a_command_that_temporarily_cannot_start_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without memory or file descriptors: it is no reason for a supervisor to end."""
    broken = tmp_path / "scontrol"
    broken.write_text("#!/nowhere/sh\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(SlurmUnavailable):
        slurm.run("scontrol", "show", "job")


def test_output_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator's comment in Latin-1 does not end a run."""
    told = tmp_path / "scontrol"
    told.write_bytes(b"#!/bin/sh\nprintf 'AdminComment=gr\\374n'\n")
    told.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert slurm.run("scontrol") == "AdminComment=gr\N{REPLACEMENT CHARACTER}n"


def test_nodes_in_an_unknown_form_do_not_end_a_run(fake_slurm: FakeSlurm) -> None:
    """The supervisor continues without an answer."""
    fake_slurm["sinfo"] = "low n1 idle\n"
    with raises(SlurmError):
        slurm.usable_nodes(None)


def test_the_steps_of_a_job_are_known_by_the_pids_of_their_sruns(fake_slurm: FakeSlurm) -> None:
    """As recorded on 22.05.8. An srun that died, or another one of the user's, may wait in the same job."""
    shape = "CPUs=4 Tasks=4 Name=(null) Network=(null) TRES=(null) ResvPorts=(null) CPUFreqReq=Default Dist=Unknown"
    text = "".join(
        f"StepId=1.{step} UserId=999 StartTime=Unknown TimeLimit=UNLIMITED State={state} Partition=low "
        f"NodeList=n[1-4] Nodes=4 {shape} SrunHost:Pid=n1:{pid}\n"
        for step, state, pid in (("0", "RUNNING", 311), ("TDB", "PENDING", 444), ("TDB", "PENDING", 446))
    )
    fake_slurm |= {"scontrol show step -o 1": text, "scontrol show step -o 2": ""}
    assert slurm.steps("1") == [(311, "RUNNING"), (444, "PENDING"), (446, "PENDING")]
    assert slurm.steps("2") == []


@pytest.mark.parametrize("answer", ["41", "41;alpha", "Welcome to alpha\n41;alpha\nhave a nice day"])
def test_the_job_id_is_found_in_what_sbatch_and_a_sites_wrapper_print(answer: str, sbatch: Path) -> None:
    """With --parsable it is a line of its own, followed by the cluster's name in a federation."""
    sbatch.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
    assert slurm.submit(sbatch) == "41"


def test_a_job_without_a_known_id_is_not_taken_for_a_refusal(sbatch: Path) -> None:
    """It may run: nothing of it may be undone, as after a refusal, whose explanation is shown whole."""
    sbatch.write_text("#!/bin/sh\necho Submitted\n")
    shutil.copy("/bin/true", sbatch.with_name("squeue"))
    with raises(RunDirectoryError):
        slurm.submit(sbatch)
    sbatch.write_text("#!/bin/sh\nprintf 'give a project with -A\\nrefused\\n' >&2\nexit 1\n")
    with raises(SlurmError):
        slurm.submit(sbatch)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is run instead of Slurm's."""
    path = tmp_path / "sbatch"
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return path
