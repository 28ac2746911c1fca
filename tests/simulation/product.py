"""What the product's modules use in a simulated world instead of the machine: the interfaces, all of them.

By rule, in every module of the supervisor, of slurm/, of rundir/ and of the commands: the modules ``time``, ``queue``,
``threading``, ``random``, ``secrets``, ``socket`` and ``os`` (of which only environ and getpid are others), and each
function of ``rundir/files.py`` under the name by which it was imported. By name: ``subprocess`` of slurm/commands.py,
the control server, and what ``NAMED`` lists, which is no part of the protocol. The launcher is an argument.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import gc
import importlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from clusterddp import process, reporter
from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.sharded import client as shard_client
from clusterddp.checkpoint.sharded import folder as shard_folder
from clusterddp.checkpoint.sharded import rank_files
from clusterddp.cli import steering
from clusterddp.errors import RunDirectoryError
from clusterddp.history import codec as history_codec
from clusterddp.history.event import Event
from clusterddp.jobdef import masking
from clusterddp.jobdef import secrets as job_secrets
from clusterddp.jobdef.job import Job
from clusterddp.protocol import ATTEMPT
from clusterddp.rundir import claims, files, json_lines, ownership, records, run_directory, schemas, summary
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import pruning, request_client, submission, waiting
from clusterddp.slurm import commands, polling, queue, slurmd
from clusterddp.slurm import configuration as preemption_policy
from clusterddp.supervisor import (
    attempt,
    completion_marker,
    controller,
    history,
    hook,
    lease,
    main,
    recovery,
    script_checkpoints,
)
from clusterddp.supervisor.verdict import failure_text
from tests.simulation import shards, sweeps
from tests.simulation.disk import ALL, ATTEMPTS, CLAIMS, FILES, LINES, Disk
from tests.simulation.ranks import Cluster, Server
from tests.simulation.slurm import Slurm
from tests.simulation.world import Queues, Threading, Time, World

#: Loaded, and so replaced below.
LOADED = (submission, request_client, waiting, steering, ownership, history, recovery, completion_marker)
#: Packages whose modules run in the simulated world.
ROOMS = (
    "supervisor",
    "slurm",
    "rundir",
    "runs",
    "cli",
    "failures",
    "checkpoint.store",
    "checkpoint.checkpoint",
    "checkpoint.sharded",
    "jobdef",
    "reporter",
    "process",
)
#: The cluster's name.
CLUSTER = "sim"
#: Histories between two collections of garbage.
COLLECTED = 1000
#: Modules of the standard library that are replaced wherever a module of these packages has imported them.
_MODULES = {
    name: importlib.import_module(name) for name in ("time", "queue", "threading", "random", "secrets", "socket", "os")
}
#: Functions that are replaced under every name.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(files, name) for name in vars(Disk) if hasattr(files, name) and not name.startswith("_")},
    "make_private": run_directory.make_private,
    "process_start": process.process_start,
    "process_namespace": process.process_namespace,
    "check_run": ownership.check_run,
}


class _Part(ModuleType):
    """A module of the standard library, parts of which are others."""

    def __init__(self, real: ModuleType, **parts: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(vars(real))
        self.__dict__.update(parts)


class _Os:
    """The module ``os``, with the environment and the pid of the simulated process."""

    def __init__(self) -> None:
        self.world: World
        vars(self).update({name: value for name, value in vars(os).items() if name not in vars(_Os)})

    @property
    def environ(self) -> dict[str, str]:
        """The process's own."""
        return self.world.process.environ

    def getpid(self) -> int:
        """The process's own."""
        return self.world.process.pid

    def __getattr__(self, name: str) -> Any:  # for type checkers
        raise AttributeError(name)


@cache
def _public(kind: Hashable, *names: str) -> list[str]:
    """The names of a class and of an object of it."""
    return [name for name in {*dir(kind), *names} if not name.startswith("_")]


class _Current:
    """A module or function of the world that plays at the moment: patched once, for all histories."""

    def use(self, target: Any) -> None:
        """Gives it what ``target`` has, so that a call takes no detour."""
        vars(self).update({name: getattr(target, name) for name in _public(type(target), *vars(target))})  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:  # for type checkers: what ``use`` has not given
        raise AttributeError(name)


