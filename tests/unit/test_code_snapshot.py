"""The snapshot of the code that a submission takes, of real git repositories."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from clusterddp import protocol
from clusterddp.cli.command_line import command
from clusterddp.errors import RunDirectoryError, SlurmError, UsageError
from clusterddp.jobdef.checkout import checkout_of
from clusterddp.jobdef.code_snapshot import Code, current, described, present, unused, use
from clusterddp.jobdef.code_state import changed_code
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import from_values, load_resolved
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.recording import Content, present_code, recorded, write_code
from clusterddp.supervisor.main import with_snapshot
from clusterddp.worker import code_paths
from tests.histories import view
from tests.wording import raises, says


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "protocol.file.allow=always"]
    return subprocess.check_output(["git", "-C", folder, *who, *arguments], text=True, stderr=subprocess.STDOUT)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files, by name, and the folders around them."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script and a package, one commit; it is the current folder."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    write(folder, {"scripts/train.py": "import net", "src/net.py": "WIDTH = 1", ".gitignore": "data/\n*.so\n"})
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    monkeypatch.delenv(protocol.RUNS, raising=False)
    return folder


@pytest.fixture
def run(repository: Path) -> RunDirectory:
    """A run in the repository, as by default."""
    run = RunDirectory(repository / "runs" / "train-0")
    run.path.parent.mkdir()
    run.create(share="private")
    return run


def job(**values: object) -> Job:
    return Job(**{"name": "x", "script": str(Path.cwd() / "scripts" / "train.py"), **values})  # type: ignore[arg-type]


def submit(run: RunDirectory, **values: object) -> str:
    """What a submission does with the code, and says."""
    return use(run, Code(checkout_of(job(**values), [Path("runs")]))) or ""


def folder_of(run: RunDirectory) -> Path:
    snapshot = current(run)
    assert snapshot is not None
    return snapshot.folder(run)


def files(folder: Path, links: bool = False) -> list[str]:
    """The names of its files, or of its links."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in found if path.is_symlink() == links)


def test_a_snapshot_has_tracked_changed_and_untracked_files_as_they_are_on_disk(
    repository: Path, run: RunDirectory
) -> None:
    """Also staged ones, and no deleted ones; the mode of a program, and text that is not UTF-8 in names."""
    write(repository, {"src/net.py": "WIDTH = 2", "new.py": "x", "staged.py": "y", "tool.sh": "#!/bin/sh", "gone": "z"})
    (repository / "tool.sh").chmod(0o755)
    odd = os.fsdecode(b"caf\xe9 \n*.py")
    (repository / odd).write_text("odd")
    git(repository, "add", "staged.py", "gone")
    git(repository, "commit", "-qm", "second", "gone")
    (repository / "gone").unlink()
    said = submit(run)
    folder = folder_of(run)
    expected = [".gitignore", odd, "new.py", "scripts/train.py", "src/net.py", "staged.py", "tool.sh"]
    assert files(folder) == sorted(expected)
    assert (folder / "src/net.py").read_text() == "WIDTH = 2"
    assert [(folder / name).stat().st_mode & 0o777 for name in ("tool.sh", "new.py")] == [0o700, 0o600]
    commit = git(repository, "rev-parse", "HEAD")[:8]
    assert said == f"code: commit {commit} + 6 changed files, snapshot code/{folder.name}"
    write(repository, {"src/net.py": "WIDTH = 3"})
    assert (folder / "src/net.py").read_text() == "WIDTH = 2"


def test_what_git_ignores_runs_and_env_files_are_linked_so_that_paths_beside_the_script_work(
    repository: Path, run: RunDirectory
) -> None:
    """Ignored folders as a whole, and those whose files are all ignored; a run anywhere; .env files, which may hold
    secrets. Not Python's caches."""
    write(
        repository, {"data/images": "big", "src/fast.so": "build", "new/a.py": "", "new/fast.so": "", ".env": "KEY=1"}
    )
    write(repository, {"src/__pycache__/net.pyc": "", "other/run/job.yaml": "", "other/run/private/x": ""})
    write(repository, {".gitignore": "data/\n*.so\n__pycache__/\n", "built/deep/all.so": "build"})
    submit(run)
    folder, found = folder_of(run), checkout_of(job(), [])
    assert files(folder, links=True) == [".env", "built", "data", "new/fast.so", "other/run", "runs", "src/fast.so"]
    assert found is not None and [name for name in found.linked if name.startswith("built")] == ["built"]
    assert (folder / "data/images").read_text() == "big"
    assert files(folder) == [".gitignore", "new/a.py", "scripts/train.py", "src/net.py"]


