"""Saves by the writer process: real processes, real files, and failing disks."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clusterddp.checkpoint import client as snapshot
from clusterddp.checkpoint import host_memory
from clusterddp.checkpoint.client import CheckpointClient, NotSaved, Saved
from clusterddp.checkpoint.state_dict import load_state, state_of
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.checkpoint.writer import Messages, Writer
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Checkpointing, Keep
from clusterddp.process import process_start
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.saving import Saver
from clusterddp.worker.rank_process import RankProcess
from tests import ddp
from tests.checkpoint_files import content_of
from tests.waiting import wait_until
from tests.wording import raises, says


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.metrics_file.touch()
    Checkpoints(directory, directory.create_attempt(), Keep()).record_resume(None)
    return directory


@pytest.fixture
def checkpoint_client(directory: RunDirectory) -> Any:
    checkpoint_client = CheckpointClient(directory, 0, Keep(2), torch.device("cpu"))
    yield checkpoint_client
    checkpoint_client.close()


def state(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    return {"model": {"weight": torch.full((size,), value)}, "progress": {"step": 3}}


def save(checkpoint_client: CheckpointClient, step: int, content: dict[str, Any]) -> Saved:
    checkpoint_client.save(step, content, {}, urgent=True)
    saved = checkpoint_client.result(wait=True)
    assert saved is not None
    return saved


def writer_pid() -> int:
    """A thread starts the writer, whose parent in /proc it is until it ends."""
    tasks = Path("/proc/self/task")

    def writers() -> list[str]:
        children = [child for task in tasks.glob("*/children") for child in task.read_text().split()]
        return [child for child in children if b"checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes()]

    (pid,) = wait_until(writers, "the writer", 30)
    return int(pid)


def names(directory: RunDirectory) -> list[str]:
    return sorted(path.name for path in directory.checkpoints.iterdir())


def test_the_writer_exits_when_its_rank_exits_with_an_unread_answer() -> None:
    """The socket then breaks instead of closing; the save in progress is still finished."""
    here, rank = socket.socketpair()
    here.sendall(b"an answer\n")
    messages = Messages(here)
    rank.close()
    with pytest.raises(EOFError):
        messages.next()
    here.close()


def test_a_snapshot_is_saved_unchanged_while_training_continues(
    directory: RunDirectory, checkpoint_client: Any
) -> None:
    live = state(2.0, size=1 << 20)
    checkpoint_client.save(5, live, {}, urgent=False)
    live["model"]["weight"].zero_()
    live["progress"]["step"] = 4
    assert checkpoint_client.busy
    saved = checkpoint_client.result(wait=True)
    (path,) = directory.checkpoints.iterdir()
    assert path.name == "step-000000000005.attempt-0.safetensors" and saved.bytes == path.stat().st_size
    assert torch.equal(content_of(path)["model"]["weight"], torch.full((1 << 20,), 2.0))
    assert content_of(path)["progress"] == {"step": 3}


def left() -> tuple[int, int]:
    """How many threads of snapshots this process has, and how many descriptors of their memory."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    threads = [thread for thread in threading.enumerate() if thread.name == "snapshot"]
    return len(threads), sum("memfd:clusterddp" in link for link in links)


@pytest.mark.parametrize("saves", [0, 1])
def test_a_process_that_continues_keeps_neither_a_thread_nor_memory(directory: RunDirectory, saves: int) -> None:
    """As one that makes one run after another, with and without a save."""
    before = left()
    client = CheckpointClient(directory, 0, Keep(2), torch.device("cpu"))
    for step in range(saves):
        save(client, step, state())
    threads, memory = left()
    assert (threads, memory > before[1]) == (before[0] + 1, saves > 0)
    client.close()
    client.free()
    assert left() == before


def test_a_state_that_grows_or_changes_its_shape_is_saved(directory: RunDirectory, checkpoint_client: Any) -> None:
    checkpoint_client.prepare(state(1.0, size=10))
    for step, size in enumerate((10, 10, 500_000, 7, 0)):
        save(checkpoint_client, step, state(float(step), size))
        newest = max(directory.checkpoints.glob("step-*"))
        assert torch.equal(content_of(newest)["model"]["weight"], torch.full((size,), float(step)))


