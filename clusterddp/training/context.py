"""What a training script holds: ``clusterddp.init()`` makes the process group and answers with a Context."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from clusterddp.checkpoint.state import Stateful
from clusterddp.data import randomness, stream
from clusterddp.data.external_loader import ExternalLoader, StatefulLoader
from clusterddp.distributed import collectives, process_group, wrapping
from clusterddp.errors import STOPPED, Stopped
from clusterddp.jobdef.job import Checkpointing
from clusterddp.process import at_exit, cancel_at_exit
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line, write_json
from clusterddp.training import settings
from clusterddp.training.agreement import Agreement
from clusterddp.training.heartbeat import Heartbeat
from clusterddp.training.loop import Randomness, Run
from clusterddp.training.saving import Saver
from clusterddp.worker import completion, control_channel
from clusterddp.worker.deadline import Deadline
from clusterddp.worker.signals import SignalPipe, described

_WAIT = timedelta(days=30)
_current: Context | None = None


def init(
    *,
    seed: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    checkpoint: Checkpointing | None = None,
) -> Context:
    """Joins the ranks, and seeds torch, random and numpy alike on all of them. Once per process, in its main thread.

    Args:
        seed: of the data order and all randomness; the job's, or 0, if None.
        device: "cpu" or "cuda"; the job's if there is one, else a GPU if there is any.
        backend: of torch.distributed; NCCL on GPUs and gloo on CPUs if None.
        run_dir: where to save when no supervisor started this process; nothing is saved if None.
        checkpoint: how often to save there; a job's definition says it for a job.
    """
    global _current
    if _current is not None:
        raise RuntimeError("clusterddp.init() was called before in this process; use the context that it returned")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("clusterddp.init() must be called in the main thread: it takes the stop signals")
    read = settings.read(os.environ, seed=seed, device=device, backend=backend, run_dir=run_dir, checkpoint=checkpoint)
    _current = Context(read)
    return _current


class Context:
    """The ranks as one of them sees them. Leaving the ``with`` block, or the process, leaves the process group."""

    def __init__(self, read: settings.Settings) -> None:
        ranks = read.ranks
        self.rank, self.local_rank, self.node_rank = ranks.rank, ranks.local_rank, ranks.node_rank
        self.world_size, self.local_world_size = ranks.world_size, ranks.local_world_size
        self.seed = read.seed
        #: This rank's devices: one, or as many as the job's ``gpus_per_rank`` (the CPU so often, without GPUs).
        self.devices = process_group.devices_of(ranks, read.device, read.gpus_per_rank)
        #: The first of them, and with one per rank the only one.
        self.device = self.devices[0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._settings = read
        backend = process_group.choose_backend(read.backend, self.device)
        self._group = process_group.ProcessGroup(ranks, self.device, backend, read.store, read.timeouts.start_s)
        self._attempt = self._claim_attempt()
        self._forked = False
        self._deadline = Deadline(read.notices, self._leave_with_newest)
        self._agreement = Agreement(
            self._group.store, self._group.watched, self.rank, self.world_size, self._report, self._on_stop_request
        )
        # Not before all ranks are there: one that waits for the others has nothing to save, and ends by TERM at once.
        self._signals = SignalPipe()
        self._agreement.listen(self._signals, self._on_handler_replaced)
        if control_channel.current is not None:
            control_channel.current.on_stop(self._agreement.on_notice)
        stream.guard_workers()
        self._run: Run | None = None
        self._saver: Saver | None = None
        self._turns = 0
        self._heartbeat = self._begin_heartbeat()
        self._closed = False
        at_exit(self._close_at_exit)
        randomness.seed_all(randomness.hash32("init", self.seed), self.device)
        if read.device is None and self.is_main:
            say(f"{self.world_size} x {self.device.type}, {backend}")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, for files of the script's own; None where neither a launcher nor ``init`` named one."""
        return self._settings.run_dir.path if self._settings.run_dir is not None else None

    @property
    def attempt(self) -> int:
        """Which start of this run it is, from 0 on; always 0 where there is no run directory to count them."""
        return self._attempt

    def print(self, *values: object, **options: Any) -> None:
        """``print`` on rank 0 alone, at once."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    @contextmanager
    def local_first(self) -> Iterator[None]:
        """Runs its block on local rank 0 of every node first, then on the others: to download, to build a cache."""
        turn = f"local_first/{self._turns}/{self.node_rank}"
        self._turns += 1
        if self.local_rank != 0:
            self._group.store.wait([turn], _WAIT)
        try:
            yield
        finally:
            if self.local_rank == 0:
                self._group.store.set(turn, "")

    # --- training

    def wrap(self, model: torch.nn.Module, *, all_used_once: bool = False, **options: Any) -> DistributedDataParallel:
        """The model on this rank's device, in DDP with ``options``; a resume of it is exact (see ``wrapping``).

        With several devices per rank the model's parts stay where the script has put them.

        With ``static_graph=True`` only if ``all_used_once=True`` promises that every parameter takes part in every
        backward and gets its gradient in one piece: no unused parameters, no reentrant checkpointing. A broken promise
        is an error in one of the first two steps.
        """
        return wrapping.wrap(model, self.devices, all_used_once=all_used_once, **options)

    def loader(self, dataset: Dataset[Any], batch_size: int, *, shuffle: bool = True, **options: Any) -> stream.Loader:
        """The training samples: ``batch_size`` per rank and step, in an order that a resume finds again.

        With the job's ``global_batch`` a rank's share of a step is that divided by the number of ranks, and
        ``batch_size`` the most that it takes at a time: see ``Run.micro``.

        ``options`` go to torch's DataLoader. Each sample is read with its own seed, whatever the number of workers.
        """
        return stream.Loader(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            global_batch=self._settings.global_batch,
            **{"pin_memory": self.device.type == "cuda", **options},
        )

    def eval_loader(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> stream.EvalLoader:
        """Every sample exactly once over all ranks: this rank's are rank, rank + world_size, ... in order.

        All ranks iterate over it, to the same batch. Between its batches the run can stop as at ``stop_point``.
        """
        return stream.EvalLoader(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.world_size,
            at_batch=self._stop_in_evaluation,
            **options,
        )

    def run(
        self,
        *,
        model: Stateful,
        optimizer: Stateful,
        loader: stream.Loader | StatefulLoader,
        scheduler: Stateful | None = None,
        rng: Randomness = "step",
        **others: Stateful | None,
    ) -> Run:
        """The run, restored from its newest checkpoint if it has one. Collective; once per process.

        ``loader``: of ``ctx.loader()``, or any iterable of this rank's batches that has a ``state_dict`` and its
        inverse. ``others`` are saved and restored under their names, unless they are None. ``rng="user"`` leaves all
        generators to the script: a resume is then not exact.
        """
        if self._run is not None:
            raise RuntimeError("ctx.run() was called before in this process; give it all parts at once")
        optional = {"scheduler": scheduler, **others}
        parts = {"model": model, "optimizer": optimizer}
        parts |= {name: part for name, part in optional.items() if part is not None}
        read = self._settings
        self._saver = Saver(read.run_dir, self._attempt, self._group, self._report, read.checkpoint)
        self._run = Run(
            parts,
            self._own_or_foreign(loader),
            rng=rng,
            seed=self.seed,
            default_steps=read.steps,
            step_timeout_s=read.timeouts.step_s,
            group=self._group,
            agreement=self._agreement,
            saver=self._saver,
            report=self._report,
            deadline=self._deadline,
            heartbeat=self._heartbeat,
        )
        return self._run

    def _own_or_foreign(self, loader: stream.Loader | StatefulLoader) -> stream.Loader | ExternalLoader:
        if isinstance(loader, stream.Loader):
            return loader
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise TypeError(
                f"a run cannot find its place again in a {type(loader).__name__}: expected the loader of ctx.loader(), "
                "or one with state_dict() and load_state_dict(), as torchdata's StatefulDataLoader"
            )
        return ExternalLoader(loader, self._group)

    # --- hanging

    def _begin_heartbeat(self) -> Heartbeat:
        """Nobody listens where no supervisor started this process."""
        watched, directory = control_channel.current is not None, self._settings.run_dir
        logs = directory.attempt_logs(self._attempt) if directory else Path()
        return Heartbeat(
            self._settings.watchdog if watched else None,
            boundaries=lambda: self._agreement.entered,
            step=lambda: self._run.step if self._run is not None else 0,
            send=control_channel.report,
            flight_record=logs / f"rank-{self.rank}.collectives.json",
        )

    def unwatched(self) -> AbstractContextManager[None]:
        """``with ctx.unwatched():`` around what takes long without a step: the watchdog does not take it for a hang.

        An evaluation with ``eval_loader`` needs it not: every batch of that is a sign of life.
        """
        return self._heartbeat.pause()

    # --- stopping

    def _on_stop_request(self, reason: str) -> None:
        """Rank 0 will not wait for the step for longer than the notice allows."""
        if self.rank == 0 and self._saver is not None and self._saver.saves:
            self._deadline.begin(reason, self._saver.last_save_s)

    def _on_handler_replaced(self, number: signal.Signals, handler: object) -> None:
        name, of_script = number.name.removeprefix("SIG"), described(handler)
        say(handler_replaced(name, of_script))
        if self.rank == 0:
            self._report("handler_replaced", signal=name, handler=of_script)

    def _leave_with_newest(self, waited_s: float) -> None:
        """Ends this rank, and thereby all, when no step was agreed on in time: with what is saved, or being saved."""
        assert self._saver is not None
        words = f"no rank's step ended within {waited_s:.0f} s of the notice"
        say(f"{words}; what this rank is at:")
        faulthandler.dump_traceback(all_threads=True)
        try:
            committed = self._saver.finish_newest()
            say(f"leaving with checkpoint {committed}")
            if self._settings.attempt is not None and self._settings.run_dir is not None:
                record = {"rank": 0, "host": socket.gethostname(), "end": "stopped", "step": committed, "reason": words}
                path = self._settings.run_dir.rank_record(self._settings.attempt, 0)
                write_json(path, {**record, "used_clusterddp": True}, mode=0o600)
        finally:
            os._exit(STOPPED)  # any code but 0 makes the launcher end the other ranks

    def stop_requested(self) -> bool:
        """Whether to stop here. Every rank calls it the same number of times, and gets the same answer each time.

        For loops that save by themselves: ``if ctx.stop_requested(): save(); ctx.requeue()``.
        """
        stop = self._agreement.boundary()
        if stop:
            completion.stop(self._agreement.reason or "")
        return stop

    def stop_point(self) -> None:
        """A place to stop in a long stretch without steps: saves the run and raises Stopped if it was asked to stop.

        Every rank calls it the same number of times; ``eval_loader`` does so by itself. An evaluation inside a step
        belongs before the step's training (a resume repeats it) or after its optimizer and scheduler have stepped (a
        resume goes on with the next step).
        """
        if self._run is None:
            raise RuntimeError(
                "ctx.stop_point() saves the run, and there is no ctx.run() yet; use ctx.stop_requested()"
            )
        self._run.evaluating()
        if self._agreement.boundary():
            self._run.stop(self._agreement.reason or "")

    def request_stop(self, reason: str) -> None:
        """Asks all ranks to save and stop at their next boundary, as a preemption would. Any rank may."""
        self._agreement.request(reason)

    def requeue(self) -> NoReturn:
        """Ends this attempt as stopped, not done: the run goes on later. The script has saved what it needs."""
        stream.close_workers()
        raise Stopped(None, self._agreement.reason or "asked for by the script")

    # --- all ranks together

    def all_reduce_sum(self, value: torch.Tensor | float) -> torch.Tensor | float:
        """The sum over all ranks, on every rank: a tensor for a tensor, a float for a number. Collective."""
        return collectives.all_reduce_sum(value, self._group.collective_device)

    def all_reduce_mean(self, value: torch.Tensor | float, weight: float = 1.0) -> float:
        """The mean of one number per rank; ``weight`` is the number of samples behind this rank's. Collective."""
        return collectives.all_reduce_mean(value, weight, self._group.collective_device)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, joined along the first dimension, in which they may differ, on every rank. Collective."""
        return collectives.gather(tensor, self._group.collective_device)

    # --- the end

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, Stopped)
        self._close(clean=error is None or stopped, restore_handlers=error is None)

    def _stop_in_evaluation(self) -> None:
        """Only a run can be saved from here: a foreign loop stops where it asks."""
        if self._run is not None:
            self.stop_point()

    def _close_at_exit(self) -> None:
        # Set by the interpreter when it has shown an uncaught exception.
        self._close(clean=getattr(sys, "last_value", None) is None, restore_handlers=False)

    def _close(self, *, clean: bool, restore_handlers: bool) -> None:
        """Leaves the group. After an error the others may sit in a collective for ever: nothing waits for them then."""
        global _current
        if self._closed:
            return
        self._closed = True
        _current = None
        cancel_at_exit(self._close_at_exit)
        if control_channel.current is not None:
            control_channel.current.on_stop(None)
        stream.close_workers()
        self._signals.close(restore_handlers=restore_handlers)
        self._agreement.close()
        self._deadline.end()
        self._heartbeat.close()
        if self._saver is not None:
            self._saver.close()
        if clean:
            self._group.close()

    def _forget(self) -> None:
        """In a forked child: the ranks, their store and their run directory are the parent's business."""
        self._closed = self._forked = True

    def _claim_attempt(self) -> int:
        """This attempt's number: the supervisor's, or claimed here by rank 0."""
        directory = self._settings.run_dir
        if self._settings.attempt is not None or directory is None:
            return self._settings.attempt or 0
        if self.rank == 0:
            directory.create()
            self._group.store.set("attempt", str(directory.create_attempt()))
        return int(self._group.store.get("attempt"))

    def _report(self, event: str, **values: Any) -> None:
        """Into the run's history: through the supervisor, or, where there is none, by rank 0."""
        if self._forked:
            return
        control_channel.report(event, **values)
        directory = self._settings.run_dir
        if control_channel.current is None and self.rank == 0 and directory is not None:
            line = {"time": time.time(), "attempt": self._attempt, "event": event, **values}
            try:
                append_line(directory.events_file, line)
            except OSError as error:
                say(f"the history lacks {event!r}: {error.strerror}")


def handler_replaced(name: str, handler: str) -> str:
    """What is said of a handler that the script has installed over that of ``init()``."""
    return (
        f"the script replaced the {name} handler of clusterddp.init() with {handler}: if it exits or raises when "
        f"{name} comes, steps since the last checkpoint are repeated; remove it, as clusterddp saves and stops the run "
        "by itself"
    )


def _forget_in_child() -> None:
    if _current is not None:
        _current._forget()


os.register_at_fork(after_in_child=_forget_in_child)
