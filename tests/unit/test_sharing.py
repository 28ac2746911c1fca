"""Changing who may read a run changes nothing else; files of other users are not trusted. Real files, real users."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from clusterddp.checkpoint.export import export
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.job import Job, Keep
from clusterddp.rundir import files
from clusterddp.rundir.deletion import delete_folder
from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.ownership import hold_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.recording import claim, recorded
from clusterddp.runs.sweep_submission import SweepFolder
from tests.checkpoint_files import save
from tests.histories import happened
from tests.other_user import UID, run_as_other
from tests.runs_on_disk import outcome_of
from tests.wording import raises

JOB = Job(name="net", module="net", device="cpu")


def record(run: RunDirectory, share: str) -> None:
    with recorded(run, Job(name="net", module="net", share=share, device="cpu"), created=False):  # type: ignore[arg-type]
        pass


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    record(run, "private")
    return run


def test_sharing_a_run_follows_no_link_out_of_it(run: RunDirectory, tmp_path: Path) -> None:
    """A linked data set keeps its modes, and so does a file that has another name elsewhere."""
    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    (data / "labels").touch()
    for path, other in ((data, 0o755), (data / "images", 0o700), (data / "labels", 0o604)):
        path.chmod(other)
    before = {path: mode(path) for path in (data, *data.iterdir())}
    (run.path / "data").symlink_to(data)
    (run.logs / "labels").symlink_to(data / "labels")
    os.link(data / "labels", run.path / "labels")
    (run.path / "dangling").symlink_to(tmp_path / "nowhere")
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(data)
    for share in ("group", "private"):
        record(run, share)
        assert {path: mode(path) for path in before} == before


def test_a_script_in_a_run_can_still_be_run_after_it_is_shared(run: RunDirectory) -> None:
    """By those who may read it."""
    script, text = run.path / "bin" / "train.sh", run.path / "notes"
    script.parent.mkdir()
    for path, own in ((script, 0o755), (text, 0o600)):
        path.touch()
        path.chmod(own)
    for share, of_script, of_text in (("group", 0o750, 0o640), ("private", 0o700, 0o600)):
        record(run, share)
        assert (mode(script), mode(text)) == (of_script, of_text)


def test_a_mode_that_cannot_be_changed_is_one_sentence_and_the_next_call_does_the_rest(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own folder is opened last."""
    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
        with raises(RunDirectoryError):
            record(run, "group")
    record(run, "group")
    assert (mode(run.path), mode(run.logs)) == (0o2750, 0o2750)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", ["private", "logs", "checkpoints"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    """In a run directory that its group could write until now."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.path.chmod(0o775)
    planted = run.path / name
    planted.mkdir(mode=0o700)
    os.chown(planted, UID, UID)
    with raises(RunDirectoryError):
        record(run, "private")
    assert (planted.stat().st_uid, list(planted.iterdir())) == (UID, [])


def test_a_link_in_the_place_of_the_private_folder_is_refused(tmp_path: Path) -> None:
    """Tokens would go where it points to."""
    run, elsewhere = RunDirectory(tmp_path / "run"), tmp_path / "elsewhere"
    run.path.mkdir()
    elsewhere.mkdir(mode=0o755)
    run.private.symlink_to(elsewhere)
    with raises(RunDirectoryError):
        record(run, "private")
    assert (mode(elsewhere), list(elsewhere.iterdir())) == (0o755, [])


def test_a_run_directory_is_closed_from_the_moment_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a umask of 002 the group could write there before the mode was set."""
    run, seen = RunDirectory(tmp_path / "run"), []
    made = files.make_own_folder
    monkeypatch.setattr(
        files, "make_own_folder", lambda path, *a, **k: (made(path, *a, **k), seen.append((path, mode(path))))[0]
    )
    before = os.umask(0o002)
    try:
        record(run, "group")
    finally:
        os.umask(before)
    assert dict(seen)[run.path] == 0o700


def test_a_user_without_a_name_and_a_home_has_no_defaults(open_folder: Path) -> None:
    """And still submits, also under a umask that removes the user's own permissions."""
    (open_folder / "train.py").write_text("print('trained')\n")
    words = ("submit", open_folder / "train.py", "--local", "--device", "cpu", "--run-dir", open_folder / "runs" / "a")
    done = run_as_other(sys.executable, "-m", "clusterddp", *words, umask=0o277)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    run = RunDirectory(open_folder / "runs" / "a")
    assert (outcome_of(run) or {})["state"] == "completed"
    assert (run.attempt_logs(0) / "rank-0.out").read_text() == "trained\n"


