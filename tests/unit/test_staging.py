"""Python environments on node-local disks: packed, unpacked, checked, and refused. "Nodes" are folders."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp import staging
from clusterddp.errors import UsageError
from clusterddp.staging import NotStaged, Packed, changed, copy_of, listing, pack, unpack
from clusterddp.supervisor.node_task import Plan
from tests import environments


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return environments.make(tmp_path / "env")


@pytest.fixture
def packed(python: Path, tmp_path: Path) -> Packed:
    return pack(str(python), tmp_path / "runs")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "n1").mkdir(mode=0o700)
    return tmp_path / "n1"


def left(node: Path) -> set[str]:
    """What is in the folder of copies, other than a lock and the node's mark."""
    home = node / f"clusterddp-{os.geteuid()}"
    return {path.name for path in home.iterdir()} - {"lock", "node-n1"} if home.is_dir() else set()


def test_a_copy_works_as_the_environment_does_and_a_node_that_has_it_does_nothing(
    python: Path, packed: Packed, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter finds the copy as its prefix, also once the shared environment is away. Links out of it lead to
    where they led."""
    copy, unpacked = unpack(packed, node, "n1")
    assert unpacked and copy == copy_of(packed, node) and copy.name == packed.name
    prefix = python.parents[1]
    assert (copy / "share/inside").readlink() == Path("../bin")
    assert (copy / "share/outside").readlink() == prefix.parent / "elsewhere"
    prefix.rename(prefix.with_name("away"))
    says = "import sys, package1, torch; print(sys.prefix, package1.__file__, torch.__file__)"
    said = subprocess.run([copy / packed.python, "-c", says], capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == str(copy) and all(word.startswith(str(copy)) for word in said.split())
    assert copy.parent.stat().st_mode & 0o777 == 0o700 and left(node) == {packed.name}
    monkeypatch.setattr(staging, "_unpack", None)
    assert unpack(packed, node, "n1") == (copy, False)


def test_an_environment_is_packed_once_until_its_content_changes(
    python: Path, packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that Python compiles do not count. An installation does, and a start notices it."""
    subprocess.run([python, "-c", "import package1, torch"], check=True)
    with monkeypatch.context() as without:
        without.setattr(staging, "_write", None)
        assert pack(str(python), tmp_path / "runs").name == packed.name
    assert changed(packed) is None
    environments.add(environments.packages_of(python.parents[1]), "new")
    assert "has changed since it was packed" in (changed(packed) or "")
    assert pack(str(python), tmp_path / "runs").name != packed.name
    assert len(list((tmp_path / "runs").glob(".environments-*/*.tar"))) == 2


@pytest.mark.parametrize("damage", ["deleted", "changed"])
def test_a_damaged_copy_is_replaced(damage: str, packed: Packed, node: Path) -> None:
    """As where /tmp is cleaned of old files."""
    copy, _ = unpack(packed, node, "n1")
    module = environments.packages_of(copy) / "package1/module1.py"
    if damage == "deleted":
        module.unlink()
    else:
        module.write_text("x = 23\n")
    assert unpack(packed, node, "n1") == (copy, True)
    assert module.read_text() == "x = 1\n" and left(node) == {packed.name}


def test_what_a_killed_process_left_is_deleted(packed: Packed, node: Path) -> None:
    home = node / f"clusterddp-{os.geteuid()}"
    (home / f"{packed.name}.0123abcd.tmp/lib").mkdir(parents=True)
    home.chmod(0o700)
    unpack(packed, node, "n1")
    assert left(node) == {packed.name}


def _fails(node: Path) -> None:
    (node / "bin").mkdir()
    (node / "bin/tar").write_text("#!/bin/sh\ncat > /dev/null\necho 'tar: a: No space left on device' >&2\nexit 2\n")
    (node / "bin/tar").chmod(0o755)


def _full_before(monkeypatch: pytest.MonkeyPatch, node: Path) -> None:
    usage = shutil.disk_usage(node)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))


def _full_while(monkeypatch: pytest.MonkeyPatch, node: Path) -> None:
    _fails(node)
    monkeypatch.setenv("PATH", f"{node}/bin:{os.environ['PATH']}")


def _no_import(monkeypatch: pytest.MonkeyPatch, node: Path) -> None:
    monkeypatch.setattr(staging, "_IMPORT_TORCH", "import torch.missing")


def _from_elsewhere(monkeypatch: pytest.MonkeyPatch, node: Path) -> None:
    (node / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(node))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_full_before, "GB free"),
        (_full_while, "No space left on device"),
        (_no_import, "cannot import torch: ModuleNotFoundError"),
        (_from_elsewhere, "imports torch from"),
    ],
)
def test_what_cannot_be_unpacked_or_used_leaves_nothing(
    fault: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    packed: Packed,
    node: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch, node)
    with pytest.raises(NotStaged, match=words):
        unpack(packed, node, "n1")
    assert left(node) == set()