def test_a_rank_that_is_killed_right_after_the_snapshot_loses_nothing(tmp_path: Path, directory: RunDirectory) -> None:
    script = (
        "import os, signal, sys, torch\n"
        "from clusterddp.jobdef.job import Keep\n"
        "from clusterddp.rundir.run_directory import RunDirectory\n"
        "from clusterddp.checkpoint.client import CheckpointClient\n"
        "persisting = CheckpointClient(RunDirectory(sys.argv[1]), 0, Keep(), torch.device('cpu'))\n"
        "persisting.save(9, {'model': torch.arange(10_000_000)}, {}, urgent=False)\n"
        "persisting._sent.wait()\n"  # no public call waits for this without hurrying the writer
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(directory)]).returncode == -signal.SIGKILL
    wait_until(lambda: any(directory.checkpoints.glob("step-*")), "the checkpoint")
    (path,) = directory.checkpoints.glob("step-*")
    assert torch.equal(content_of(path)["model"], torch.arange(10_000_000))


def test_a_killed_writer_is_reported_and_the_next_save_starts_another(
    directory: RunDirectory, checkpoint_client: Any
) -> None:
    save(checkpoint_client, 1, state())
    os.kill(writer_pid(), signal.SIGKILL)
    with raises(NotSaved):
        save(checkpoint_client, 2, state())
    save(checkpoint_client, 3, state())
    assert [name[5:17] for name in names(directory)] == ["000000000001", "000000000003"]


def test_a_dead_writer_whose_exit_code_the_script_has_taken_is_not_said_to_have_exited_with_0(
    checkpoint_client: Any,
) -> None:
    """``os.wait()`` in the script, or an ignored SIGCHLD; Popen then has 0."""
    save(checkpoint_client, 1, state())
    pid = writer_pid()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with raises(NotSaved):
        save(checkpoint_client, 2, state())
    save(checkpoint_client, 3, state())