def test_another_member_of_the_group_can_fork_and_export_a_shared_run(open_folder: Path) -> None:
    """Without a look at `private`; of a closed run they get one sentence."""
    run, mine = RunDirectory(open_folder / "run"), open_folder / "mine"
    run.create(share="group")
    run.job_file.write_text(Job(name="net", module="net", device="cpu", share="group").to_yaml())
    for number, parent in enumerate((None, (0, 10))):
        assert run.create_attempt() == number
        Checkpoints(run, number, Keep()).record_resume(parent)
        event = {"event": "training"} if parent is None else {"event": "resumed", "parent": {"attempt": 0, "step": 10}}
        happened(run, {"time": 1.0, "attempt": number, **event})
        save(run, number, 10 * (number + 1), {"model": {"weight": torch.ones(2)}})
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, -1, UID)
        if path.is_dir() and run.private not in (path, *path.parents):
            path.chmod(0o2750)
        elif path.is_file():
            path.chmod(0o640)
    fork = (
        "import sys; from clusterddp.runs import recording; from clusterddp.rundir.run_directory import RunDirectory; "
        "into = RunDirectory(sys.argv[2]); into.create('private'); print(recording.copy_checkpoint(sys.argv[1], into))"
    )
    for step in (20, 10):
        done = run_as_other(sys.executable, "-c", fork, f"{run}@{step}", f"{mine}-{step}")
        assert (done.returncode, f"starts from checkpoint {step} of {run}" in done.stdout) == (0, True), done.stderr
    exporting = [sys.executable, "-m", "clusterddp", "export", run]
    assert run_as_other(*exporting, "10", open_folder / "model.pt").returncode == 0
    assert torch.load(open_folder / "model.pt", weights_only=True)["weight"].tolist() == [1, 1]
    run.path.chmod(0o700)
    for command in ([*exporting, open_folder / "no.pt"], [sys.executable, "-c", fork, run, f"{mine}-no"]):
        words = f"{run}: permission denied. Its owner can share the run with `clusterddp submit --run-dir RUN --change "
        assert words in run_as_other(*command).stderr


@pytest.mark.parametrize(("mode", "warned"), [(0o2770, True), (0o3770, False), (0o2750, False)])
def test_a_new_run_in_a_folder_where_others_can_rename_it_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warned: bool
) -> None:
    tmp_path.chmod(mode)
    claim(str(tmp_path / "run"), JOB)
    SweepFolder(tmp_path / "sweep").create("group")
    assert capsys.readouterr().err.count(f"chmod +t {tmp_path}") == 2 * warned


@pytest.mark.usefixtures("no_held_folders")
def test_a_command_deletes_nothing_through_a_link_in_a_held_folder(tmp_path: Path) -> None:
    """Nor does it write through one, and a folder that was put in the place of a held one stays as it is."""
    held, other = tmp_path / "held", tmp_path / "other"
    for folder in (held, other):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "file").write_text("mine")
    files.hold(held)
    held.rename(tmp_path / "moved")
    held.symlink_to(other)
    assert files.is_elsewhere(held) and not files.is_elsewhere(other)
    append_line(held / "lines", {"a": 1})
    files.write_atomically(held / "sub" / "new", "new")
    files.rename(held / "sub" / "new", held / "newer")
    files.create_folder(held / "more")
    files.symlink(held / "link", "newer")
    assert files.link_target(held / "link") == Path("newer")
    with raises(OSError):
        append_line(held / "link", {"a": 1})
    delete_folder(held / "sub")
    assert sorted(files.names_in(held)) == ["lines", "link", "more", "newer"]
    assert files.read_bytes(held / "newer") == b"new"
    assert [path.name for path in sorted(other.rglob("*"))] == ["sub", "file"]


@pytest.mark.usefixtures("no_held_folders")
def test_a_process_whose_script_has_closed_all_descriptors_still_reaches_its_run(tmp_path: Path) -> None:
    """And refuses another folder in its place, also if it got the number of a closed descriptor."""
    held, other = tmp_path / "held", tmp_path / "other"
    held.mkdir()
    other.mkdir()
    files.hold(held)
    number = files.held_descriptor(held)
    assert number is not None
    os.close(number)
    taken = os.open(other, os.O_RDONLY)
    os.dup2(taken, number)
    files.write_atomically(held / "a", "a")
    assert (held / "a").read_text() == "a" and os.listdir(other) == []
    os.dup2(taken, files.held_descriptor(held) or 0)
    held.rename(tmp_path / "moved")
    other.rename(held)
    with raises(FileNotFoundError):
        files.write_atomically(held / "b", "b")
    for each in {taken, number}:
        os.close(each)


