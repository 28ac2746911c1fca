"""The Python environment of the ranks on a disk of each node (``stage: /tmp``). Standard library only.

A submission packs the prefix of the interpreter into one file beside the runs (``pack``). The file has the name of the
environment's content, so that an unchanged environment is packed once. When a job starts, one process per node reads
that file and unpacks it as it is (``unpack``). Python finds its prefix from the path by which it is started, so nothing
in the copy is rewritten. What the prefix only refers to stays where it is: editable installs, the standard library of a
virtual environment, and the interpreter in the first line of console scripts.

A start looks at a fixed number of files of the shared environment, however many packages that has (``changed``).

Others may be able to write to the folder for the copies, such as /tmp. The copies are in a subfolder that only this
user can enter and that others cannot replace. A copy is renamed to its final name only after its listing has matched
that name and torch could be imported from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.reporter import what_failed
from clusterddp.rundir.files import open_file

#: Packed environments and copies that no job has used for this long are deleted.
UNUSED_S = 30 * 24 * 3600.0
#: Bytes that are read or written at a time.
_CHUNK = 1 << 22
_NAME = re.compile(r"[0-9a-f]{32}(?:\.tar)?(?P<incomplete>\.[0-9a-f]{8}\.tmp)?")
#: Without the current folder on sys.path, as in ``process.module_command``.
_ISOLATED = "import sys; sys.path = [*filter(None, sys.path)]\n"
_INSPECT = f"""{_ISOLATED}
import importlib.metadata, importlib.util, json, sysconfig
editable = []
for package in importlib.metadata.distributions():
    origin = json.loads(package.read_text("direct_url.json") or "{{}}")
    if origin.get("dir_info", {{}}).get("editable"):
        editable.append(package.metadata["Name"] + " (" + origin["url"].removeprefix("file://") + ")")