def test_an_unchanged_submission_uses_the_snapshot_that_is_there(repository: Path, run: RunDirectory) -> None:
    """Also after a commit of the same content, which is named; links to new data are added."""
    write(repository, {"src/net.py": "WIDTH = 2"})
    submit(run)
    first, inode = folder_of(run), folder_of(run).stat().st_ino
    git(repository, "commit", "-qam", "second")
    write(repository, {"data/images": "new"})
    assert submit(run) == f"code: commit {git(repository, 'rev-parse', 'HEAD')[:8]}, snapshot code/{first.name}"
    assert (folder_of(run).stat().st_ino, list(run.code.glob("*.tmp"))) == (inode, [])
    assert (first / "data/images").read_text() == "new"


def test_another_submission_takes_the_present_code_and_names_what_changed(repository: Path, run: RunDirectory) -> None:
    """And leaves the older snapshot, which can be deleted unless the script wrote into it."""
    submit(run)
    old = folder_of(run)
    for name in "abc":
        (repository / f"{name}.py").touch()
    write(repository, {"src/net.py": "WIDTH = 2", "scripts/train.py": "import net\nprint(net)"})
    said = submit(run)
    assert said.endswith("a.py, b.py, c.py, scripts/train.py and 1 more"), said
    assert f"Changed since the last submission (commit {git(repository, 'rev-parse', 'HEAD')[:8]}, snapshot" in said
    assert "print" in (folder_of(run) / "scripts/train.py").read_text()
    assert unused(run) == [old]
    write(old, {"src/__pycache__/net.pyc": ""})
    assert unused(run) == [old]
    write(old, {"scripts/result": "0.9"})
    assert unused(run) == []


def test_prune_deletes_the_code_that_a_run_does_not_use_any_more(
    repository: Path, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """With nothing behind its links."""
    run.job_file.write_text(job().to_yaml())
    run.outcome_file.write_text('{"state": "completed", "step": 1, "reason": ""}')
    write(repository, {"data/images": "big"})
    submit(run)
    old = folder_of(run)
    write(repository, {"src/net.py": "WIDTH = 2"})
    submit(run)
    assert command(["prune", str(run)]) == 0
    said = capsys.readouterr()
    assert f"code/{old.name}/" in said.out
    says(said.err)
    assert command(["prune", str(run), "--yes"]) == 0
    assert not old.exists() and folder_of(run).exists() and (repository / "data/images").exists()


def test_a_submission_without_a_snapshot_returns_the_run_to_its_checkout(repository: Path, run: RunDirectory) -> None:
    """And says so, once."""
    submit(run)
    name = folder_of(run).name
    said = use(run, Code(None)) or ""
    assert said.startswith("code: each attempt uses the checkout as it is") and said.endswith(f"code/{name}")
    assert (current(run), use(run, Code(None))) == (None, None)


def test_a_launched_function_that_is_continued_keeps_its_code(repository: Path, run: RunDirectory) -> None:
    """It is pickled in the run; only another launch takes the present code, as of the file that defines it."""
    source = repository / "src/net.py"
    function = job(script=None, module="clusterddp.function")
    write_code(run, present_code(function, None, source, batch=True))
    before = current(run)
    write(repository, {"src/net.py": "WIDTH = 2"})
    write_code(run, present_code(function, None, batch=True))
    assert before is not None and current(run) == before
    write_code(run, present_code(function, None, source, batch=True))
    assert current(run) != before


def test_a_refused_submission_leaves_the_run_with_its_earlier_code(repository: Path, run: RunDirectory) -> None:
    """As it leaves its job definition."""
    run.job_file.write_text(job().to_yaml())
    submit(run)
    before = current(run)
    write(repository, {"src/net.py": "WIDTH = 2"})
    content = Content(code=present_code(job(), None, batch=True))
    with pytest.raises(SlurmError), recorded(run, job(), False, content):
        assert current(run) != before
        raise SlurmError("refused")
    assert current(run) == before


def test_a_file_that_is_gone_or_closed_by_now_is_an_error_that_names_it(repository: Path, run: RunDirectory) -> None:
    """Such as an editor's temporary file; nothing is left of the copy."""
    write(repository, {"4913": ""})
    found = checkout_of(job(), [])
    (repository / "4913").unlink()
    with raises(RunDirectoryError):
        use(run, Code(found))
    assert (list(run.code.iterdir()), current(run)) == ([], None)


def test_submodules_and_repositories_inside_belong_to_it(repository: Path, run: RunDirectory, tmp_path: Path) -> None:
    """With their own untracked and ignored files; a script in a submodule has the repository around it."""
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    write(inner, {"part.py": "1", ".gitignore": "cache\n"})
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "inner")
    git(repository, "submodule", "add", "-q", str(inner), "third")
    git(repository, "clone", "-q", str(inner), "nested")
    write(repository, {"third/new.py": "2", "third/cache": "3"})
    submit(run, script=str(repository / "third" / "part.py"))
    folder = folder_of(run)
    own = [".gitignore", ".gitmodules", "scripts/train.py", "src/net.py"]
    parts = ["nested/.gitignore", "nested/part.py", "third/.gitignore", "third/new.py", "third/part.py"]
    assert (files(folder), files(folder, links=True)) == (sorted([*own, *parts]), ["runs", "third/cache"])


