"""Protects the saves of a script: a file is replaced only by a complete one, and a stop waits for a save.

``torch.save(state, "ckpt.pt")`` empties the file before it writes. A script that keeps one checkpoint and is preempted
in that moment has none. In a rank, ``torch.save`` and the ``save_file`` of safetensors therefore write to a new file on
the same file system, sync it, and rename it. Saves to file objects, devices and pipes stay as they are, and so does
``torch.jit.save``, which has its own format. torch's distributed checkpoints have several files, of which the last one
completes them: a stop waits for such a save, too.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import secrets
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterddp.import_hooks import when_imported
from clusterddp.messages.reports import Report, Wrote
from clusterddp.protocol import SAVING
from clusterddp.reporter import say
from clusterddp.rundir.files import fsync_directory, link_target, names_in, symlink, unlink
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.deferred_stops import DeferredStops

#: These lead to files that are already open.
_OPEN_FILES = ("/proc/", "/dev/fd/", "/dev/std")
#: The most files that are reported to the supervisor.
MOST_REPORTED = 8
#: Bytes that do not fit on a full disk.
PROBE_BYTES = 1 << 20
#: Errors for a folder that this user may not read, or on a file system that does not sync folders.
_CANNOT_SYNC = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP}


class ScriptSaves:
    """The saves of this process, protected from ``protect`` on. ``stops``: holds back those that come during a save.
    ``report`` sends an event to the supervisor."""

    def __init__(self, stops: DeferredStops, report: Callable[[Report], None]) -> None:
        self._stops, self._send = stops, report
        #: Entered around each save. ``training/script_steps.py`` keeps it out of the step times.
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        #: The folder with a link for each save in progress.
        self.records, self._attempt = Path(), 0
        #: The folders with a file whose saves are not protected.
        self._unprotected: set[Path] = set()
        #: The folders and suffixes of the files that were reported.
        self._reported: set[tuple[Path, str]] = set()

    def protect(
        self, run: str, attempt: int, handles_stops: Callable[[], bool], stop_signal: str | None = None
    ) -> None:
        """Protects the saves of this process from now on.

        ``run``: the run directory. ``handles_stops``: whether a stop does not end this process at once, so that it need
        not wait. ``stop_signal``: the signal that the script expects at a stop (key ``stop``), without SIG. Then TERM
        and USR2 lead to it.
        """
        self._stops.handles_stops = handles_stops
        if stop_signal is not None:
            self._stops.also({signal.SIGUSR2, signal.Signals[f"SIG{stop_signal}"]})
        self.records, self._attempt = RunDirectory(run).private.absolute(), attempt
        when_imported("torch", self._protect_torch)
        when_imported("torch.distributed.checkpoint.state_dict_saver", self._protect_distributed)
        for name in ("safetensors.torch", "safetensors.numpy"):
            when_imported(name, self._protect_safetensors)

    def _protect_torch(self, torch: ModuleType) -> None:
        torch.save = torch.serialization.save = self.protected(torch.save, "f")  # type: ignore[attr-defined]

    def _protect_safetensors(self, module: ModuleType) -> None:  # save_model calls save_file
        module.save_file = self.protected(module.save_file, "filename")  # type: ignore[attr-defined]

    def _protect_distributed(self, module: ModuleType) -> None:
        module.save = self._waited_for(module.save)  # type: ignore[attr-defined]
        module.async_save = self._waited_for_in_background(module.async_save)  # type: ignore[attr-defined]

    def _waited_for(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, for which a stop waits."""

        @functools.wraps(save)
        def saved(*args: Any, **options: Any) -> Any:
            with self.around(), self._stops.during_save():
                return save(*args, **options)

        return saved

    def _waited_for_in_background(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, for whose future a stop waits."""

        @functools.wraps(save)
        def begun(*args: Any, **options: Any) -> Any:
            with ExitStack() as held:
                held.enter_context(self._stops.during_save())
                found = save(*args, **options)
                release = held.pop_all().close
            # An AsyncSaveResponse has one future for the copy, and one for the files.
            getattr(found, "upload_completion", found).add_done_callback(lambda _: release())
            return found

        return begun

    def protected(self, save: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same function, protected. Its second argument, ``name``, is the file."""

        @functools.wraps(save)
        def save_whole(*args: Any, **options: Any) -> Any:
            named = name in options
            target = self._replaceable(options[name] if named else next(iter(args[1:]), None))
            if target is None:
                return save(*args, **options)
            with self.around(), self._stops.during_save():
                with self._replacing(target) as temporary:
                    if named:
                        saved = save(*args, **{**options, name: temporary})
                    else:
                        saved = save(args[0], temporary, *args[2:], **options)
                self._report(target)
                return saved

        return save_whole

    def _report(self, target: Path) -> None:
        """Reports a save, unless a similar one was reported, because a pattern in the job may not match it."""
        kind = target.parent, target.suffix
        if kind not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(kind)
            self._send(Wrote(file=str(target)))

    def _replaceable(self, path: Any) -> Path | None:
        """The regular file that a save to ``path`` writes, after symbolic links. None if it is not one, or the save
        will fail."""
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(text, str) or text.endswith("/") or str(Path(text).absolute()).startswith(_OPEN_FILES):
            return None
        try:
            target = Path(text).resolve()
            if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
                return None
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            return None
        folder = target.parent
        if os.access(folder, os.W_OK | os.X_OK) and folder.is_dir():
            return target
        if target.exists() and folder not in self._unprotected:
            self._unprotected.add(folder)
            say(
                f"saves to {target} are not protected against interruptions, because this user cannot create files in "
                f"{folder}"
            )
        return None

    @contextmanager
    def _replacing(self, target: Path) -> Iterator[str]:
        """A path with the same file name, whose file then replaces ``target``. If the block raises, the old file
        stays.

        The name is kept because torch writes it into the file. The new file is in a new folder beside ``target``. While
        that exists, the run directory has a link of the same name to the folder of ``target``, for ``sweep``.
        """
        beside = target.parent / f"{SAVING}{self._attempt}-{secrets.token_hex(4)}"
        record = self.records / beside.name
        try:
            symlink(record, beside.parent)
        except OSError as error:
            reason = f"could not record the temporary folder {beside} in {self.records}: {error.strerror}"
            say(f"{reason}. If this rank is killed during the save, delete that folder")
        try:
            beside.mkdir()
            temporary = beside / target.name
            yield str(temporary)
            _like_old(temporary, target)
            _sync(temporary)
            temporary.replace(target)
        except BaseException as error:
            if _is_full(error, beside):
                say(
                    f"not enough space to save {target}. A save needs space for the new file in addition to an "
                    "existing one, which is unchanged. Free space, or set `protect_saves: false` to overwrite files in "
                    "place"
                )
            raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            with suppress(OSError):
                unlink(record)
        try:
            fsync_directory(target.parent)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _like_old(temporary: Path, target: Path) -> None:
    """Gives the new file the mode and, if this user may do that, the owner and the group of the old one."""
    try:
        old = target.stat()
    except FileNotFoundError:
        return
    for owner, group in ((old.st_uid, -1), (-1, old.st_gid)):
        with suppress(PermissionError):
            os.chown(temporary, owner, group)
    temporary.chmod(stat.S_IMODE(old.st_mode))


def _is_full(error: BaseException, folder: Path) -> bool:
    """Whether the disk or the quota is full, which errors of torch's and safetensors' own writers do not show."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not isinstance(error, Exception):
        return False
    try:
        (folder / "probe").write_bytes(bytes(PROBE_BYTES))
    except OSError as failed:
        return failed.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


_RECORD = re.compile(re.escape(SAVING) + r"(\d+)-[0-9a-f]+")


def sweep(run: RunDirectory, attempt: int) -> None:
    """Removes what killed saves of earlier attempts have left, because the script may take it for a checkpoint.

    Each rank calls this before its script starts. Ranks may remove the same folder at the same time.
    """
    for name in names_in(run.private):
        match = _RECORD.fullmatch(name)
        if match is None or int(match[1]) >= attempt:
            continue
        record = run.private / name
        try:
            left = link_target(record) / name
            for file in left.iterdir():
                file.unlink(missing_ok=True)
            left.rmdir()
            unlink(record)
        except FileNotFoundError:  # another rank has removed it, or it is on the disk of another node
            pass
        except OSError as error:
            say(f"could not remove what a killed save of attempt {match[1]} has left: {error}")