def test_a_packed_file_that_is_damaged_leaves_nothing(packed: Packed, node: Path) -> None:
    """Cut short, or with other content than its name says."""
    archive = Path(packed.archive)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NotStaged):
        unpack(packed, node, "n1")
    archive.write_bytes(whole)
    with pytest.raises(NotStaged, match="damaged"):
        unpack(dataclasses.replace(packed, name="0" * 32), node, "n1")
    assert left(node) == set()


def test_a_folder_that_nodes_share_is_refused_on_each_of_them(packed: Packed, node: Path) -> None:
    unpack(packed, node, "n1")
    for name, other in (("n2", "n1"), ("n1", "n2")):
        with pytest.raises(NotStaged, match=f"the same folder on node {other}"):
            unpack(packed, node, name)


def test_a_folder_that_a_node_does_not_have_is_named(packed: Packed, node: Path) -> None:
    with pytest.raises(NotStaged, match=f"{node}/no is not a folder"):
        unpack(packed, node / "no", "n1")


@pytest.mark.parametrize("trap", ["link", "open", "foreign", "replaceable", "file"])
def test_a_folder_that_others_can_write_or_have_put_there_is_not_used(trap: str, packed: Packed, node: Path) -> None:
    """The copy is executed. A folder such as /tmp is open to all, but only the owner of a file can replace it."""
    home, elsewhere = node / f"clusterddp-{os.geteuid()}", node / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if trap == "link":
        home.symlink_to(elsewhere)
    elif trap == "open":
        home.mkdir()
        home.chmod(0o770)
    elif trap == "file":
        home.touch(0o600)
    elif trap == "replaceable":
        node.chmod(0o777)
    else:
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        home.mkdir(mode=0o700)
        os.chown(home, 12345, -1)
    with pytest.raises(NotStaged):
        unpack(packed, node, "n1")
    assert list(elsewhere.iterdir()) == []
    node.chmod(0o1777)
    if trap == "replaceable":
        unpack(packed, node, "n1")


def test_a_packed_file_that_another_user_may_have_written_is_not_unpacked(packed: Packed, node: Path) -> None:
    """Others may write the folder of runs, and so replace the folder beside them."""
    Path(packed.archive).chmod(0o620)
    with pytest.raises(NotStaged, match="others can write it"):
        unpack(packed, node, "n1")
    assert left(node) == set()


def test_a_copy_that_no_job_has_used_for_a_month_is_deleted(packed: Packed, node: Path) -> None:
    unpack(packed, node, "n1")
    home = node / f"clusterddp-{os.geteuid()}"
    for name, days in (("a" * 32, 31), ("b" * 32, 29), ("not ours", 31)):
        (home / name).mkdir()
        os.utime(home / name, (0, (home / packed.name).stat().st_mtime - days * 86400))
    (home / packed.name).rename(home / ("c" * 32))
    unpack(packed, node, "n1")
    assert left(node) == {packed.name, "b" * 32, "c" * 32, "not ours"}