#: The modules of the current world.
_current = {name: _Current() for name in ("time", "queue", "threading", "random")}
_os = _Os()
_now: SimpleNamespace = SimpleNamespace(world=None, slurm=None, cluster=None, disk=None, histories=0)
#: Where functions of the disk are to be put: (module, name of the import, name).
_on_disk: list[tuple[ModuleType, str, str]] = []


def exists_now(path: Path) -> bool:
    """Whether there is a file, and no symbolic link."""
    return bool(_now.disk.exists(path))


def _token(count: int) -> str:
    return f"{_now.world.random.getrandbits(8 * count):0{2 * count}x}"


def _failure_text(*args: Any) -> str:
    """``failure_text``, which nobody reads unless the story is told. It reads logs, which may be slow, or fail."""
    disk: Disk = _now.disk
    return failure_text(*args) if _now.world.traced or disk.slow or disk.broken[0] else ""


def _of_process(pid: int) -> str | None:
    """Of a process on the same node: its start."""
    world: World = _now.world
    return f"start {pid}" if pid in world.alive_on(world.process.node) else None


def _print(*words: object, **_: Any) -> None:
    world: World = _now.world
    if world.thread is not None and world.traced:
        world.tell(world.thread.process.name, " ".join(map(str, words)).removeprefix("clusterddp: "))


def _patches() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: (module, name, by what)."""
    replaced: dict[int, Any] = {id(_MODULES[name]): _current[name] for name in ("time", "queue", "threading", "random")}
    replaced[id(_MODULES["secrets"])] = SimpleNamespace(token_hex=_token)
    replaced[id(_MODULES["socket"])] = _Part(socket, gethostname=lambda: _now.world.process.node)
    replaced[id(_MODULES["os"])] = _os
    on_disk = {id(function): name for name, function in _FUNCTIONS.items() if hasattr(Disk, name)}
    _on_disk.clear()
    replaced[id(process.process_start)] = _of_process
    replaced[id(process.process_namespace)] = lambda: f"machine {_now.world.process.node}"
    replaced[id(ownership.check_run)] = lambda _: None
    replaced[id(dataclasses.replace)] = _replace
    replaced[id(records.read_json)] = _read_json
    replaced[id(history_codec.decode)] = _decode
    # Their files have no descriptor, which shows how large a file is.
    replaced[id(records.read_record)] = lambda path: _now.disk.read_bytes(path)
    replaced[id(json_lines.open_lines)] = lambda path: _now.disk.open_binary(path)
    replaced.update(_reading())
    for name, module in list(sys.modules.items()):
        if module is None or module is files or not name.startswith(tuple(f"clusterddp.{room}" for room in ROOMS)):
            continue
        for attribute, value in list(vars(module).items()):
            if (by := replaced.get(id(value))) is not None:
                yield module, attribute, by
            elif (function := on_disk.get(id(value))) is not None:
                _on_disk.append((module, attribute, function))
                yield module, attribute, None  # `use` puts the disk's there
    yield reporter, "print", _print
    yield history, "print", _print
    yield (
        commands,
        "subprocess",
        _Part(commands.subprocess, run=lambda command, **more: _now.slurm.run(command, **more)),
    )
    yield commands, "require", lambda *_: None
    yield queue, "interrupted_by", lambda *_: nullcontext()
    yield polling, "_file", lambda: None
    yield polling, "_size", lambda path: _now.disk.size(path)
    yield recovery, "failure_text", _failure_text
    yield attempt, "ControlServer", lambda *args: Server(_now.cluster, *args)
    yield from NAMED
    yield from sweeps.patches(_now)
    yield from _remembered()


class _Call:
    """A call of the user's hook: ``subprocess.Popen`` for the product. Some cannot start, fail, or never end."""

    def __init__(self, command: object, env: Mapping[str, str], **_: object) -> None:
        world: World = _now.world
        if world.random.random() < 0.08:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "tell-me")
        self._world, self._attempt, self.pid, self.returncode = world, env[ATTEMPT], world.next_pid(), 0
        self._lasts_s = world.random.choice((0.1, 0.1, 5.0, 1e6))

    def communicate(self, told: bytes, timeout: float) -> None:
        """Until it has ended."""
        word = str(json.loads(told)["event"])
        self._world.tell(f"hook of {self._attempt}", word)
        _now.cluster.hooks.append((self._attempt, word))
        self._world.sleep(min(timeout, self._lasts_s))
        if self._lasts_s > timeout:
            raise subprocess.TimeoutExpired("hook", timeout)
        self.returncode = int(self._world.random.random() < 0.3)

    def wait(self) -> None:
        """It was killed."""