torch = importlib.util.find_spec("torch")
folders = sorted({{sysconfig.get_path(kind) for kind in ("purelib", "platlib", "scripts")}})
print(json.dumps([sys.prefix, sys.executable, torch and torch.origin, folders, sorted(editable)]))
"""
_IMPORT_TORCH = f"{_ISOLATED}import torch; print(torch.__file__)"


class NotStaged(ClusterddpError):
    """An environment cannot be copied to a node, or its copy cannot be used there. Nothing incomplete is used."""


@dataclass(frozen=True)
class Packed:
    """An environment in one file.

    ``name``: of its content. ``python``: its interpreter, relative to ``prefix``. ``size``: the file's, in bytes.
    ``files``: how many there are in it, apart from compiled modules. ``editable``: the packages that stay where they
    are. ``watched``: what an installation of a package changes, and ``state`` how it was.
    """

    archive: str
    name: str
    prefix: str
    python: str
    size: int
    files: int
    editable: Sequence[str]
    watched: Sequence[str]
    state: str


# --- on the login node


def pack(python: str, beside: Path) -> Packed:
    """Packs the environment of an interpreter into a file in a folder beside the runs, unless it is there already.

    Raises UsageError. Then there is no such file, and none is incomplete.
    """
    prefix, relative, watched, editable = inspect(python)
    folder = beside / f".environments-{os.geteuid()}"
    try:
        beside.mkdir(parents=True, exist_ok=True)
        _own_folder(folder)
        state, (name, files) = _state(watched), listing(prefix)
        archive = folder / f"{name}.tar"
        if archive.exists():
            os.utime(archive)
        else:
            _delete_unused(folder, time.time() - UNUSED_S)
            _write(prefix, archive)
            if (listing(prefix)[0], _state(watched)) != (name, state):
                archive.unlink()
                raise UsageError(f"stage: {prefix} has changed while it was packed. Submit again")
        size = archive.stat().st_size
    except NotStaged as error:
        raise UsageError(f"stage: {error}") from error
    except OSError as error:
        raise UsageError(f"stage: could not pack {prefix} into {folder}: {what_failed(error)}") from error
    return Packed(str(archive), name, str(prefix), relative, size, files, editable, watched, state)


def inspect(python: str) -> tuple[Path, str, list[str], list[str]]:
    """The prefix of an interpreter, its own path below that, the folders in which installations change something, and
    the editable packages. Raises UsageError if it is no environment with torch that can be copied."""
    try:
        done = subprocess.run([python, "-c", _INSPECT], capture_output=True, text=True, check=True)
        prefix, executable, torch, folders, editable = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise UsageError(f"stage: {python} failed: {_last_line(error.stderr)}") from error
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"stage: {python} is not a Python interpreter that can be started here ({error})") from error
    top = Path(prefix)
    if prefix in ("/", "/usr", "/usr/local"):
        raise UsageError(
            f"stage: {python} belongs to the system, and not to an environment that can be copied. Install torch in a "
            "virtual environment, and submit with its interpreter"
        )
    if torch is None or not Path(torch).resolve().is_relative_to(top.resolve()):
        where = f"torch is in {Path(torch).parent}" if torch else "torch is not installed"
        raise UsageError(f"stage: {where}, and not in the environment {prefix}. Install it there, or remove `stage`")
    found = [Path(executable), top / "bin/python", top / "bin/python3"]
    own = next((path for path in found if path.is_relative_to(top) and path.exists()), None)
    if own is None:
        raise UsageError(f"stage: the interpreter {executable} is not in its prefix {prefix}")
    watched = [*folders, *(str(path) for path in (top / "conda-meta/history", top / "pyvenv.cfg") if path.exists())]
    return top, str(own.relative_to(top)), watched, editable


def _write(prefix: Path, archive: Path) -> None:
    temporary = archive.with_name(f"{archive.name}.{secrets.token_hex(4)}.tmp")
    try:
        with (
            open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", _CHUNK) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar,
        ):
            for relative, status in _entries(prefix):
                _add(tar, prefix, relative, status)
            tar.close()
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(archive)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def _add(tar: tarfile.TarFile, prefix: Path, relative: str, status: os.stat_result) -> None:
    entry = tarfile.TarInfo(relative)
    entry.mtime, entry.mode = int(status.st_mtime), stat.S_IMODE(status.st_mode) | stat.S_IRUSR | stat.S_IWUSR
    if stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, _target(prefix, relative)
        tar.addfile(entry)
    elif stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        entry.mode |= stat.S_IXUSR
        tar.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        with open(prefix / relative, "rb") as file:
            entry.size = os.fstat(file.fileno()).st_size
            tar.addfile(entry, file)


# --- an environment's content


def listing(top: Path) -> tuple[str, int]:
    """The name of an environment's content, and how many files it has.

    Two trees have the same name if their files have the same paths, sizes and times of change. Compiled modules, which
    Python adds as it needs them, do not count.
    """
    digest, files = hashlib.sha256(), 0
    for relative, status in _entries(top, compiled=False):
        files += 1
        what = "/"
        if stat.S_ISLNK(status.st_mode):
            what = f"-> {_target(top, relative)}"
        elif stat.S_ISREG(status.st_mode):
            what = f"{status.st_size} {int(status.st_mtime)} {status.st_mode & stat.S_IXUSR}"
        elif not stat.S_ISDIR(status.st_mode):
            continue
        digest.update(f"{relative}\0{what}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32], files


def _entries(top: Path, compiled: bool = True) -> Iterator[tuple[str, os.stat_result]]:
    """All paths below a folder, relative to it, in a fixed order. Other environments of conda, and the packages that it
    has downloaded, are left out. ``compiled``: whether compiled modules are listed, too."""
    left_out = ("pkgs", "envs") if (top / "conda-meta").is_dir() else ()
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(top / folder) as found:
            items = sorted(found, key=lambda item: item.name)
        for item in items:
            if (folder == "" and item.name in left_out) or (item.name == "__pycache__" and not compiled):
                continue
            yield f"{folder}{item.name}", item.stat(follow_symlinks=False)
            if item.is_dir(follow_symlinks=False):
                folders.append(f"{folder}{item.name}/")


def _target(top: Path, link: str) -> str:
    """The target of a symbolic link: absolute if it is outside of the environment."""
    target = (top / link).readlink()
    outside = os.path.normpath(Path(link).parent / target).startswith("..")
    return os.path.normpath(top / Path(link).parent / target) if outside else str(target)


def changed(packed: Packed) -> str | None:
    """Why a packed environment is not what the ranks would use without it. None if it probably is."""
    if _state(packed.watched) != packed.state:
        return f"{packed.prefix} has changed since it was packed. To repack it, submit the run again"
    if not Path(packed.archive).exists():
        return f"{packed.archive} is missing. To repack {packed.prefix}, submit the run again"
    return None


def _state(watched: Sequence[str]) -> str:
    """When each of these was changed."""
    times = []
    for path in watched:
        try:
            times.append(Path(path).stat().st_mtime_ns)
        except FileNotFoundError:
            times.append(0)
    return " ".join(map(str, times))


# --- on a node


def unpack(packed: Packed, stage: Path, node: str) -> tuple[Path, bool]:
    """The complete copy of the environment on this node, and whether it was made now. Raises NotStaged."""
    try:
        home = _home(stage, node)
        with _locked(home):
            copy = home / packed.name
            if copy.exists() and listing(copy)[0] == packed.name:
                os.utime(copy)
                return copy, False
            _clear(home, copy)
            return _unpack(packed, home), True
    except OSError as error:
        raise NotStaged(f"could not unpack {packed.prefix} below {stage}: {what_failed(error)}") from error


def copy_of(packed: Packed, stage: Path) -> Path:
    """Where the copy is on every node."""
    return stage / _folder_name() / packed.name


def _home(stage: Path, node: str) -> Path:
    """The folder of this user's copies. NotStaged if others could put something else there, or if nodes share it."""
    if not stage.is_dir():
        raise NotStaged(f"{stage} is not a folder of this node")
    status, me = stage.stat(), os.geteuid()
    if status.st_uid not in (me, 0):
        raise NotStaged(f"{stage} belongs to user {status.st_uid}, who could replace what user {me} executes from it")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise NotStaged(f"others can write to {stage}, and so replace what user {me} executes from it")
    home = stage / _folder_name()
    _own_folder(home)
    (home / f"node-{node}").touch()
    if others := [name for name in os.listdir(home) if name.startswith("node-") and name != f"node-{node}"]:
        other = sorted(others)[0].removeprefix("node-")
        raise NotStaged(f"{stage} is the same folder on node {other}. `stage` needs a disk of each node's own")
    return home


