"""What a training script works with: ``clusterddp.init()`` joins the process group and returns a Context.

Rank 0 prints its progress as a line in its log every few seconds. A thread reads the end of metrics.jsonl, so that a
step does no work for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp import environment
from clusterddp.checkpoint.parts import Stateful
from clusterddp.checkpoint.restore import newest_progress
from clusterddp.checkpoint.sharded.sharding import Sharding
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.data import randomness
from clusterddp.data.loader import Loader
from clusterddp.data.samplers import Loaders
from clusterddp.data.training_loader import training_loader
from clusterddp.data.workers import close_workers, shield_workers
from clusterddp.distributed import collectives, devices, process_group, wrapping
from clusterddp.distributed.bucket_order import KEY, BucketOrders, Names
from clusterddp.distributed.process_group import NO_TIMEOUT
from clusterddp.distributed.torch_patches import watch_graphs
from clusterddp.errors import DeviceError, Stopped
from clusterddp.history.beginnings import NotUsed, Phase
from clusterddp.history.steps import Evaluated
from clusterddp.jobdef.job import Checkpointing
from clusterddp.jobdef.tracking import check_packages
from clusterddp.messages.reports import Connected, Connecting
from clusterddp.process import at_exit, cancel_at_exit, collect_as_usual
from clusterddp.reporter import say
from clusterddp.rundir.progress import recent
from clusterddp.training import script_loop, script_steps, settings, warm_start
from clusterddp.training.best_checkpoint import metric_or_part, with_best
from clusterddp.training.heartbeat import WatchedSteps, begin_heartbeat
from clusterddp.training.loop import Run, Services
from clusterddp.training.metrics import DONE_S, ERROR_S, STOP_S, Tracking
from clusterddp.training.run_state import Given, Randomness
from clusterddp.training.saving import Saver
from clusterddp.training.script_state import Parts, PerRank, Values, by_name
from clusterddp.training.settings import AttemptHistory
from clusterddp.training.step_timing import Evaluations, step_times
from clusterddp.training.stopping import Stopping, open_store
from clusterddp.training.warm_start import Files
from clusterddp.worker import rank_process
from clusterddp.worker.rank_exit import Training
from clusterddp.worker.rank_process import RankProcess

if TYPE_CHECKING:
    from clusterddp.training.settings import Settings


class ProgressLines:
    """Prints from its creation until ``close()``, after each ``every_s`` seconds in which a step was completed.

    Args:
        training: the state of this process's training loops.
        metrics: the run's metrics.jsonl.
        attempt: the number of this attempt.
        every_s: seconds between lines.
    """

    def __init__(self, training: Training, metrics: Path, attempt: int, every_s: float) -> None:
        self._training = training
        self._metrics, self._attempt, self._every_s = metrics, attempt, every_s
        self._shown = -1
        self._end = threading.Event()
        threading.Thread(target=self._print, name="progress", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()

    def _print(self) -> None:
        while not self._end.wait(self._every_s):
            if (line := self.line()) and not has_own_display():
                say(line)

    def line(self) -> str | None:
        """The line, if the loop runs and has completed a step since the last line."""
        loop = self._training.loop
        if loop is None or loop.left_at is not None:
            return None
        found = recent(self._metrics)
        if found is None or found.attempt != self._attempt or found.done == self._shown:
            return None
        self._shown = found.done
        return found.line(loop.steps)


def has_own_display() -> bool:
    """Whether stderr is a terminal, as with --debug, or the script draws a bar of tqdm there."""
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    return len(bars) > 0 or (sys.stderr is not None and sys.stderr.isatty())


def begin(process: RankProcess, read: Settings, attempt: int) -> ProgressLines | None:
    """Only in a run's job. A local run's command shows the progress itself. Elsewhere, the script's launcher and its
    user decide what is printed."""
    directory, every_s = read.run_dir, read.job.progress_interval
    ours = process.supervised and read.ranks.launcher != "local"
    if read.ranks.rank != 0 or not ours or directory is None or every_s is None:
        return None
    return ProgressLines(process.training, directory.metrics_file, attempt, every_s)


def init(
    *,
    seed: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    checkpoint: Checkpointing | None = None,
) -> Context:
    """Joins the process group with all ranks, and seeds torch, ``random`` and numpy equally on all of them.

    A script may also make its own process group, with any backend, before or after. That group is then used as it is,
    random generators are not seeded, and the script destroys its group itself.

    Works under ``clusterddp submit``, srun, torchrun, submitit, and in a single process. Call it once per process, in
    its main thread.

    Args:
        seed: for the order of samples and all random numbers, unless the job definition sets ``seed``. If None, 0.
        device: "cpu", "cuda" or "cuda:N". In a job, the job's device applies. If None, a GPU if one is visible.
        backend: of torch.distributed, such as "gloo", unless the job definition sets ``backend``. If None, NCCL for
            tensors on GPUs and gloo for those on CPUs.
        run_dir: where to save if no ``clusterddp submit`` started this process. If None, the run is not saved.
        checkpoint: how often to save there. In a job, the job definition applies.

    Raises RuntimeError outside the main thread and when called twice. TypeError for a seed that is not a number.
    LauncherEnvironmentError when the launcher's variables are contradictory or rank 0 cannot be reached. DeviceError
    when there are too few GPUs.
    """
    process = rank_process.current()
    if process.context is not None:
        raise RuntimeError("clusterddp.init() was already called in this process. Use the context that it returned")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("clusterddp.init() must be called in the main thread, because it installs signal handlers")
    if script_loop.began(process):
        raise RuntimeError("clusterddp.init() must come before the first clusterddp.stop_requested()")
    if seed is not None and (not isinstance(seed, Real) or seed != seed):  # NaN differs from the recorded one
        raise TypeError(f"clusterddp.init(seed={seed!r}): expected an integer")
    environment.drop_inherited(os.environ)
    environment.check_is_rank(os.environ)
    read = settings.read(os.environ, seed=seed, device=device, backend=backend, run_dir=run_dir, checkpoint=checkpoint)
    if read.attempt is not None or read.ranks.world_size > 1:
        environment.mark(os.environ, joined=True)
    collect_as_usual()
    devices.settle_vector_functions()
    process.context = context = Context(process, read)
    process.loop = context._script_loop
    return context


class Context(Loaders):
    """One rank's view of the training: its place among the ranks, its device, and everything that needs all ranks.

    ``clusterddp.init()`` returns it. The process group is closed at the end of a ``with`` block over the context, or of
    the process. "Collective" methods are called by all ranks, in the same order.

    Attributes:
        rank: this process, 0 to world_size - 1.
        local_rank: this process on its node, 0 to local_world_size - 1.
        node_rank: this node, from 0.
        world_size: the number of ranks.
        local_world_size: the number of ranks on this node.
        seed: for the order of samples and all random numbers.
        device: this rank's device, the first of ``devices``.
        devices: all devices of this rank, as many as the job's ``gpus_per_rank``.
    """

    def __init__(self, process: RankProcess, read: settings.Settings) -> None:
        self._process = process
        check_packages(read.job)
        ranks = read.ranks
        self.rank, self.local_rank, self.node_rank = ranks.rank, ranks.local_rank, ranks.node_rank
        self.world_size, self.local_world_size = ranks.world_size, ranks.local_world_size
        self.seed, self._global_batch = read.seed, read.job.global_batch
        self.devices = devices.devices_of(ranks, read.device, read.job.gpus_per_rank)
        self.device = self.devices[0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            watch_graphs()
            if process.gpus is not None:
                with suppress(DeviceError):  # torch cannot identify it
                    process.gpus.use([devices.gpu_identity(device) for device in self.devices])
            if read.device_memory is not None:
                from clusterddp.distributed.devices import wait_until_free

                wait_until_free(self.devices, read.device_memory)
        checked_s = 0.0
        if read.preflight:
            from clusterddp.training import preflight

            checked_s = preflight.check_node(read, self.devices)
        self._settings = read
        backend = process_group.choose_backend(read.backend, self.device)
        if self.rank == 0:  # without a supervisor, the attempt has no number before the ranks have met
            process.report(Phase(phase="rendezvous"))
        process.report(Connecting())
        self._group = process_group.ProcessGroup(ranks, self.device, backend, open_store(process, read))
        process.report(Connected())
        self._history = AttemptHistory(process, read, self._group.attempt_store)
        if self.rank == 0:
            self._history.report(Phase(phase="importing"))
        for unused in read.unused:
            self._report_unused(unused)
        self._evaluations = Evaluations(self._report_evaluations)
        self._stopping = Stopping(process, read, self._group.attempt_store, self._history.report)
        self._agreement = self._stopping.agreement
        shield_workers()
        self._orders = BucketOrders(self._recorded_orders)
        self._services: Services | None = None
        #: The blocks of ``local_first`` and ``main_first`` so far.
        self._turns = 0
        script_steps.hand_over(process)
        self._heartbeat = begin_heartbeat(
            process,
            read,
            self.attempt,
            WatchedSteps(
                boundaries=lambda: self._agreement.entered,
                step=lambda: self._script_loop.steps,
                device=self.device,
            ),
        )
        self._script_loop = script_loop.ScriptLoop(
            *(process, self._group.attempt_store, self._agreement, self._heartbeat, self._history.report)
        )
        self._progress = begin(process, read, self.attempt)
        self._closed = False
        at_exit(self._close_at_exit)
        if read.preflight:
            preflight.run(read, self._group, self._history.report, checked_s)
        if not self._group.of_script:
            self._seed()
        if read.device is None and self.is_main:
            backend = process_group.backend_of(self._group.backend, self.device.type)
            say(f"{self.world_size} x {self.device.type}, {backend}")

    def _seed(self) -> None:
        """Seeds all generators. A script that makes its own group afterwards gets them back as they were, unless it has
        used them."""
        before = randomness.states()
        randomness.seed_all(randomness.hash32("init", self.seed))
        seeded = randomness.states()

        def restore() -> None:
            if randomness.equal(randomness.states(), seeded):
                randomness.set_states(before)

        self._group.on_replaced = restore

    @property
    def run_dir(self) -> Path | None:
        """The run directory, which scripts may use for their own files. None if there is none."""
        return self._settings.run_dir.path if self._settings.run_dir is not None else None

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 0. Always 0 without a run directory."""
        return self._history.number

    # --- what all ranks do together

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """``print`` on rank 0 only, flushed.

        Args:
            values: what to print.
            options: keyword arguments of ``print``.
        """
        if not self.is_main:
            return
        print(*values, **{"flush": False, **options})
        stream = options.get("file") or sys.stdout
        if options.get("flush", True) and hasattr(stream, "flush"):  # a stream of the script's own may only write
            stream.flush()

    def local_first(self) -> AbstractContextManager[None]:
        """Runs a ``with`` block on local rank 0 of every node first, then on the node's other ranks. Collective."""
        return self._first(f"local_first/{self.node_rank}", self.local_rank == 0)

    def main_first(self) -> AbstractContextManager[None]:
        """Runs a ``with`` block on rank 0 first, then on all others: for files on a shared disk. Collective."""
        return self._first("main_first", self.is_main)

    @contextmanager
    def _first(self, of: str, first: bool) -> Iterator[None]:
        turn = f"{of}/{self._turns}"
        self._turns += 1
        if not first:
            with self._waiting():
                self._group.store.wait([turn], NO_TIMEOUT)
        try:
            yield
        finally:
            if first:
                self._group.store.set(turn, "")

    def wrap(self, model: torch.nn.Module, *, all_used_once: bool = False, **options: Any) -> DistributedDataParallel:
        """Moves the model to this rank's device and wraps it in DDP, such that resumed runs are exact. Collective.

        With several devices per rank, the model's parts stay where the script has put them.

        Args:
            model: the model, not yet in DDP.
            all_used_once: only with ``static_graph=True``, for an exact resume on 3 or more ranks: promises that every
                parameter gets its gradient in every backward pass, in one piece (no unused parameters, no reentrant
                checkpointing). A broken promise raises in one of the first two steps.
            options: of DistributedDataParallel, such as ``find_unused_parameters=True``.

        Returns the DDP module. The model itself is its ``module``.

        Raises TypeError for anything but a module that is not in DDP yet, and for ``all_used_once`` alone.
        """
        return wrapping.wrap(model, self.devices, self._orders, all_used_once=all_used_once, **options)

    def _recorded_orders(self) -> Sequence[Names] | None:
        """Of the checkpoint from which this attempt will resume. All ranks ask, and only rank 0 reads the disk."""
        if (directory := self._settings.run_dir) is None:
            return None
        if self.is_main:
            progress = newest_progress(Checkpoints(directory, self.attempt, self._settings.job.checkpoint.keep)) or {}
            self._group.store.set(KEY, json.dumps(progress.get(KEY)))
        recorded: Sequence[Names] | None = json.loads(self._group.store.get(KEY))
        return recorded

    def all_reduce_sum(self, value: torch.Tensor | float) -> torch.Tensor | float:
        """The sum over all ranks, on every rank. Collective.

        Args:
            value: a tensor of the same shape on every rank, or a number.

        Returns a tensor of the same dtype and device for a tensor, a float for a number.
        """
        with self._waiting():
            return collectives.all_reduce_sum(value, self._group.collective_device)

    def all_reduce_mean(self, value: torch.Tensor | float, weight: float = 1.0) -> float:
        """The weighted mean of one number per rank, on every rank. Collective.

        Args:
            value: this rank's number, or a tensor of one element.
            weight: its weight, usually the number of samples behind it.

        Returns the mean. NaN if all weights are 0.
        """
        with self._waiting():
            return collectives.all_reduce_mean(value, weight, self._group.collective_device)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors of all ranks along the first dimension, in rank order, on every rank. Collective.

        Args:
            tensor: with at least one dimension. The first may differ between ranks, the others and the dtype may not.

        Returns the concatenation, on the tensor's device.
        """
        with self._waiting():
            return collectives.gather(tensor, self._group.collective_device)

    # --- training

    def run(
        self,
        *,
        loader: Loader | Iterable[Any] | None = None,
        rng: Randomness = "step",
        per_rank: Parts = None,
        init_from: Files | None = None,
        init_strict: bool = True,
        script_state: Any = None,
        best: str | Parts = None,
        **parts: Parts,
    ) -> Run:
        """The run, restored from its newest checkpoint if there is one. Collective. Once per process.

        Args:
            loader: from ``ctx.loader()``, or any iterable of this rank's batches. With ``state_dict`` and
                ``load_state_dict``, as torchdata's StatefulDataLoader, it is resumed by them. Otherwise its batches are
                read again from the start. Without a loader, ``run.steps(n)`` yields the number of each step.
            rng: "step" seeds all generators before each step, by seed, step and rank. "user" leaves them to the script,
                and a resume is then not exact.
            per_rank: state that each rank has for itself, such as environments, replay buffers or random generators: a
                part, or a dict of them. All of it is in rank 0's checkpoints, at most 1 GiB. To continue on a different
                number of ranks, a part needs a method ``load_state_dicts(states, rank, world_size)``.
            init_from: a file of weights to start from (``.pt``, ``.pth``, ``.bin``, ``.safetensors``), or a folder with
                files of safetensors, for ``model`` or the only module, or a dict with a file for each part. Read when
                the run starts, not when it resumes.
            init_strict: whether names that are in the file or in the part, but not in both, are an error.
            script_state: the script's own values: a dict, or an instance of a dataclass, that the script may change at
                any time, alike on all ranks: numbers, text, True, False, None, and lists and dicts of them. They are
                restored in place.
            best: the metric whose best checkpoint is kept in addition to the newest, of those that ``run.log()``
                logged: "accuracy" for the largest value, "-score" or "loss" for the smallest. Anything but text is a
                part of that name.
            parts: what is saved and restored, under names that you choose, such as ``model=``, ``optimizer=``,
                ``scheduler=`` or ``ema=``: modules, optimizers, and any objects with ``state_dict`` and
                ``load_state_dict``. Also lists, tuples and dicts of them, whose members are parts such as ``nets.0``.
                None is ignored. Random generators of torch, numpy and ``random`` are parts, too. A model that torch's
                ``fully_shard`` has sharded is passed without ``wrap()``. Each rank saves and loads its own shards.

        Raises TypeError for a part without a state, a value that cannot be saved, and a model that is sharded in a
        different way, ValueError for a wrong ``best``, RuntimeError when called twice and for a sharded model if torch
        is too old, and CheckpointError when the checkpoint is damaged or does not fit the parts, the seed or the
        dataset, or ``init_from`` does not fit. Stopped, on all ranks, if the run must stop.
        """
        if self._script_loop.run is not None:
            raise RuntimeError("ctx.run() was already called in this process. Pass all parts in one call")
        if self.run_dir is None and self.is_main:
            say(
                "this run has no run directory, so it saves no checkpoints, and a stop loses its steps. Start it with "
                "`clusterddp submit`, or pass a folder as in clusterddp.init(run_dir='runs/a')"
            )
        metric, named_best = metric_or_part(best)
        named, own = by_name({**parts, **named_best}), PerRank(per_rank, self._group)
        sharding = Sharding.of(named, self.world_size)
        sharded = sharding is not None
        start_warm = (
            partial(warm_start.load, init_from, init_strict, named, self._group, sharded) if init_from else None
        )
        values = Values(script_state)
        if self._agreement.boundary():
            self._stop_before_run()
        self._services = self._start_services(named.values(), metric, sharding)
        batches = training_loader(loader, self._group, self.seed, rng == "step")
        if self._settings.job.global_batch is not None and not isinstance(loader, Loader):
            because = "Only ctx.loader() makes batches of that size"
            self._report_unused(NotUsed(what="global_batch", given=self._settings.job.global_batch, because=because))
        files = str(init_from) if init_from else None
        given = Given(named, batches, rng, values, own, start_warm, files, self._orders, sharding)
        self._script_loop.run = run = Run(given, self._services)
        return run

    def _stop_before_run(self) -> NoReturn:
        """All ranks stop before they restore a checkpoint, because the run has nothing new to save."""
        reason = self._agreement.reason or ""
        close_workers()
        if self.is_main:
            say(f"stopped ({reason}) before the run began to train")
        raise Stopped(None, reason)

    def _start_services(self, parts: Iterable[Stateful], best: str | None, sharding: Sharding | None) -> Services:
        """Connects saving, timing and tracking. Raises ValueError for a ``best`` that names no metric or
        contradicts the job."""
        read, group, report, heartbeat = self._settings, self._group, self._history.report, self._heartbeat
        keep = with_best(read.job.checkpoint.keep, best, warns=group.rank == 0)
        settings = replace(read.job.checkpoint, keep=keep)
        saver = Saver(self._process, read.run_dir, self.attempt, group, report, settings, sharding)
        times = step_times(parts, group.device, group.world_size)
        job = replace(read.job, seed=read.seed)
        tracking = Tracking(read.run_dir if group.rank == 0 else None, job, self.attempt, report)
        self._stopping.saver, saver.on_commit = saver, tracking.committed
        heartbeat.timed, heartbeat.on_device = times.add_to, times.on_device
        agreement, deadline = self._agreement, self._stopping.deadline
        common = self._process, read.job, read.seed, group, agreement
        return Services(*common, saver, deadline, heartbeat, times, tracking, report)

    # --- hanging

    def unwatched(self) -> AbstractContextManager[None]:
        """Suspends the watchdog in a ``with`` block that takes long without a step.

        Not needed around an evaluation with ``eval_loader``, each batch of which counts as progress.
        """
        return self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with self._heartbeat.pause(), self._aside():
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self._evaluations.measured(), self._aside():
            yield

    def _aside(self) -> AbstractContextManager[None]:
        """No part of a step."""
        return self._services.times.aside() if self._services is not None else nullcontext()

    def _waiting(self) -> AbstractContextManager[None]:
        return self._services.times.waiting() if self._services is not None else nullcontext()

    # --- the end

    def __enter__(self) -> Context:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        stopped = isinstance(error, Stopped)
        self._close(clean=error is None or stopped, restore_handlers=error is None)

    def _stop_in_evaluation(self) -> None:
        """Does nothing without ``ctx.run()``: a loop with its own saving calls ``clusterddp.stop_requested``."""
        run = self._script_loop.run
        if run is not None and self._script_loop.stop_requested():
            run.stop(self._agreement.reason or "")

    def _report_unused(self, unused: NotUsed) -> None:
        if self.rank == 0:
            self._history.report(unused)

    def _report_evaluations(self, seconds: float) -> None:
        if self.rank == 0:
            self._history.report(Evaluated(seconds=seconds))

    def in_forked_child(self) -> None:
        """Leaves the process group and the run directory to the parent."""
        self._closed = self._history.closed = True

    def _close_at_exit(self) -> None:
        # sys.last_value is set by the interpreter once it has printed an uncaught exception.
        failed = getattr(sys, "last_value", None) is not None
        self._close(clean=not failed and not self._process.training.exited_in_loop, restore_handlers=False)

    def _close(self, *, clean: bool, restore_handlers: bool) -> None:
        """Closes everything. Waits only if ``clean``, because other ranks may be stuck in a collective."""
        if self._closed:
            return
        self._closed = True
        self._process.context = None
        complete = clean and self._agreement.reason is None
        cancel_at_exit(self._close_at_exit)
        close_workers()
        services = self._services
        self._evaluations.report()
        self._stopping.close(restore_handlers=restore_handlers)
        if services is not None:
            services.times.close()
        self._heartbeat.close()
        if self._progress:
            self._progress.close()
        if services is not None:
            services.saver.close(clean, complete)
            services.tracking.end(clean, complete)
        if clean:
            self._group.close(ending=not restore_handlers)
        if services is not None:
            services.tracking.close(DONE_S if complete else STOP_S if clean else ERROR_S, complete)
