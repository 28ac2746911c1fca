"""Any input from outside is read, or refused with an error of clusterddp: no crash, no hang, no excessive memory.

A few examples of each in every run of the tests, always the same ones; thousands, and new ones, with
CLUSTERDDP_TEST_PRODUCT=1. What they have found has a plain test next to its module's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import socket
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterddp import environment, hostlist
from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.store import Checkpoints, visible
from clusterddp.cli import status
from clusterddp.cli.main import main
from clusterddp.errors import ClusterddpError, JobDefinitionError, LauncherEnvironmentError
from clusterddp.history.ends import Failed
from clusterddp.history.stops import Finishing
from clusterddp.jobdef import load, yaml12
from clusterddp.jobdef.job import KEYS as JOB_KEYS
from clusterddp.jobdef.job import Job, Keep
from clusterddp.report.booking import book
from clusterddp.report.efficiency import advice, spent
from clusterddp.rundir.claims import JobClaim
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.progress_display import Progress
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import configuration
from clusterddp.slurm.run_states import read_cause
from clusterddp.supervisor import lease, retry_limits
from clusterddp.supervisor.control_server import ControlServer, Handlers
from clusterddp.supervisor.controller import LocalController
from clusterddp.supervisor.history import History
from clusterddp.supervisor.verdict import RankEnd
from clusterddp.worker.control_channel import ControlChannel
from tests.reports import fields_of
from tests.unit.test_slurm_commands import RUNNING

FULL = "CLUSTERDDP_TEST_PRODUCT" in os.environ


def fuzz(examples: int, times: int = 10) -> Callable[..., Any]:
    """Runs a test with so many examples; with so many times as many, and new ones, when asked to."""
    return settings(
        max_examples=times * examples if FULL else examples,
        derandomize=not FULL,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True, scope="module")
def little_memory() -> Iterator[None]:
    """A wrong size is a MemoryError here, not a machine out of memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def own_errors_only() -> Iterator[None]:
    """An error of the project's own is an answer; any other goes through, and fails the test."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            yield
        except ClusterddpError as error:
            assert str(error)


# --- what examples are made of


NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30])
TEXTS = st.text(max_size=20) | st.sampled_from(["", "0", "-1", "1e999", "9" * 5000, "nan", "\0", "\ud800", "é" * 50])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
DEEP = "[" * 20_000


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """A text with a few pieces left out, doubled, replaced or cut off."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.sampled_from([0, 1, 2, 8, 40, 10**6])))
        piece = draw(
            st.sampled_from(["", text[start:stop] * 2, "\0", "\n", " ", "-", "1", "9" * 30, "null", "[", "]", "{", '"'])
            | TEXTS
        )
        text = text[:start] + piece + text[stop:]
    return text


def bytes_of(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


# --- job definitions and command lines

YAML = """\
# comment
script: train.py
nodes: 2-4
gpus_per_node: a100:4
time: 1:30:00
args: [--lr, 1e-3, *x]
env: {A: &x "1", B: 'two'}
setup: |
  module load cuda
checkpoint: {every: [500 steps, 5 minutes], keep: {last: 3, best: f1 max}}
limits: {attempts: 5}
sbatch: {comment: x, exclusive: true}
"""


@fuzz(60)
@given(TEXTS | damaged(YAML) | st.just(DEEP) | st.just("{a: " * 5000) | st.just("&a [*a]") | st.just("<<: *x"))
def test_any_text_is_yaml_or_refused(text: str) -> None:
    """With a place, wherever there is one."""
    with own_errors_only():
        yaml12.load(text, "job.yaml")


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))])


@pytest.mark.parametrize("end", ["", "\nargs: *a59"])
def test_a_text_of_aliases_of_aliases_costs_nothing(tmp_path: Path, end: str) -> None:
    """2**60 items, if they were copied."""
    (tmp_path / "job.yaml").write_text(BOMB + end)
    with pytest.raises(JobDefinitionError):
        load.load(tmp_path / "job.yaml")


