"""Observes a script that trains with ``ctx.run()``: its checkpoints, its batches, what it logs, and what it passes to
``ctx.run()``. Its checkpoints are written by a separate process, so they are not seen where torch is called."""

from __future__ import annotations

import functools
import os
import resource
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterddp.import_hooks import when_imported
from clusterddp.protocol import RUN_DIR
from clusterddp.rehearsal.facts import Logged, Place
from clusterddp.rehearsal.observer import Observer, fill_disk, toggled
from clusterddp.rundir.run_directory import RunDirectory


def watch(observer: Observer, attempt: int) -> None:
    """Observes this process from now on."""
    run = _RunObserver(observer, attempt)
    when_imported("clusterddp.checkpoint.client", run.watch_saves)
    when_imported("clusterddp.training.saving", run.watch_restore)
    when_imported("clusterddp.training.loop", run.watch_loop)
    when_imported("clusterddp.training.context", run.watch_parts)
    if observer.orders.toggle_workers:
        when_imported("clusterddp.data.loader", run.toggle_workers)


class _RunObserver:
    """What an ``Observer`` of a script does not see by itself."""

    def __init__(self, observer: Observer, attempt: int) -> None:
        self._observer, self._attempt = observer, attempt
        self._began, self._disk_is_full = 0.0, False

    def _file(self, step: int, attempt: int) -> str:
        folder = RunDirectory(os.environ[RUN_DIR]).checkpoints
        return os.path.realpath(folder / f"step-{step:012d}.attempt-{attempt}.safetensors")

    def watch_saves(self, module: ModuleType) -> None:
        """Sees each save begin, and its result. In a save means that the writer has got the state."""
        client: Any = module.CheckpointClient
        save, result, observer = client.save, client.result, self._observer

        @functools.wraps(save)
        def observed_save(this: Any, step: int, *args: Any, **options: Any) -> None:
            file = self._file(step, self._attempt)
            self._began = time.monotonic()
            observer.save_began(file)
            if observer.disk_fills():
                this._start()
                self._limits, self._disk_is_full = fill_disk(this._writer.pid), True
            save(this, step, *args, **options)
            observer.at(Place.SAVE, Path(file).name)

        @functools.wraps(result)
        def observed_result(this: Any, wait: bool) -> Any:
            step = this._step
            try:
                found = result(this, wait)
            except module.NotSaved as error:
                self._ended(this, step, str(error))
                raise
            if found is not None:
                self._ended(this, step)
            return found

        client.save, client.result = observed_save, observed_result

    def _ended(self, client: Any, step: int, error: str = "") -> None:
        if self._disk_is_full:
            self._disk_is_full = False
            with suppress(ProcessLookupError, AttributeError):  # the writer has ended
                resource.prlimit(client._writer.pid, resource.RLIMIT_FSIZE, self._limits)
        self._observer.saved(self._file(step, self._attempt), time.monotonic() - self._began, error)

    def watch_restore(self, module: ModuleType) -> None:
        """Sees which checkpoint a run continues from."""
        saver: Any = module.Saver
        restore = saver.restore

        @functools.wraps(restore)
        def observed_restore(this: Any) -> Any:
            found = restore(this)
            if found is not None:
                attempt, step = found[1]
                self._observer.loaded(self._file(step, attempt))
            return found

        saver.restore = observed_restore

    def watch_loop(self, module: ModuleType) -> None:
        """Sees the batch of each step, and what the script logs."""
        run: Any = module.Run
        steps, log, observer = run.steps, run.log, self._observer

        def observed(this: Any, batches: Iterator[Any]) -> Iterator[Any]:
            with closing(batches):  # type: ignore[type-var]
                for batch in batches:
                    step, own = this.step, observer.loader if hasattr(observer.loader, "_shares") else None
                    samples = next(own._shares(step))[1] if own is not None else ()
                    observer.took(batch, samples, own is not None and (not step or own.ends_epoch(step - 1)))
                    if observer.loop_modules:
                        observer.begin_step()
                    yield batch
                    if observer.loop_modules:
                        observer.end_step()
                    if own is not None and own.ends_epoch(step):
                        observer.at(Place.EPOCH_END)

        @functools.wraps(steps)
        def observed_steps(this: Any, *args: Any, **options: Any) -> Iterator[Any]:
            return observed(this, steps(this, *args, **options))

        @functools.wraps(log)
        def observed_log(this: Any, *unnamed: Any, **values: Any) -> None:
            log(this, *unnamed, **values)
            if observer.number is not None:
                numbers = {name: observer.digest(value) for name, value in values.items() if name != "reduce"}
                observer.report(Logged(observer.number, numbers))

        run.steps, run.log = observed_steps, observed_log

    def toggle_workers(self, module: ModuleType) -> None:
        """Gives the loader of ``ctx.loader()`` two workers in place of none, and none in place of some."""
        loader: Any = module.Loader
        begin = loader.__init__

        @functools.wraps(begin)
        def observed_init(this: Any, *args: Any, **options: Any) -> None:
            begin(this, *args, **toggled(options))

        loader.__init__ = observed_init

    def watch_parts(self, module: ModuleType) -> None:
        """Sees what the script gives to ``ctx.run()``."""
        context: Any = module.Context
        make, observer = context.run, self._observer

        @functools.wraps(make)
        def observed_make(this: Any, **given: Any) -> Any:
            observer.loader = given.get("loader")
            observer.given = set(_ids(given))
            parts = [one for value in given.values() for one in _members(value)]
            if not any(hasattr(one, "param_groups") for one in parts):
                observer.loop_modules = [one for one in parts if hasattr(one, "parameters")]
            return make(this, **given)

        context.run = observed_make


def _members(value: Any) -> Iterator[Any]:
    """A part, or those in lists and dicts of parts."""
    if isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _members(one)
    else:
        yield value


def _ids(given: dict[str, Any]) -> Iterator[int]:
    """Of the parts, and of the modules in them."""
    for part in _members(given):
        yield id(part)
        if hasattr(part, "modules"):
            yield from map(id, part.modules())