def test_symbolic_links_stay_links(repository: Path, run: RunDirectory, tmp_path: Path) -> None:
    """Into the repository, they lead into the snapshot."""
    (repository / "model.py").symlink_to("src/net.py")
    (repository / "away").symlink_to(tmp_path)
    (repository / "broken").symlink_to("nowhere")
    submit(run)
    folder = folder_of(run)
    assert (folder / "model.py").resolve() == folder.resolve() / "src/net.py"
    assert [(folder / name).readlink() for name in ("away", "broken")] == [tmp_path, Path("nowhere")]


def test_code_that_is_too_large_is_refused_and_the_message_names_what_is_large(repository: Path) -> None:
    """By file, or by folder where there are many; the ways out lead out."""
    with open(repository / "weights.bin", "wb") as file:
        file.truncate(80_000_000)
    (repository / "shots").mkdir()
    for number in range(3):
        with open(repository / "shots" / f"{number}.png", "wb") as file:
            file.truncate(10_000_000)
    with pytest.raises(UsageError) as caught:
        checkout_of(job(), [])
    text = str(caught.value)
    assert "would take 110 MB, more than 100 MB. The largest: weights.bin (80 MB), shots/ (30 MB in 3 files)" in text
    assert "--set snapshot=111M" in text and "scripts/" not in text and "--no-snapshot" in text
    assert checkout_of(job(snapshot="111M"), []) is not None
    write(repository, {".gitignore": "data/\n*.so\n*.bin\n"})
    found = checkout_of(job(), [])
    assert found is not None and "weights.bin" in found.linked