def _folder_name() -> str:
    return f"clusterddp-{os.geteuid()}"


def _own_folder(path: Path) -> None:
    """Creates a folder that only this user can enter, or checks that the one which is there is one."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NotStaged(
            f"{path} (user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}) is not a folder that only user "
            f"{os.geteuid()} can enter. Remove it"
        )


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Lets one process per folder unpack at a time. Jobs of this user may share a node."""
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(home: Path, damaged: Path) -> None:
    """Deletes what makes no complete copy, such as one of which a cleaner of /tmp has deleted files."""
    if damaged.exists():
        damaged.rename(home / f"{damaged.name}.{secrets.token_hex(4)}.tmp")
    _delete_unused(home, time.time() - UNUSED_S, incomplete=True)


def _unpack(packed: Packed, home: Path) -> Path:
    copy, temporary = home / packed.name, home / f"{packed.name}.{secrets.token_hex(4)}.tmp"
    free = shutil.disk_usage(home).free
    if free < packed.size:
        raise NotStaged(f"{home} has {free / 1e9:.1f} GB free, and {packed.prefix} needs {packed.size / 1e9:.1f} GB")
    try:
        temporary.mkdir(mode=0o700)
        with open(open_file(packed.archive, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            _check_own(packed.archive, os.fstat(file.fileno()))
            # Python's tarfile needs six times the CPU time.
            tar = ["tar", "--extract", "--no-same-owner", "--blocking-factor=2048", f"--directory={temporary}"]
            done = subprocess.run([*tar, "--file=-"], stdin=file, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise NotStaged(f"could not unpack {packed.archive} into {home}: {_first_line(done.stderr)}")
        if listing(temporary)[0] != packed.name:
            raise NotStaged(f"{packed.archive} is damaged. Delete it, and submit the run again")
        _check_import(temporary, packed)
        temporary.rename(copy)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return copy


def _check_own(archive: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotStaged(f"{archive} belongs to user {status.st_uid}, or others can write it. Delete it")


def _check_import(copy: Path, packed: Packed) -> None:
    """Imports torch from a copy, which also brings it into memory."""
    try:
        done = subprocess.run([copy / packed.python, "-c", _IMPORT_TORCH], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise NotStaged(f"the copy of {packed.prefix} cannot import torch: {_last_line(error.stderr)}") from error
    if not Path(done.stdout.strip()).resolve().is_relative_to(copy.resolve()):
        raise NotStaged(f"the copy of {packed.prefix} imports torch from {done.stdout.strip()}")


def _delete_unused(folder: Path, before: float, incomplete: bool = False) -> None:
    """Deletes what was last used before this time. ``incomplete``: and what no process is writing any more."""
    for name in os.listdir(folder):
        if match := _NAME.fullmatch(name):
            path = folder / name
            with suppress(OSError):
                if (incomplete and match["incomplete"]) or path.lstat().st_mtime < before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed no reason"])[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed no reason"])[-1]