def test_an_environment_that_cannot_be_copied_is_refused_and_nothing_is_written(tmp_path: Path, python: Path) -> None:
    """One without torch, the system's, and a file that is no interpreter."""
    shutil.rmtree(environments.packages_of(python.parents[1]) / "torch")
    for interpreter in (str(python), "/usr/bin/true", str(tmp_path / "none")):
        with pytest.raises(UsageError, match="stage: "):
            pack(interpreter, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_editable_packages_are_named(tmp_path: Path, python: Path) -> None:
    """They stay where they are."""
    folder = environments.packages_of(python.parents[1])
    (folder / "package1-1.0.dist-info/direct_url.json").write_text(
        json.dumps({"url": "file:///home/me/package1", "dir_info": {"editable": True}})
    )
    assert pack(str(python), tmp_path / "runs").editable == ["package1 (/home/me/package1)"]


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_left(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/env/secret")

    monkeypatch.setattr(staging, "_add", fail)
    with pytest.raises(UsageError, match="/env/secret: Permission denied"):
        pack(str(python), tmp_path / "runs")
    assert list((tmp_path / "runs").glob(".environments-*/*")) == []


def test_two_listings_agree_on_their_name(tmp_path: Path, python: Path) -> None:
    """A copy with the times of the files has the same one."""
    prefix = python.parents[1]
    (prefix / "share/outside").unlink()  # a relative link that leads out of it leads elsewhere from a copy
    shutil.copytree(prefix, tmp_path / "copy", symlinks=True)
    assert listing(prefix)[0] == listing(tmp_path / "copy")[0]
    (tmp_path / "copy/bin/python").unlink()
    assert listing(prefix)[0] != listing(tmp_path / "copy")[0]


#: A start: what the supervisor, one process of a node and a rank do. The rank imports every package.
START = """\
import json, subprocess, sys, time
from pathlib import Path
from clusterddp.codec import read
from clusterddp.staging import Packed, changed, unpack
packed = read(Packed, json.load(open(sys.argv[1])))
assert changed(packed) is None
copy, _ = unpack(packed, Path(sys.argv[2]), "n1")
names = [path.name for path in copy.glob("lib/python3*/site-packages/package*[0-9]")]
began = time.monotonic()
subprocess.run([copy / packed.python, "-c", f"import torch, {', '.join(names)}"], check=True)
print(time.monotonic() - began)
"""


def calls_on(place: str, trace: Path) -> int:
    """How many system calls with a path, such as open and stat, were made below it."""
    return sum(f'"{place}' in line for line in trace.read_text(errors="replace").splitlines())


#: What each start has, and what one of a copy has besides: the supervisor's look, and the process of the node.
SUPERVISOR = "import clusterddp.supervisor.main"
RANK = "import clusterddp, torch; layer = torch.nn.Linear(8, 8); layer(torch.ones(2, 8)).sum().backward()"
LOOK = """\
import json, sys
from clusterddp.codec import read
from clusterddp.staging import Packed, changed
assert changed(read(Packed, json.load(open(sys.argv[1]))["packed"])) is None
"""


@pytest.mark.product
@pytest.mark.timeout(1200)
def test_a_second_start_costs_at_most_1_2_times_that_from_a_local_disk(
    tmp_path: Path, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of CPU time, of the supervisor, one process of the node and one rank, which imports torch and makes a step. The
    environment has a real torch and more than 30,000 files."""
    python = environments.with_torch(tmp_path / "env", environments.LARGE)
    packed = pack(str(python), tmp_path / "runs")
    assert sum(len(files) for _, _, files in os.walk(tmp_path / "env")) > 30_000
    plan, source = tmp_path / "plan.json", str(Path(staging.__file__).parents[1])
    plan.write_text(json.dumps(dataclasses.asdict(Plan((), 600.0, str(node), packed))))
    environ = {**os.environ, "PYTHONPATH": source, "SLURMD_NODENAME": "n1"}

    def cost(*commands: list[str]) -> float:
        """In seconds."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for command in commands:
            with plan.open() as given:
                subprocess.run(command, stdin=given, env=environ, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    supervisor = [sys.executable, "-c", SUPERVISOR]
    setup = [
        [sys.executable, "-c", f"{SUPERVISOR}\n{LOOK}", str(plan)],
        [sys.executable, "-m", "clusterddp.supervisor.node_task"],
    ]
    first = cost(*setup)
    copied = str(copy_of(packed, node) / packed.python)
    local, staged = [], []
    for _ in range(7):
        local.append(cost(supervisor, [str(python), "-c", RANK]))
        staged.append(cost(*setup, [copied, "-c", RANK]))
    ratios = sorted(ours / theirs for ours, theirs in zip(staged, local, strict=True))
    with capsys.disabled():
        print(f"\n{packed.files} files, {packed.size / 1e9:.2f} GB: unpacked in {first:.1f} s of CPU time")
        print(f"local {sorted(local)}, staged {sorted(staged)}, ratios {ratios}")
    assert ratios[len(ratios) // 2] <= 1.2


@pytest.mark.product
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace counts the calls")
def test_a_start_makes_as_many_calls_on_the_shared_disk_for_30000_files_as_for_300(
    tmp_path: Path, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the node has the copy or not. Without a copy, they grow with the packages that are imported."""
    counts = []
    for number in (3, 300):
        shared = tmp_path / f"shared-{number}"
        python = environments.make(shared / "env", packages=number, modules=98)
        packed = pack(str(python), shared)
        (tmp_path / "packed.json").write_text(json.dumps(dataclasses.asdict(packed)))
        trace = tmp_path / "trace"
        strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-s", "4096", "-e", "trace=%file", "-o", str(trace)]
        start = [sys.executable, "-c", START, str(tmp_path / "packed.json"), str(node)]
        found = []
        for _ in ("first", "second"):
            subprocess.run([*strace, *start], check=True, capture_output=True)
            found.append(calls_on(str(shared), trace))
        counts.append(found)
        imports = f"import torch, {', '.join(f'package{one}' for one in range(number))}"
        subprocess.run([*strace, str(python), "-c", imports], check=True)
        with capsys.disabled():
            print(f"\n{packed.files} files: {found} calls, {calls_on(str(shared), trace)} without a copy")
    assert counts[0] == counts[1]