def _unreachable(run: object, *_: object) -> Iterator[dict[str, Any]]:
    """A step beside the ranks is not simulated."""
    raise RunDirectoryError(f"{run}: its supervisor cannot be reached")


def _paths(pattern: str, recursive: bool = False) -> list[str]:
    """``glob.glob``, which takes a file that it cannot look at for a missing one."""
    disk, (folder, _, name) = _now.disk, pattern.rpartition("/")
    try:
        return [f"{folder}/{each}" for each in disk.names_in(Path(folder)) if fnmatch.fnmatch(each, name)]
    except OSError:
        return []


def _is_too_old(path: Path, since: float) -> str | None:
    """For ``done``: the script's mark is empty."""
    try:
        return "it is older than this run" if _now.disk.status(path).st_mtime < since else None
    except OSError as error:
        return str(error.strerror)


def _read_head(path: Path) -> SimpleNamespace:
    return shards.head_of(_now.disk.read_bytes(path))


def _remove_empty(folder: Path) -> None:
    _now.disk.remove_empty(folder)


def _match(path: str) -> script_checkpoints._Match | None:
    try:
        return script_checkpoints._Match(path, int(_now.disk.status(Path(path)).st_mtime * 1e9))
    except OSError:
        return None


def _why_incomplete(path: str) -> str | None:
    try:
        return None if _now.disk.read_bytes(Path(path)).endswith(b"}") else "truncated"
    except OSError as error:
        return str(error.strerror)


#: The format of a rank's file of a sharded checkpoint.
_FORMAT = _Part(file_format, read_head=_read_head, verify=_read_head)
#: What is left out: git's state of the code, its snapshot, the ranks' command line, old logs, when slurmstepd began,
#: who owns files, what is in a checkpoint. The user's end of the control channel, the hook's process and a slurmd that
#: is asked are models.
NAMED: tuple[tuple[Any, str, Any], ...] = (
    (request_client, "ask", lambda *args: _now.cluster.ask(*args)),
    (request_client, "_through_a_step", _unreachable),
    (slurmd, "unanswering", lambda nodes: _now.cluster.unanswering(nodes)),
    (hook, "subprocess", _Part(subprocess, Popen=_Call)),
    (hook, "open", lambda *_, **__: io.BytesIO()),
    (hook, "ending_alone", lambda _: nullcontext()),
    (hook, "_kill", lambda _: None),
    (pruning, "load_resolved", lambda _: Job(name="sim", module="train", device="cpu")),
    (pruning, "_own", lambda path: exists_now(path)),
    (pruning, "size_of", lambda _: 0),
    (pruning.code_snapshot, "unused", lambda _: []),
    (shard_folder, "file_format", _FORMAT),
    (rank_files, "file_format", _FORMAT),
    (shard_folder, "remove_empty", _remove_empty),
    (pruning, "remove_empty", _remove_empty),
    (shard_client, "CheckpointClient", shards.Writer),
    (shard_client, "PackedShard", shards.Packed),
    (Checkpoint, "verify", lambda self: _now.disk.read_bytes(self.path)),
    (attempt, "code_state", lambda *_: {}),
    (attempt, "rank_command", lambda *_: []),
    (attempt, "code_snapshot", SimpleNamespace(present=lambda _: None)),
    (main, "delete_old_logs", lambda *_: None),
    (controller, "descendants", lambda _: {}),
    (controller, "batch_step_began", lambda: _current["time"].time()),
    (lease, "owner_of", lambda _: "ddp"),
    (completion_marker, "glob", SimpleNamespace(glob=_paths)),
    (completion_marker, "_why_not", _is_too_old),
    (script_checkpoints, "glob", SimpleNamespace(glob=_paths)),
    (script_checkpoints, "_match", _match),
    (script_checkpoints, "why_incomplete", _why_incomplete),
    (script_checkpoints, "_content", lambda path: hash(path)),
)