@pytest.mark.usefixtures("no_held_folders")
def test_a_process_holds_more_folders_than_it_may_open(tmp_path: Path) -> None:
    """As for the members of a sweep. None of them can be replaced by another folder."""
    before = len(os.listdir("/proc/self/fd"))
    folders = [tmp_path / f"run-{number}" for number in range(100)]
    for folder in folders:
        folder.mkdir()
        files.hold(folder)
    for folder in folders:
        files.write_atomically(folder / "file", "mine")
        files.hold(folder, reopen=False)
    assert len(os.listdir("/proc/self/fd")) < before + 70
    assert [(folder / "file").read_text() for folder in folders] == ["mine"] * 100
    for folder in (folders[0], folders[-1]):
        folder.rename(folder.with_name(f"{folder.name}-old"))
        folder.mkdir()
    files.write_atomically(folders[0] / "file", "new")
    with raises(FileNotFoundError):
        files.write_atomically(folders[-1] / "file", "new")
    assert os.listdir(folders[0]) == os.listdir(folders[-1]) == []
    for folder in folders:
        if (descriptor := files.held_descriptor(folder)) is not None:
            os.close(descriptor)


def test_a_rank_whose_node_numbers_the_folder_differently_uses_it(tmp_path: Path) -> None:
    """As FUSE does on each node. A folder without the claim of the attempt's supervisor is refused."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.create_attempt()
    inode = run.path.stat().st_ino
    for other in (inode, inode + 1):
        write_json(run.holder_file(0), {"kind": "slurm", "job": "7", "run": {"path": "/elsewhere", "inode": other}})
        hold_run(run, other, 0)
    for seen, attempt in ((inode + 2, 0), (inode + 1, 1)):
        with raises(RunDirectoryError):
            hold_run(run, seen, attempt)


def test_an_export_writes_through_no_link_that_was_put_there_before(tmp_path: Path) -> None:
    """In a folder such as /tmp, where its temporary name could be known."""
    run, target, victim = RunDirectory(tmp_path / "run"), tmp_path / "model.pt", tmp_path / "victim"
    run.create()
    Checkpoints(run, run.create_attempt(), Keep()).record_resume(None)
    save(run, 0, 1, {"model": {"weight": torch.ones(2)}})
    victim.write_text("mine")
    (tmp_path / ".model.pt.tmp").symlink_to(victim)
    export(run, target, "model")
    assert (victim.read_text(), torch.load(target, weights_only=True)["weight"].tolist()) == ("mine", [1, 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.pt.tmp", "model.pt", "run", "victim"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("kind", ["dangling", "link", "folder", "below a dangling link", "file"])
def test_a_place_that_another_user_has_prepared_is_refused_unchanged(open_folder: Path, kind: str) -> None:
    """Of a run, named or numbered, and of a sweep: nothing is created, and no mode changes."""
    place, target = open_folder / "place", open_folder / "mine"
    target.mkdir(mode=0o750)
    if kind == "folder":
        place.mkdir(mode=0o777)
        place.chmod(0o777)
    elif kind == "file":
        place.touch()
    else:
        place.symlink_to(target if kind == "link" else open_folder / "nowhere")
    os.chown(place, UID, UID, follow_symlinks=False)
    if kind == "below a dangling link":
        place = place / "run"

    def found() -> list[tuple[str, int, int]]:
        return sorted((str(path), path.lstat().st_mode, path.lstat().st_uid) for path in open_folder.rglob("*"))

    before = found()
    with pytest.raises(RunDirectoryError, match=f"{open_folder}/place (is|belongs) ") as refused:
        claim(str(place), JOB)
    assert "\n" not in str(refused.value) and found() == before
    with pytest.raises(RunDirectoryError, match=f"{open_folder}/place (is|belongs) "):
        SweepFolder(place).check()
    if kind == "below a dangling link":
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("CLUSTERDDP_RUNS", str(place.parent))
            with pytest.raises(RunDirectoryError, match=f"{open_folder}/place is a symbolic link"):
                claim(None, JOB)
    assert found() == before


def test_a_users_own_link_to_a_folder_holds_their_run(tmp_path: Path) -> None:
    """Such as one to a larger file system."""
    (tmp_path / "large").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large")
    run, created = claim(str(tmp_path / "run"), JOB)
    assert (run.path, created) == (tmp_path / "run", False)


@pytest.mark.usefixtures("no_held_folders")
def test_a_file_of_a_deleted_folder_that_is_not_kept_open_is_already_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that holds many folders keeps only some of them open."""
    monkeypatch.setattr(files, "_MOST_OPEN", 0)
    folder = tmp_path / "folder"
    folder.mkdir()
    files.hold(folder)
    folder.rmdir()
    files.unlink(folder / "file")