@fuzz(200)
@given(st.dictionaries(st.sampled_from(list(JOB_KEYS)), VALUES | st.sampled_from(["2", "a100:4", "1:30"]), max_size=4))
def test_any_values_make_a_job_that_is_read_back_equal_or_a_list_of_mistakes(
    tmp_path_factory: Any, values: dict[str, Any]
) -> None:
    """As a recorded job.yaml, too."""
    path = tmp_path_factory.getbasetemp() / "job.yaml"
    with own_errors_only():
        job = load.from_values({"module": "train", **values})
        path.write_text(job.to_yaml())
        assert load.load_resolved(path) == job


@fuzz(60)
@given(damaged(YAML))
def test_a_damaged_job_definition_is_a_job_or_a_list_of_mistakes(tmp_path_factory: Any, text: str) -> None:
    """As a file, in any bytes."""
    path = tmp_path_factory.getbasetemp() / "job.yaml"
    path.write_bytes(bytes_of(text))
    with own_errors_only():
        load.load(path)


OPTIONS = st.sampled_from(["--set", "--sbatch", "--nodes", "--gpus", "--time", "-J", "-w", "--mem", "--run-dir", "-m"])
KEYS = st.sampled_from(["", "env.", "sbatch.", "checkpoint.", "checkpoint.keep.", "limits.", "a.b."])
WORDS = TEXTS | st.builds(
    lambda prefix, key, value: f"{prefix}{key}={value}", KEYS, st.sampled_from([*JOB_KEYS, "x", "every"]) | TEXTS, TEXTS
)


@fuzz(60)
@given(st.lists(st.tuples(OPTIONS, WORDS), max_size=4), st.lists(TEXTS, max_size=2))
def test_any_command_line_is_a_batch_script_or_a_sentence(
    tmp_path_factory: Any, options: list[tuple[str, str]], script: list[str]
) -> None:
    """``--dry-run``, without a Slurm: exit code 0, 1 or 2, and no traceback."""
    home = tmp_path_factory.getbasetemp()
    words = [word for option in options for word in option]
    with pytest.MonkeyPatch.context() as patch, own_errors_only():
        patch.setenv("PATH", "/nowhere")
        patch.setenv("XDG_CONFIG_HOME", str(home))
        with pytest.raises(SystemExit) as left:
            main(["submit", "-m", "train", *words, "--dry-run", "--", *script])
    assert left.value.code in (0, 1, 2)


# --- what launchers set


@fuzz(200)
@given(st.text("n[]-,0123456789x().:", max_size=20) | damaged("rack[1-2]node[01-02],c[3-4],2(x3)"))
def test_any_host_list_is_expanded_or_refused(text: str) -> None:
    """In little memory."""
    for read in (hostlist.expand, hostlist.tasks_per_node):
        with own_errors_only():
            read(text)