# --- what is pure is computed once: two thirds of the time would go into the same texts again and again


@cache
def _is_plain(kind: Any) -> bool:
    """Whether a dataclass's objects are what their fields say, and no more."""
    derived = any(isinstance(value, cached_property) for base in kind.__mro__ for value in vars(base).values())
    return "__post_init__" not in dir(kind) and "__slots__" not in vars(kind) and not derived


def _replace(value: Any, /, **changes: Any) -> Any:
    """``dataclasses.replace``, which calls ``__init__`` with all fields."""
    kind = type(value)
    if not _is_plain(kind):  # type: ignore[arg-type]
        return dataclasses.replace(value, **changes)
    made = object.__new__(kind)
    made.__dict__.update(value.__dict__, **changes)
    return made


#: Lines of files with what is in them, by schema.
_lines: dict[int, dict[bytes, tuple[Any, str | None]]] = {}
_parse = json_lines.parse


def _parsed_line(line: bytes, schema: schemas.Schema | None) -> tuple[Any, str | None]:
    """``json_lines.parse``. No line's value is changed by those who read it."""
    line = line.removesuffix(b"\n")
    known = _lines.setdefault(id(schema), {})
    if (found := known.get(line)) is None:
        found = known[line] = _parse(line, schema)
    return found


def _parsed(lines: Iterable[bytes], schema: schemas.Schema | None) -> Iterator[tuple[Any, str | None]]:
    """``json_lines.parsed``: each line by itself."""
    return (_parsed_line(line, schema) for line in lines)


#: Lines of histories with their events, by the id of the line.
_events: dict[int, tuple[Mapping[str, Any], Event]] = {}
_real_decode = history_codec.decode


def _decode(line: Mapping[str, Any]) -> Event:
    """``decode``. No event changes, and no line."""
    found = _events.get(id(line))
    if found is None:
        found = _events[id(line)] = line, _real_decode(line)
    return found[1]


#: Files with what is in them, by schema.
_files: dict[tuple[bytes, int], Any] = {}
_real_read_json = records.read_json


def _read_json(path: Path, schema: schemas.Schema | None = None) -> dict[str, Any] | None:
    """``records.read_json``, without checking a text again that has passed."""
    try:
        text = records.retrying(path, lambda: _now.disk.read_bytes(path))
    except FileNotFoundError:
        return None
    key = text, id(schema)
    if (found := _files.get(key)) is None:
        value: Any = json.loads(text or b"null")
        if schemas.schema_error(value, schema or {}):
            return _real_read_json(path, schema)  # raises
        found = _files[key] = value
    return dict(found)


@lru_cache(4096)
def _numbers(*folders: tuple[str, ...]) -> list[int]:
    found = {match for names in folders for match in map(run_directory._ATTEMPT.fullmatch, names) if match}
    return sorted({int(match[1]) for match in found})


def _attempts(run: RunDirectory) -> list[int]:
    """``RunDirectory.attempts``."""
    return list(_numbers(*(tuple(run_directory._names_in(folder)) for folder in (run.logs, run.private))))