def test_a_writer_that_cannot_be_started_fails_the_save_and_the_next_one_tries_again(
    directory: RunDirectory, checkpoint_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        checkpoint_client.prepare(state())
        checkpoint_client.save(1, state(), {}, urgent=False)
        assert checkpoint_client.busy
        with raises(NotSaved):
            checkpoint_client.result(wait=False)
        assert not checkpoint_client.busy
    save(checkpoint_client, 2, state())
    assert [name[5:17] for name in names(directory)] == ["000000000002"]


def test_names_and_values_that_do_not_fit_into_the_header_are_not_saved(
    monkeypatch: pytest.MonkeyPatch, checkpoint_client: Any
) -> None:
    monkeypatch.setattr("clusterddp.checkpoint.client.LONGEST_HEADER", 8)
    checkpoint_client.save(1, state(), {}, urgent=True)
    with raises(NotSaved):
        checkpoint_client.result(wait=True)
    monkeypatch.undo()
    save(checkpoint_client, 2, state())


def test_a_snapshot_that_fails_is_reported_as_what_it_is(directory: RunDirectory, checkpoint_client: Any) -> None:
    """Such as a CUDA error in the copy; the writer is not to blame, and saves the next one."""

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    checkpoint_client.save(1, state(), {}, urgent=True, before=fail)
    with raises(NotSaved):
        checkpoint_client.result(wait=True)
    pid = writer_pid()
    save(checkpoint_client, 2, state())
    assert writer_pid() == pid


def test_a_writer_that_fails_unexpectedly_exits_and_is_not_waited_for(
    directory: RunDirectory, checkpoint_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoint_client, 1, state())
    with monkeypatch.context() as patch, raises(NotSaved):
        more_than_there_is = property(lambda _: 1 << 40, lambda *_: None)
        patch.setattr(snapshot.Snapshot, "nbytes", more_than_there_is, raising=False)
        save(checkpoint_client, 2, state())
    save(checkpoint_client, 3, state())
    assert [name[5:17] for name in names(directory) if name[0] != "."] == ["000000000001", "000000000003"]


def test_a_rank_with_more_than_a_thousand_open_files_saves(directory: RunDirectory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    held = [null, *(os.dup(null) for _ in range(1100))]
    checkpoint_client = CheckpointClient(directory, 0, Keep(2), torch.device("cpu"))
    try:
        assert save(checkpoint_client, 1, state()).step == 1
    finally:
        checkpoint_client.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_save_that_is_answered_leaves_the_next_one_alone() -> None:
    """The rank may have asked for the next one before the thread of the first has noticed its end."""
    # Through private members: the moment between two saves lasts microseconds.
    writer = Writer(None, 0)  # type: ignore[arg-type]
    following = iter([None])

    def first() -> Any:
        yield
        writer._work = following

    thread = threading.Thread(target=writer._work_slowly, args=(first(),))  # which becomes slow for good
    thread.start()
    thread.join()
    assert list(following) == [None]


def test_a_failed_write_leaves_no_file_behind_and_keeps_the_previous_one(
    directory: RunDirectory, checkpoint_client: Any
) -> None:
    save(checkpoint_client, 1, state())
    resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with pytest.raises(NotSaved):
        save(checkpoint_client, 2, state(size=100_000_000))
    assert names(directory) == ["step-000000000001.attempt-0.safetensors"]
    save(checkpoint_client, 3, state())


def test_the_best_checkpoint_is_the_best_state_that_could_be_saved(directory: RunDirectory) -> None:
    """A better one that did not fit on the disk does not keep a later one from being saved."""
    cpu, said = torch.device("cpu"), []
    alone: Any = SimpleNamespace(rank=0, world_size=1, device=cpu, collective_device=cpu, control_device=cpu)
    settings = Checkpointing(every_steps=None, every_s=None, keep=Keep(1, best="loss", best_is="min"))
    report = lambda event: said.append((event.name, getattr(event, "best", None)))  # noqa: E731
    saver = Saver(RankProcess(), directory, 0, alone, report, settings)
    saver.log_best(1, 2.0, state, last=True)
    resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    saver.log_best(2, 1.0, lambda: state(size=1 << 20), last=True)
    for step, loss in ((3, 1.5), (4, 1.75)):
        saver.log_best(step, loss, state, last=True)
    saver.close(clean=True)
    assert said == [("checkpoint", {"loss": 2.0}), ("checkpoint_failed", None), ("checkpoint", {"loss": 1.5})]
    assert names(directory) == ["step-000000000003.attempt-0.safetensors"]


FULL_DISK = """
import os, sys, torch
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.logged_values import Logged
from tests.crash.subject import saver_of

run = RunDirectory(sys.argv[1])
run.create()
wanted = ("step", "deleted", "reason")
report = lambda event: print(event.name, *[vars(event)[name] for name in wanted if name in vars(event)])
saver = saver_of(run, run.create_attempt(), report, keep=5)
saver.record_resume(None)


def save(step, size=250_000, logged=1):
    saver.log(step - 1, Logged({f"value_{number}": 1.0 for number in range(logged)}, {}))
    saver.save_if_due(step, lambda: {"model": torch.full((size,), float(step))}, due=True)
    saver._take_answer(wait=True)


for step in range(1, 6):
    save(step)
with open(run.path / "other", "wb", buffering=0) as other:
    try:
        while other.write(bytes(4096)): pass
    except OSError: pass
save(6, logged=1000)
os.unlink(run.path / "other")
save(7)
save(8, size=900_000)
print(*sorted(int(name[5:17]) for name in os.listdir(run.checkpoints)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_a_full_disk_costs_the_oldest_checkpoints_before_the_newest_step(tmp_path: Path) -> None:
    """A file system for four checkpoints, of which five are to be kept; the metrics, too, find it full once.

    What would be deleted in vain stays.
    """
    mounted = f'mount -t tmpfs -o size=4300K none {tmp_path} && exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", mounted, "bash", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ddp.REPOSITORY)
    *said, failed, left = done.stdout.splitlines()
    assert [line for line in said if "interval" not in line] == [
        *(f"checkpoint {step}" for step in range(1, 5)),
        *("room_made 5 [1]", "checkpoint 5"),
        *("room_made 6 [2]", "room_made 6 [3]", "checkpoint 6"),  # for the metrics, and for the file
        "checkpoint 7",
    ]
    reason = r"the checkpoint needs 3\.4 MiB, .* free \(No space left on device\)\. Keeping step 7"
    assert re.fullmatch(rf"checkpoint_failed 8 {reason}", failed) and left == "4 5 6 7"  # two would not make enough


def test_a_superseded_attempt_writes_nothing(directory: RunDirectory, checkpoint_client: Any) -> None:
    save(checkpoint_client, 1, state())
    directory.create_attempt()
    with raises(Superseded):
        save(checkpoint_client, 2, state())
    assert names(directory) == ["step-000000000001.attempt-0.safetensors"]


def test_too_little_memory_is_an_error_with_sizes_before_any_is_taken(
    checkpoint_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "free_memory", lambda: 1 << 20)
    with raises(CheckpointError):
        checkpoint_client.prepare(state(size=100_000_000))


@pytest.mark.parametrize(("shared_memory", "place"), [(True, "/dev/shm"), (False, "private")])
def test_where_memfds_are_refused_the_snapshot_is_a_file_without_a_name(
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shared_memory: Any,
    place: Any,
) -> None:
    """As by the seccomp filter of a container; its shared memory may be too small."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    files = set(directory.private.iterdir())
    if not shared_memory:
        monkeypatch.setattr(host_memory, "SHARED_MEMORY", Path("/proc"))
    checkpoint_client = CheckpointClient(directory, 0, Keep(2), torch.device("cpu"))
    try:
        checkpoint_client.prepare(state())
        assert save(checkpoint_client, 1, state()).step == 1
        assert save(checkpoint_client, 2, state(2.0, size=1 << 20)).step == 2
    finally:
        checkpoint_client.close()
    newest = max(directory.checkpoints.glob("step-*"))
    assert torch.equal(content_of(newest)["model"]["weight"], torch.full((1 << 20,), 2.0))
    said = capsys.readouterr().err
    assert place in said
    says(said)
    assert set(directory.private.iterdir()) == files


def test_the_writer_exits_with_its_rank(directory: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint_client = CheckpointClient(directory, 0, Keep(2), torch.device("cpu"))
    save(checkpoint_client, 1, state())
    pid = writer_pid()
    checkpoint_client.close()
    assert process_start(pid) is None
    assert capfd.readouterr().err == ""


def test_views_of_one_memory_are_restored_separately_when_their_values_differ(
    directory: RunDirectory, checkpoint_client: Any
) -> None:
    """Conjugates and negatives have the address, the dtype, the shape and the strides of the original."""
    numbers, plain = torch.randn(3, dtype=torch.complex64), torch.randn(4, 4)
    views = [numbers, numbers.conj(), numbers.imag, numbers.conj().imag, plain, plain.t(), plain[0], plain[:, 0]]
    save(checkpoint_client, 1, {"views": [*views, torch.empty(0), torch.empty(0, 2)]})
    (path,) = directory.checkpoints.iterdir()
    *read, empty, wide = content_of(path)["views"]
    assert all(map(torch.equal, read, views)) and (empty.shape, wide.shape) == ((0,), (0, 2))


class Rescaled(torch.nn.Module):
    """Its first version kept the scale otherwise."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state: Any, prefix: Any, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "scale"] = state[prefix + "scale"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("around", [lambda module: module, torch.compile], ids=["plain", "compiled"])
def test_a_module_is_given_the_version_that_its_state_was_saved_by(
    directory: RunDirectory, checkpoint_client: Any, around: Any
) -> None:
    make = lambda: torch.nn.Sequential(around(torch.nn.Sequential(Rescaled())))  # noqa: E731
    saved, fresh, own = make(), make(), {"inner": make().state_dict()}
    save(checkpoint_client, 1, {"model": state_of(saved), "other": own})
    (path,) = directory.checkpoints.iterdir()
    content = content_of(path)
    load_state(fresh, content["model"])
    assert [parameter.item() for parameter in fresh.parameters()] == [1.0]
    assert content["other"]["inner"]._metadata == own["inner"]._metadata  # type: ignore[attr-defined]


def test_the_state_of_a_module_that_was_saved_without_versions_is_loaded_as_before() -> None:
    """As by versions of clusterddp that did not save them."""
    module = torch.nn.Sequential(Rescaled())
    load_state(module, {"0.scale": torch.ones(1)})
    assert module[0].scale.item() == 10.0  # type: ignore[operator]


def test_keys_have_no_prefix_of_ddp_or_compile_and_load_into_both() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    compiled = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2)))  # type: ignore[call-overload]
    state = state_of(torch.compile(compiled))  # type: ignore[arg-type]
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state)
    load_state(compiled, {name: torch.zeros_like(value) for name, value in state.items()})
    assert all(not parameter.any() for parameter in compiled.parameters())