STEP = {
    "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "7",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
COUNTS = (
    st.integers(-1, 3).map(str) | st.sampled_from(["9" * 5000, "1(x999999999)", "n[1-65536][1-65536]", "²"]) | TEXTS
)


@fuzz(150)
@given(st.sampled_from([STEP, TORCHRUN]), st.dictionaries(st.sampled_from([*STEP, *TORCHRUN]), COUNTS, max_size=4))
def test_any_environment_is_read_or_refused(base: dict[str, str], changed: dict[str, str]) -> None:
    """Each variable alone, and together."""
    with own_errors_only():
        environment.read({**base, **changed})


# --- what Slurm says

CONFIG = "AuthInfo = cred_expire=6\nKillWait = 30 sec\nPreemptMode = REQUEUE\nPreemptType = preempt/partition_prio\n"
PARTITION = "PartitionName=low GraceTime=20 PreemptMode=REQUEUE State=UP "
SINFO = "low|low*|n1|gpu:a100:4(S:0-1)\nlow|low*|n2|(null)\n"
NODES = "".join(
    f"NodeName={name} CPUEfctv=2 CPUTot=4 RealMemory=3900 MemSpecLimit=9 ThreadsPerCore=2\n" for name in ("n1", "n2")
)


@fuzz(150)
@given(damaged(RUNNING) | TEXTS)
def test_any_output_of_scontrol_is_a_job_or_a_slurm_error(text: str) -> None:
    """What is read is also judged."""
    with own_errors_only():
        job = slurm.parse_job(text)
        read_cause(job, 2, 30.0, lambda: 20, 0.0)


@fuzz(100)
@given(damaged(CONFIG), damaged(PARTITION), damaged(SINFO), damaged(NODES), damaged("requeue|00:00:20"))
def test_any_output_about_a_partition_is_read_or_a_slurm_error(
    config: str, partition: str, sinfo: str, nodes: str, qos: str
) -> None:
    """Other versions' forms are an error that names the command."""
    answers = {"config": config, "partition": partition, "sinfo": sinfo, "node": nodes, "qos": qos}

    def run(*command: str, **_: float) -> str:
        return answers[next(word for word in answers if word in command)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "run", run)
        asks: list[Callable[[], object]] = [
            slurm.read_cluster,
            lambda: configuration.preemption("low", "normal"),
            lambda: configuration.qos_preemption("normal", "REQUEUE"),
            slurm.default_partition,
        ]
        for ask in asks:
            with own_errors_only():
                ask()


# --- checkpoints


def checkpoint_bytes(**facts: str) -> bytes:
    """A small checkpoint file."""
    tensors = [file_format.Tensor("a", "F32", (3, 2), 4), file_format.Tensor("b", "I64", (), 8)]
    head = file_format.head(
        file_format.described(tensors), {"model": {"$tensor": "a"}}, {"step": "1", "attempt": "0", **facts}
    )
    data = bytes(range(32))
    sums = b"".join(zlib.crc32(part).to_bytes(4, "little") for part in (head, data))
    return head + data + sums


GOOD = checkpoint_bytes(metrics='{"f1": 0.5}')


def with_header(header: bytes, data: bytes = GOOD[-40:-8]) -> bytes:
    """A file with this header and correct checksums."""
    head = len(header).to_bytes(8, "little") + header
    return head + data + b"".join(zlib.crc32(part).to_bytes(4, "little") for part in (head, data))


HEADER = GOOD[8 : 8 + int.from_bytes(GOOD[:8], "little")]


@st.composite
def checkpoint_files(draw: st.DrawFn) -> bytes:
    """Bytes changed anywhere, a wrong length, or a wrong header with correct checksums."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        data = bytearray(GOOD)
        for _ in range(draw(st.integers(1, 3))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data[: draw(st.sampled_from([len(data), len(data) - 1, 9, 8, 7, 0]))])
    if kind == 1:
        return draw(st.integers(0, 2**64 - 1) | st.just(len(GOOD))).to_bytes(8, "little") + GOOD[8:]
    if kind == 2:
        return with_header(bytes_of(draw(damaged(HEADER.decode()))))
    header = json.loads(HEADER)
    for _ in range(draw(st.integers(1, 2))):
        entry = draw(st.sampled_from(list(header)))
        if isinstance(header[entry], dict) and header[entry]:
            header[entry][draw(st.sampled_from(list(header[entry])))] = draw(VALUES)
        else:
            header[entry] = draw(VALUES)
    return with_header(json.dumps(header).encode())


@fuzz(200)
@given(checkpoint_files() | st.just(with_header(DEEP.encode())))
def test_any_file_is_a_checkpoint_or_damaged(tmp_path_factory: Any, content: bytes) -> None:
    """Whatever its header says, nothing larger than the file is read."""
    path = tmp_path_factory.getbasetemp() / "step-000000000001.attempt-0.safetensors"
    path.write_bytes(content)
    checkpoint = Checkpoint(path, 1, 0)
    for look in (checkpoint.verify, checkpoint.read, lambda: checkpoint.metric("f1")):
        with own_errors_only():
            look()


@fuzz(100)
@given(checkpoint_files())
def test_any_file_is_restored_or_refused(tmp_path_factory: Any, content: bytes) -> None:
    """The state in it, too: a tensor that is not there, or not as large as it says."""
    from clusterddp.checkpoint.transfer import unpacked

    path = tmp_path_factory.getbasetemp() / "step-000000000001.attempt-0.safetensors"
    path.write_bytes(content)
    with own_errors_only():
        unpacked(Checkpoint(path, 1, 0).read())


# --- the run directory

EVENTS = [
    {"time": 1.0, "attempt": 0, "event": "submitted", "job": "1"},
    {"time": 2.0, "attempt": 0, "event": "started", "job": "1", "restarts": 0, "nodes": "n1", "ranks": 2, "code": {},
     "changed": []},
    {"time": 2.5, "attempt": 0, "event": "training", "rank": 0, "step": 0},
    {"time": 3.0, "attempt": 0, "event": "checkpoint", "step": 1, "durable_s": 0.1, "rank": 0},
    {"time": 4.0, "attempt": 0, "event": "requeued", "step": 2, "checkpoint": 1, "reason": "x", "cause": "preempted"},
    {"time": 5.0, "attempt": 1, "event": "started", "job": "1", "restarts": 1, "nodes": "n1", "code": {},
     "changed": ["x"]},
    {"time": 6.0, "attempt": 1, "event": "resumed", "step": 1, "redone": 1, "rank": 0, "inexact": ["x"]},
    {"time": 6.5, "attempt": 1, "event": "interval", "seconds": 3.0, "stall_s": 0.1, "between_s": 60.0},
    {"time": 7.0, "attempt": 1, "event": "failed", "step": 2, "attempts": 2, "reason": "rank 0 raised"},
]  # fmt: skip
FILES = {
    "events.jsonl": "".join(json.dumps(event) + "\n" for event in EVENTS),
    "metrics.jsonl": "".join(
        json.dumps({"step": step, "time": 1.0, "attempt": attempt, "loss": 0.5}) + "\n"
        for step, attempt in ((0, 0), (1, 0), (1, 1))
    ),
    "outcome.json": json.dumps({"state": "failed", "step": 2, "attempts": 2, "reason": "x"}),
    "private/submitted.json": json.dumps({"kind": "slurm", "job": "1", "time": 1.0}),
    "private/attempt-1/holder.json": json.dumps({"kind": "local", "host": "x", "pid": 1, "process_start": "2"}),
    "private/attempt-1/rank-0.json": json.dumps({"rank": 0, "host": "n1", "end": "exception", "error": "x", "step": 1}),
    "private/attempt-1/resumed.json": json.dumps({"attempt": 1, "step": 1, "parent": {"attempt": 0, "step": 1}}),
    "private/attempt-0/resumed.json": json.dumps({"attempt": 0, "step": 0, "parent": None}),
    "private/loop.json": json.dumps({"kind": "local", "host": "x", "pid": 1, "process_start": "2"}),
    "private/notice.json": json.dumps({"cause": "preempted"}),
}


@st.composite
def changed_json(draw: st.DrawFn, text: str) -> str:
    """JSON lines of which a few values are others, or not there."""
    lines = [json.loads(line) for line in text.splitlines()]
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(lines) - 1))
        if isinstance(lines[index], dict) and lines[index] and draw(st.integers(0, 4)):
            key = draw(st.sampled_from(sorted(lines[index])))
            if draw(st.booleans()):
                lines[index][key] = draw(VALUES)
            else:
                del lines[index][key]
        else:
            lines[index] = draw(VALUES)
    return "".join(json.dumps(line) + "\n" for line in lines)


@st.composite
def run_files(draw: st.DrawFn) -> dict[str, str]:
    """A run's files, one or two of them changed."""
    files = dict(FILES)
    for name in draw(st.lists(st.sampled_from(list(files)), min_size=1, max_size=2, unique=True)):
        files[name] = draw(changed_json(files[name]) | damaged(files[name]) | st.just(DEEP + "\n") | st.just(""))
    return files


def looks(run: RunDirectory, job: Job) -> list[Callable[[], Any]]:
    """All that reads a run's files."""
    history: Callable[[], Any] = lambda: History(run, 1).conclude(Failed, "x")  # noqa: E731
    return [
        lambda: status.show(run),
        run.metrics,
        run.outcome,
        run.last_metrics,
        lambda: retry_limits.exceeded(job, run.history(), 8.0),
        lambda: spent(book(run.history(), 8.0), run.history()),
        lambda: advice(job, book(run.history(), 8.0), run.history()),
        lambda: lease.held_by_other(run, JobClaim("1")),
        lambda: lease.local_loop_alive(run),
        lambda: [event["event"] for event in run.events()],
        lambda: RankEnd.read(0, "n1", 1.0, run.rank_record(1, 0)).sentence(),
        lambda: list(Checkpoints(run, 1, Keep()).candidates()),
        lambda: LocalController(run).why(1.0),
        lambda: follow(run),
        lambda: list(visible(run)),
        history,
    ]


def follow(run: RunDirectory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = RunDirectory(folder)
        progress = Progress(copy, None)  # which shows what is written from now on
        shutil.copytree(run.path, folder, dirs_exist_ok=True)
        progress.update()


@fuzz(50, times=30)
@given(run_files())
def test_any_file_of_a_run_is_read_or_named(tmp_path_factory: Any, files: dict[str, str]) -> None:
    """Torn, cut, with other values: status, the supervisor and a restore say which file is not as it was written."""
    run = RunDirectory(tmp_path_factory.getbasetemp() / "fuzzed-run")
    run.create()
    job = Job(name="x", module="m", device="cpu")
    run.job_file.write_text(job.to_yaml())
    for number in (0, 1):
        run.attempt_logs(number).mkdir(exist_ok=True)
        run.attempt_private(number).mkdir(exist_ok=True)
    for look in range(len(looks(run, job))):
        for name, text in files.items():
            (run.path / name).write_bytes(bytes_of(text))
        with pytest.MonkeyPatch.context() as patch, own_errors_only():
            patch.setattr(slurm, "show_job", lambda _: None)
            patch.setenv("PATH", "/nowhere")  # a squeue without a controller would be retried for 15 s
            looks(run, job)[look]()


# --- the control channel


@fuzz(100)
@given(st.lists(VALUES.map(json.dumps) | TEXTS | damaged('{"event": "x", "step": 1}'), max_size=4), st.booleans())
def test_any_input_leaves_the_supervisor_listening(words: list[str], knows_token: bool) -> None:
    """The next rank can still join."""
    server, heard = echo_server()
    hello = {"token": "secret" if knows_token else "guess", "rank": 1, "port": None, "host": "h", "pid": 1}
    with socket.create_connection(("127.0.0.1", server.port)) as peer, contextlib.suppress(OSError):
        peer.sendall((json.dumps(hello) + "\n").encode() + b"\n".join(map(bytes_of, words)) + b"\n")
    link = ControlChannel.join(f"127.0.0.1:{server.port}", "secret", 0, 1, timeout=10)
    assert link is not None
    link.send(Finishing(step=3))
    assert heard.wait(10)
    link.close()
    server.close()


@fuzz(60)
@given(st.dictionaries(st.sampled_from(["token", "rank", "port", "host", "pid"]), VALUES, max_size=3))
def test_any_hello_is_a_rank_or_refused(changed: dict[str, Any]) -> None:
    """With the right token or another."""
    server, _ = echo_server()
    first = ControlChannel.join(f"127.0.0.1:{server.port}", "secret", 0, 1, timeout=10)
    hello = {"token": "secret", "rank": 1, "port": None, "host": "h", "pid": 1, **changed}
    with socket.create_connection(("127.0.0.1", server.port)) as peer, contextlib.suppress(OSError):
        peer.sendall((json.dumps(hello) + "\n").encode())
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(10)
        while peer.recv(4096):
            pass
    link = ControlChannel.join(f"127.0.0.1:{server.port}", "secret", 77, None, timeout=10)
    assert first is not None and link is not None and link.store_port == 1
    link.close()
    first.close()
    server.close()


def echo_server() -> tuple[ControlServer, threading.Event]:
    heard = threading.Event()

    def on_report(rank: int, report: Any) -> None:
        if fields_of(report) == ("finishing", {"step": 3}):
            heard.set()

    return ControlServer("secret", Handlers(on_report), host="127.0.0.1"), heard


@fuzz(60)
@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode() + b"\n"))
def test_any_answer_to_a_rank_is_the_stores_address_or_an_error(answer: bytes) -> None:
    """Also when another program listens there, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.recv(4096)
                connection.sendall(answer if b"\n" in answer else answer + b"\n")
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        with contextlib.suppress(LauncherEnvironmentError):
            link = ControlChannel.join(f"127.0.0.1:{listener.getsockname()[1]}", "t", 1, None, timeout=10)
            assert link is not None
            link.close()
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        listener.close()
        thread.join()