def _remembered() -> Iterator[tuple[Any, str, Any]]:
    """Functions of the product whose results are remembered. What Slurm answers has unix times, which need no clock."""
    unix_time, parse_job, real_policy = commands.unix_time, commands.parse_job, preemption_policy.policy
    known_policy = lru_cache(256)(real_policy)

    def policy(configuration: str, *rest: Any) -> preemption_policy.Preemption:
        asks = "preempt/qos" in configuration  # the accounting
        return real_policy(configuration, *rest) if asks else known_policy(configuration, *rest)

    @lru_cache(4096)
    def time_of(text: str | None) -> float | None:
        return unix_time(text, None)

    @lru_cache(1024)
    def job_of(text: str) -> commands.JobInfo | None:
        return parse_job(text)

    def job(text: str) -> commands.JobInfo | None:
        start = text.find(" RunTime=") + len(" RunTime=")
        end = text.find(" ", start)
        ran = text[start:end]
        if not ran[:2].isdigit():
            return parse_job(text)
        found = job_of(f"{text[:start]}00:00:00{text[end:]}")
        return None if found is None else _replace(found, run_time_s=seconds(ran))

    seconds = lru_cache(4096)(commands._seconds)
    yield queue, "parse_queue", lru_cache(1024)(queue.parse_queue)
    yield commands, "unix_time", lambda text, near=None: time_of(text)
    yield commands, "_seconds", seconds
    yield commands, "parse_job", job
    yield commands, "for_parsing", lambda _: {}  # the model's answers do not depend on the environment
    yield commands, "cluster_name", lambda _: CLUSTER
    yield preemption_policy, "policy", policy
    is_secret = cache(masking.is_secret)
    yield masking, "is_secret", is_secret
    yield job_secrets, "is_secret", is_secret
    yield claims, "re", _Part(re, fullmatch=lru_cache(1024)(re.fullmatch))
    yield json_lines, "parse", _parsed_line
    yield json_lines, "parsed", _parsed
    yield history_codec, "decode", _decode
    yield RunDirectory, "attempts", _of_run("attempts", list, ATTEMPTS, _attempts)
    yield RunDirectory, "events", _of_run("events", list, LINES)
    yield RunDirectory, "outcome", _of_run("outcome", _same, FILES)
    yield summary, "_History", _of_run("ends", _same, LINES, summary._History)
    yield summary, "_claims", _of_run("claims", _same, CLAIMS, summary._claims)
    for name in ("attempt_logs", "attempt_private", "holder_file", "control_file", "resume_record"):
        yield RunDirectory, name, _once_per_run(vars(RunDirectory)[name])


def _reading() -> dict[int, Callable[..., Any]]:
    """Functions that only read, and find the same until something changes; by the id of what they replace."""
    holders, summarize = lease.holders, summary.summarize

    return {
        id(holders): _of_run("held", list, CLAIMS, holders),
        id(summarize): _of_run("summary", _same, ALL, summarize),
    }


def _of_run(
    name: str, copied: Callable[[Any], Any], what: int, method: Callable[[RunDirectory], Any] | None = None
) -> Callable[[RunDirectory], Any]:
    """A method of `RunDirectory`, or a function, that only reads ``what``."""
    read = method or vars(RunDirectory)[name]
    return lambda run: _now.disk.remembered(read, run, copied, what, name)


def _same(found: Any) -> Any:
    """Of what nobody changes."""
    return found


def _once_per_run(path_of: Callable[[RunDirectory, int], Path]) -> Callable[..., Path]:
    of: dict[tuple[str, int], Path] = {}

    def path(run: RunDirectory, attempt: int) -> Path:
        key = str(run.path), attempt
        if (found := of.get(key)) is None:
            found = of[key] = path_of(run, attempt)
        return found

    return path


@contextmanager
def installed() -> Iterator[None]:
    """While the block runs, the product's modules use the current world."""
    before: list[tuple[Any, str, Any]] = []
    gc.collect()
    gc.freeze()
    gc.disable()  # `use` collects what a number of histories have left: that takes a third of the time
    try:
        for module, name, by in list(_patches()):
            before.append((module, name, vars(module).get(name, _ABSENT)))
            setattr(module, name, by)
        yield
    finally:
        _now.disk = None
        for module, name, value in reversed(before):
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)
        gc.enable()


_ABSENT = object()


def use(world: World, slurm: Slurm, cluster: Cluster, disk: Disk) -> None:
    """Makes this world the current one."""
    _now.histories += 1
    if _now.histories % COLLECTED == 0:
        gc.collect()
        for known in (_lines, _events, _files):
            known.clear()
    before = _now.disk
    _now.world, _now.slurm, _now.cluster, _now.disk = world, slurm, cluster, disk
    _os.world = world
    _current["time"].use(Time(world))
    _current["queue"].use(Queues(world))
    _current["threading"].use(Threading(world))
    _current["random"].use(world.random)
    if disk is not before:
        for module, name, function in _on_disk:
            setattr(module, name, getattr(disk, function))
