"""A script's own saves: whole or not at all, in the place and with the mode of ``open``, and before a stop."""

from __future__ import annotations

import errno
import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import STOPPED
from clusterddp.protocol import SAVING
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import script_saves
from clusterddp.worker.deferred_stops import DeferredStops
from clusterddp.worker.script_saves import ScriptSaves
from tests.wording import raises

Save = Callable[..., Any]
LARGE = b"new" * 1000


def plain_save(value: bytes, f: Any) -> str:
    """As torch.save: opens the file first."""
    if not isinstance(f, (str, os.PathLike)):
        f.write(value)
        return "to an object"
    with open(f, "wb") as file:
        file.write(value[:5])
        if value == b"interrupted":
            raise KeyboardInterrupt
        if value == b"no room":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(value[5:])
    return "to a file"


@pytest.fixture
def save(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Save]:
    saves = ScriptSaves(DeferredStops(), lambda _: None)
    saves.records = tmp_path_factory.mktemp("records")
    yield saves.protected(plain_save, "f")
    assert not list(saves.records.iterdir())


def test_a_save_replaces_the_file_by_a_whole_one_of_the_same_mode(save: Save, tmp_path: Path) -> None:
    """A new file follows the umask, and what it is renamed from is gone."""
    old = tmp_path / "old.pt"
    old.write_bytes(b"old")
    old.chmod(0o640)
    before = old.stat().st_ino
    umask = os.umask(0o027)
    try:
        assert save(LARGE, old) == save(LARGE, f=str(tmp_path / "new.pt")) == "to a file"
    finally:
        os.umask(umask)
    assert old.read_bytes() == LARGE and old.stat().st_ino != before
    assert stat.S_IMODE(old.stat().st_mode) == stat.S_IMODE((tmp_path / "new.pt").stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.pt", "old.pt"]


def test_a_link_stays_and_its_target_is_replaced(save: Save, tmp_path: Path) -> None:
    """Also where the target does not exist yet, and is named relative to the link."""
    (tmp_path / "disk").mkdir()
    link = tmp_path / "latest.pt"
    link.symlink_to(Path("disk", "ckpt.pt"))
    for content in (b"first", LARGE):
        save(content, link)
        assert link.is_symlink() and (tmp_path / "disk" / "ckpt.pt").read_bytes() == content
    assert len(list((tmp_path / "disk").iterdir())) == 1


@pytest.mark.parametrize(("value", "error"), [(b"interrupted", KeyboardInterrupt), (b"no room", OSError)])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str], value: bytes, error: type[BaseException]
) -> None:
    """A full disk is explained: a protected save needs more room than an unprotected one."""
    path = tmp_path / "ckpt.pt"
    path.write_bytes(b"old")
    with pytest.raises(error):
        save(value, path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    said = capfd.readouterr().err
    assert (
        f"not enough space to save {path}. A save needs space for the new file in addition to an existing one" in said
    ) == (error is OSError)


def test_what_is_no_file_is_left_to_the_function_itself(save: Save, tmp_path: Path) -> None:
    """Objects, devices, pipes, and places that give an error."""
    assert save(b"x", io.BytesIO()) == "to an object"
    assert save(b"x", os.devnull) == save(b"x", "/dev/fd/1") == "to a file"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save(b"through", pipe)
    assert os.read(reader, 100) == b"through" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    with pytest.raises(FileNotFoundError) as missing:
        save(b"x", tmp_path / "missing" / "ckpt.pt")
    assert Path(missing.value.filename) == tmp_path / "missing" / "ckpt.pt"
    with pytest.raises(IsADirectoryError):
        save(b"x", tmp_path)


@pytest.mark.parametrize(("number", "raised"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_fails_no_save(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: bool
) -> None:
    """An error of the disk does."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with raises(OSError) if raised else nullcontext():
        save(LARGE, tmp_path / "ckpt.pt")
    assert (tmp_path / "ckpt.pt").read_bytes() == LARGE


IN_A_PROCESS = """
import os, signal, sys, threading
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import rank_process
RunDirectory("run").create()
saves = rank_process.current().saves
saves.protect("run", 0, lambda: False)
who, how = sys.argv[1:]

def refuse(*_):
    raise PermissionError

if how == "refused":
    os.memfd_create = refuse
elif how == "missing" and hasattr(os, "memfd_create"):
    del os.memfd_create

def slow_save(value, f):
    with open(f, "w") as file:
        file.write("who")
        if how == "killed":
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000 if how == "often" else 2):
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "forking":
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            file.write(f" {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
        if how == "nested" and f.endswith("ckpt.pt"):
            save(value, "inner.pt")
        file.write(" whole")

if how == "handled":
    signal.signal(signal.SIGTERM, lambda *_: print("handler", open("ckpt.pt").read()))
save = saves.protected(slow_save, "f")
if who == "thread":
    thread = threading.Thread(target=save, args=(0, "ckpt.pt"))
    thread.start()
    thread.join()
else:
    save(0, "ckpt.pt")
print("after", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


@pytest.mark.parametrize("who", ["main", "thread"])
@pytest.mark.parametrize(
    ("how", "code", "content", "said"),
    [
        ("plain", -15, "who whole", ""),
        ("handled", 0, "who whole", "handler who whole\nafter False\n"),
        ("nested", -15, "who whole", ""),
        ("forking", -15, "who -15 whole", ""),
        ("often", -15, "who whole", ""),
        ("refused", -15, "who whole", ""),
        ("missing", -15, "who whole", ""),
    ],
)
def test_a_stop_waits_for_the_save_and_then_takes_its_effect(
    tmp_path: Path, who: str, how: str, code: int, content: str, said: str
) -> None:
    """TERM ends the process, or calls the script's handler. A forked child gets it at once. Python or the system may
    lack memfd_create."""
    command = [sys.executable, "-c", IN_A_PROCESS, who, how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    assert (tmp_path / "ckpt.pt").read_text() == content
    assert (tmp_path / "inner.pt").exists() == (how == "nested")
    assert not list(tmp_path.rglob(f"{SAVING}*"))


DISTRIBUTED = """
import os, signal, sys
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import rank_process
RunDirectory("run").create()
rank_process.current().saves.protect("run", 0, lambda: False)
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

class Part:
    def state_dict(self):  # async_save calls it before its thread starts
        os.kill(os.getpid(), signal.SIGTERM)
        return {"w": torch.ones(3)}

    def load_state_dict(self, state): ...

class Writer(FileSystemWriter):
    def finish(self, metadata, results):
        os.kill(os.getpid(), signal.SIGTERM)
        super().finish(metadata, results)
        print("whole", flush=True)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = getattr(dcp, sys.argv[1])({"part": Part()}, storage_writer=Writer("dcp"))
if sys.argv[1] == "async_save":
    found.result()
    signal.pause()
print("after")
"""


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_a_stop_waits_for_a_save_with_several_files(tmp_path: Path, name: str) -> None:
    done = subprocess.run([sys.executable, "-c", DISTRIBUTED, name], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-15, "whole\n"), done.stderr
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_what_a_killed_save_leaves_is_removed_by_the_next_attempt(tmp_path: Path) -> None:
    """A save of the same attempt may still be in progress. That on the disk of a different node stays known."""
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS, "thread", "killed"], cwd=tmp_path)
    assert done.returncode == -9
    [left] = tmp_path.glob(f"{SAVING}*")
    assert (left / "ckpt.pt").read_text() == "who"
    run = RunDirectory(tmp_path / "run")
    script_saves.sweep(run, 0)
    assert left.is_dir()
    elsewhere = run.private / f"{SAVING}0-00112233"
    elsewhere.symlink_to(tmp_path / "only on the other node")
    script_saves.sweep(run, 1)
    assert not left.exists() and list(run.private.iterdir()) == [elsewhere]


LAUNCHED = """
import os, signal, sys
from submitit.core.utils import DelayedSubmission
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import function, rank, rank_process

def slow_save(value, f):
    with open(f, "w") as file:
        file.write("begun")
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        file.write(" whole")

class Trains:
    def __call__(self):
        rank_process.current().saves.protected(slow_save, "f")(0, "ckpt.pt")

    def checkpoint(self):
        print("checkpoint", open("ckpt.pt").read())
        return DelayedSubmission(self)

run = RunDirectory("run")
run.create()
rank_process.current().saves.protect("run", 0, rank.stops_at_a_step)
function.PreemptibleCall(run, run.create_attempt(), 0, DelayedSubmission(Trains())).carry_out()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_the_checkpoint_of_a_launched_function_is_called_after_the_save(tmp_path: Path, name: str) -> None:
    """By the signal of a preemption, or by that before the time limit."""
    command = [sys.executable, "-c", LAUNCHED, name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (STOPPED, "checkpoint begun whole\n"), done.stderr


IMPORTING = """
import importlib.util, multiprocessing, sys

def save_in_child():
    from torch import save
    save(0, "child.pt")

if __name__ == "__main__":
    from clusterddp.worker import rank_process, spawned_children
    rank_process.current().saves.protect("run", 0, lambda: False)
    spawned_children.prepare_children("run", 0, protect=True, steps=False)
    assert "torch" not in sys.modules and importlib.util.find_spec("torch")
    from torch import save
    import torch.serialization
    from safetensors.numpy import save_file
    assert save is torch.serialization.save and save.__name__ == "save"
    save(0, "a.pt"), save_file({}, filename="b.st")
    child = multiprocessing.get_context("spawn").Process(target=save_in_child)
    child.start()
    child.join()
"""


def test_the_functions_are_replaced_before_a_script_can_import_them(tmp_path: Path) -> None:
    """Also if the script has asked before whether the package is there, and in processes that it spawns. Nothing is
    imported without the script."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch.serialization import save\n")
    (tmp_path / "torch" / "serialization.py").write_text("def save(obj, f): open(f, 'w').write(f)\n")
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("")
    of_numpy = "def save_file(tensors, filename): open(filename, 'w').write(str(filename))\n"
    (tmp_path / "safetensors" / "numpy.py").write_text(of_numpy)
    (tmp_path / "script.py").write_text(IMPORTING)
    command = [sys.executable, "script.py"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("a.pt", "b.st", "child.pt"):
        assert SAVING in (tmp_path / name).read_text(), name