def test_many_small_files_are_large_too(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes at least a block of the disk."""
    monkeypatch.setattr("clusterddp.jobdef.checkout.MOST_BYTES", 4 * 4096)
    assert checkout_of(job(), []) is not None
    write(repository, {"a": "", "b": ""})
    with raises(UsageError):
        checkout_of(job(), [])


@pytest.mark.parametrize("where", ["outside", "ignored", "packaged", "module elsewhere"])
def test_a_program_that_is_no_file_of_a_repository_has_no_snapshot(
    repository: Path, tmp_path: Path, where: str
) -> None:
    """Outside of one, ignored by it (such as an environment in it), part of clusterddp, or an installed module."""
    write(tmp_path, {"train.py": ""})
    write(repository, {"data/train.py": ""})
    from clusterddp.cli.options import PACKAGED_JOB

    scripts = {"outside": tmp_path / "train.py", "ignored": repository / "data/train.py", "packaged": PACKAGED_JOB}
    values = {"script": None, "module": "json.tool"} if where == "module elsewhere" else {"script": str(scripts[where])}
    assert checkout_of(job(**values), []) is None
    with raises(UsageError):
        checkout_of(job(**values, snapshot=True), [])


def test_a_module_and_a_function_have_the_repository_of_their_code(repository: Path) -> None:
    """A module as python -m finds it, in the current folder first; a function by the file that defines it."""
    os.chdir(repository / "src")
    for values, source in (({"module": "net"}, None), ({"module": "clusterddp.function"}, repository / "src/net.py")):
        found = checkout_of(job(script=None, **values), [], source)
        assert found is not None and found.root == repository.resolve()
    assert checkout_of(job(script=None, module="clusterddp.function"), []) is None


def test_without_git_a_job_is_submitted_as_before_unless_it_asks_for_a_snapshot(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what the run uses instead."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert checkout_of(job(), []) is None
    said = capsys.readouterr().err
    says(said)
    with raises(UsageError):
        checkout_of(job(snapshot=True), [])


def test_variables_of_a_git_hook_do_not_lead_to_another_repository(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a push that submits a job."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    found = checkout_of(job(), [])
    assert found is not None and "scripts/train.py" in found.copied


def test_a_repository_without_a_commit_has_a_snapshot(tmp_path: Path, run: RunDirectory) -> None:
    """All its files are new."""
    folder = tmp_path / "fresh"
    folder.mkdir()
    git(folder, "init", "-q")
    write(folder, {"train.py": ""})
    assert submit(run, script=str(folder / "train.py")).startswith("code: no commit + 1 changed file, snapshot code/")


def test_a_shared_run_shares_its_code_but_no_file_that_was_closed(repository: Path, tmp_path: Path) -> None:
    """Folders and files are as readable as the run, and no more than the original."""
    run = RunDirectory(tmp_path / "shared")
    run.create(share="group")
    (repository / "src/net.py").chmod(0o600)
    submit(run)
    folder = folder_of(run)
    modes = [path.stat().st_mode & 0o777 for path in (run.code, folder / "src", folder / "scripts/train.py")]
    assert modes == [0o750, 0o750, 0o640]
    assert (folder / "src/net.py").stat().st_mode & 0o777 == 0o600


def test_a_snapshot_that_others_can_write_is_not_executed(run: RunDirectory) -> None:
    """Like any other part of the run directory that is."""
    submit(run)
    run.path.chmod(0o750)
    check_run(run)
    folder_of(run).chmod(0o777)
    with raises(RunDirectoryError):
        check_run(run)


def test_a_record_leads_nowhere_else(run: RunDirectory) -> None:
    """Its name of a folder is checked."""
    submit(run)
    run.code_file.write_text(run.code_file.read_text().replace(folder_of(run).name, "../../../../x"))
    with raises(RunDirectoryError):
        current(run)


def test_an_attempt_runs_the_script_in_the_snapshot_with_everything_else_as_submitted(
    repository: Path, run: RunDirectory
) -> None:
    """job.yaml names the original, for any version of clusterddp; a snapshot that was deleted is an error."""
    link = repository.parent / "link"
    link.symlink_to(repository)  # /home/me, which is a link to /mnt/7/me
    given = job(script=str(link / "scripts/train.py"))
    run.job_file.write_text(given.to_yaml())
    assert "snapshot" not in run.job_file.read_text()
    assert with_snapshot(run, given) == given
    submit(run)
    found = with_snapshot(run, load_resolved(run.job_file))
    assert found.script == str(folder_of(run) / "scripts/train.py")
    folder_of(run).rename(run.code / "away")
    with raises(RunDirectoryError):
        present(run)


def test_imports_come_from_the_snapshot_wherever_they_came_from_the_checkout(
    repository: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH, editable installs of either kind, the current folder; not what is only linked, or elsewhere."""
    write(repository, {"data/lib/x": "", "lib/tool/__init__.py": ""})
    submit(run)
    folder = folder_of(run)
    finder = ModuleType("__editable___tool_finder")
    finder.MAPPING = {"tool": str(repository / "lib/tool")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    hook = type("_EditableFinder", (), {"__module__": finder.__name__})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, hook])
    elsewhere = ["/usr/lib/python3", str(repository / "data/lib"), "__editable__.tool.finder.__path_hook__"]
    monkeypatch.setattr(sys, "path", [str(repository / "src"), "", *elsewhere])
    given = {"PYTHONPATH": f"{repository}/src:/opt/lib:"}
    variables = code_paths.mapped_variables(given, str(repository.resolve()), str(folder))
    assert variables["PYTHONPATH"] == f"{folder}/src:/opt/lib:{folder}"
    code_paths.use_snapshot()
    assert sys.path[0] == str(repository / "src")  # an attempt without a snapshot
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code_paths.use_snapshot()
    assert sys.path == [str(folder / "src"), str(folder), *elsewhere, str(folder / "lib")]
    before = list(sys.path)
    code_paths.use_snapshot()
    assert sys.path == before


def test_the_code_of_a_run_is_named_with_and_without_a_snapshot(run: RunDirectory) -> None:
    """For `status`; and an attempt after one of an older version did not change because it has a snapshot."""
    started = {"event": "started", "code": {"commit": "12345678abc", "changes": "ff"}}
    assert described(None, view([started])) == "commit 12345678 + uncommitted changes, no snapshot"
    for damaged in ({}, {"code": None}, {"code": "12345678abc"}):
        assert described(None, view([{"event": "started", **damaged}])) is None
    submit(run)
    snapshot = current(run)
    assert snapshot is not None and described(snapshot, view([started])) == snapshot.words()
    state = snapshot.state()
    assert changed_code({"commit": state["commit"], "changes": None}, state) == []
    assert changed_code({**state, "snapshot": "old"}, state) == [f"snapshot old -> {snapshot.snapshot}"]


@pytest.mark.parametrize(
    ("given", "read"), [("true", True), ("false", False), ("500M", "500M"), ("2G", "2G"), (None, None)]
)
def test_the_key_is_true_false_or_a_size(given: str | None, read: Sequence[object]) -> None:
    """And is recorded only if it is given."""
    found = from_values({"script": __file__, "job_name": "x"}, overrides={"snapshot": given} if given else None)
    assert found.snapshot == read
    assert ("snapshot: " in found.to_yaml()) == (given is not None)


def test_a_wrong_size_is_refused() -> None:
    """With what is right."""
    with raises(UsageError):
        from_values({"script": __file__}, overrides={"snapshot": "100"})
