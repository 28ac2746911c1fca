"""Observes the script in a rank of a rehearsal, and lets the rank be disturbed at the place of the orders.

Steps, losses, samples, saves, loads and evaluations are seen where torch is called, so the script needs no change. A
rank that has reached its place reports that and waits, so that the notice is sent while it is there.
"""

from __future__ import annotations

import atexit
import dis
import functools
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from clusterddp.failures.stack_traces import is_library, outward
from clusterddp.import_hooks import when_imported
from clusterddp.protocol import SAVING
from clusterddp.rehearsal.facts import (
    AT_PLACE,
    CUT_OFF,
    Began,
    Cut,
    Evaluated,
    Fact,
    HandlerSet,
    Loaded,
    Orders,
    Place,
    Reached,
    Renamed,
    SaveBegan,
    Saved,
    States,
    StepMade,
    ThreadEnded,
    Unmatched,
    read_facts,
    to_line,
    weights_in,
)

#: Seconds that a rank waits at its place for the disturbance.
_WAIT_S = 30.0
#: The size of files while the disk is full.
_FULL_BYTES = 512
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT)


def begin(orders: Orders, rank: int, attempt: int) -> Observer:
    """Observes this process from now on."""
    observer = Observer(orders, rank, attempt)
    os.register_at_fork(after_in_child=observer.stop)
    observer.report(Began(os.getpid(), time.time()))
    observer.watch_handlers()
    observer.watch_renames()
    observer.watch_pickle()
    observer.watch_threads()
    atexit.register(observer.report_threads)
    when_imported("safetensors.torch", observer.watch_safetensors)
    when_imported("torch", observer.watch_torch)
    return observer


class Observer:
    """The observer of this process."""

    def __init__(self, orders: Orders, rank: int, attempt: int) -> None:
        self.orders, self.rank, self._attempt = orders, rank, attempt
        facts = orders.facts.format(rank=rank, attempt=attempt)
        self._file = os.open(facts, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._began = time.monotonic()
        self._active, self._pending, self._skipped_saves = True, orders.place, orders.skipped_saves
        #: Steps of this start, and of the whole run, which is None if unknown.
        self._local, self._number = 0, None if orders.known else 0
        self._optimizer: Any = None
        self._before: StepMade | None = None
        self._loss = ""
        #: The indices of the batch that was fetched last, and those of the batches of this step. A batch that the
        #: script drops, to find its place again, is in neither.
        self._fetched: list[int] = []
        self._samples: list[int] = []
        self._epoch_begins = False
        #: The digest of the batch that was fetched last and has no indices, and of those of this step.
        self._unnumbered = ""
        self._batches: list[str] = []
        #: The parts that ``ctx.run()`` got, by their ids, and its loader.
        self.given: set[int] | None = None
        self.loader: Any = None
        #: The modules of a run without an optimizer of torch's. A step of its loop is then a step.
        self.loop_modules: list[Any] = []
        self._saves = self._saving = 0
        self._was_full = False
        #: What was saved and loaded last. A script's variable may still hold it, and it is no state of the training.
        self._contents: deque[Any] = deque(maxlen=4)
        #: In a thread of a pool, how many steps were done when it got its task.
        self._handed_over = threading.local()
        self._saved_at: int | None = None
        self._evaluating = self._switching = self._loaded = False

    def stop(self) -> None:
        """In a forked child, which is no rank."""
        self._active = False

    def report(self, fact: Fact) -> None:
        """Writes a fact. One write, so that a signal handler's facts do not tear it."""
        if self._active:
            os.write(self._file, to_line(fact))

    @property
    def number(self) -> int | None:
        """How many steps of the whole run are done, if that is known."""
        return self._number

    # --- places

    def _is_early(self) -> bool:
        """Whether the orders ask for more steps first."""
        return (self._local if self._number is None else self._number) < self.orders.after

    def at(self, place: Place, where: str = "") -> None:
        """Lets this rank be disturbed if this is its place."""
        if not self._active or self.rank != 0 or self._pending is not place or self._is_early():
            return
        if place is Place.SAVE and self._skipped_saves:
            self._skipped_saves -= 1
            return
        self._pending = None
        self.report(Reached(place, self._local, self._number, where))
        self._tell_and_wait(AT_PLACE)  # the signal comes here, and its handler runs here

    def _reach_later(self) -> None:
        """Lets this rank be disturbed while the script continues."""
        time.sleep(self.orders.delay_s)
        self.report(Reached(Place.STRETCH, self._local, self._number))
        self._tell_and_wait(AT_PLACE)

    def _tell_and_wait(self, what: str) -> None:
        """Reports that this rank is at its place, or at the end of its start, and waits for the answer."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(_WAIT_S)
            with suppress(OSError):
                link.connect(self.orders.socket)
                link.sendall(f"{self._attempt} {what}\n".encode())
                link.recv(1)

    def _cut(self) -> None:
        """Ends this start."""
        self.report(Cut(self._local))
        if self.orders.supervised:
            self._tell_and_wait(CUT_OFF)
        os._exit(0)

    # --- signals and files

    def watch_handlers(self) -> None:
        """Sees each ``signal.signal``."""
        original = signal.signal

        @functools.wraps(original)
        def set_handler(signum: int, handler: Any) -> Any:
            before = original(signum, handler)
            if self._active and signum in _SIGNALS:
                self._handler_set(int(signum), handler, sys._getframe(1))
            return before

        signal.signal = set_handler  # type: ignore[assignment]

    def _handler_set(self, signum: int, handler: Any, caller: FrameType) -> None:
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        own_name: str = getattr(handler, "__qualname__", type(handler).__name__)
        what = "default" if handler == signal.SIG_DFL else "ignore" if handler == signal.SIG_IGN else own_name
        file = caller.f_code.co_filename
        of_function: tuple[str, int, bool] = ("", 0, False)
        if code is not None:
            raises = any(one.opname == "RAISE_VARARGS" for one in dis.get_instructions(code))
            of_function = code.co_filename, code.co_firstlineno, raises
        elapsed = time.monotonic() - self._began
        self.report(HandlerSet(signum, what, file, caller.f_lineno, is_library(file), elapsed, *of_function))

    def report_threads(self) -> None:
        """Reports the script's daemon threads that this process ends."""
        for thread in threading.enumerate():
            function = getattr(thread, "_target", None) or type(thread).run
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            if thread.daemon and code is not None and not is_library(code.co_filename):
                self.report(ThreadEnded(code.co_name, code.co_filename, code.co_firstlineno))

    def watch_renames(self) -> None:
        """Sees files that get another name."""
        names = {"os.rename", "os.link", "os.symlink", "shutil.copyfile"}

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in names or not self._active:
                return
            with suppress(TypeError, ValueError):
                source, target = (os.fsdecode(one) for one in arguments[:2])
                if SAVING in source:  # a save that clusterddp protects, which is seen under the name of its target
                    return
                folder = Path(target).parent if event == "os.symlink" else Path()
                self.report(Renamed(str((folder / source).absolute()), str(Path(target).absolute())))

        sys.addaudithook(audit)

    def watch_pickle(self) -> None:
        """Sees ``pickle.dump`` and ``pickle.load``, as scripts call them."""
        dump, load = pickle.dump, pickle.load

        @functools.wraps(dump)
        def observed_dump(value: Any, file: Any, *args: Any, **options: Any) -> None:
            with self._save(file):
                dump(value, file, *args, **options)
                self.at(Place.SAVE, Path(_name(file) or "").name)

        @functools.wraps(load)
        def observed_load(file: Any, *args: Any, **options: Any) -> Any:
            return self._load(lambda: load(file, *args, **options), file)

        pickle.dump, pickle.load = observed_dump, observed_load  # type: ignore[assignment]

    def watch_threads(self) -> None:
        """Notes how many steps are done when a thread gets its task. What it saves is the state of then."""
        start = threading.Thread.start

        @functools.wraps(start)
        def observed_start(thread: Any) -> None:
            thread.steps_made = self._local, self._number
            start(thread)

        threading.Thread.start = observed_start  # type: ignore[method-assign, assignment]
        when_imported("concurrent.futures.thread", self._watch_pools)

    def _watch_pools(self, module: Any) -> None:
        pool = module.ThreadPoolExecutor
        submit = pool.submit

        @functools.wraps(submit)
        def observed_submit(this: Any, function: Any, /, *args: Any, **options: Any) -> Any:
            steps = self._local, self._number

            @functools.wraps(function)
            def task(*args: Any, **options: Any) -> Any:
                self._handed_over.steps = steps
                return function(*args, **options)

            return submit(this, task, *args, **options)

        pool.submit = observed_submit

    def watch_safetensors(self, module: Any) -> None:
        """Sees its saves and loads. They cannot be interrupted in the middle."""
        save, load = module.save_file, module.load_file

        @functools.wraps(save)
        def save_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> None:
            with self._save(filename):
                self.at(Place.SAVE, Path(_name(filename) or "").name)
                save(tensors, filename, *args, **options)

        @functools.wraps(load)
        def load_file(filename: Any, *args: Any, **options: Any) -> Any:
            return self._load(lambda: load(filename, *args, **options), filename)

        module.save_file, module.load_file = save_file, load_file

    @contextmanager
    def _save(self, target: Any) -> Iterator[None]:
        file = _name(target)
        if file is None or not self._active:
            yield
            return
        self._saving += 1
        self.save_began(file)
        began, error = time.monotonic(), ""
        try:
            with self._disk():
                yield
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"[:300]
            raise
        finally:
            self._saving -= 1
            self.saved(file, time.monotonic() - began, error)

    def save_began(self, file: str) -> None:
        """A save to this file begins."""
        made = self._local, self._number
        if threading.current_thread() is not threading.main_thread():
            made = getattr(self._handed_over, "steps", getattr(threading.current_thread(), "steps_made", made))
        self.report(SaveBegan(file, *made, *_line_of_script()))

    def saved(self, file: str, seconds: float, error: str) -> None:
        """That save has ended."""
        self._saves += not error
        self._saved_at = self._local if self._saved_at is None else self._saved_at
        self.report(Saved(file, seconds, error))

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Fills the disk during this save, if the orders ask for it."""
        if not self.disk_fills():
            yield
            return
        limits = fill_disk(os.getpid())
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def disk_fills(self) -> bool:
        """Whether the disk is full at this save."""
        if not self.orders.full_disk or self._was_full or self._is_early() or not self._active:
            return False
        self._was_full = True
        self.report(Reached(Place.SAVE, self._local, self._number, "full disk"))
        return True

    def _load(self, load: Callable[[], Any], source: Any) -> Any:
        file = _name(source)
        if file is None or not self._active:
            return load()
        try:
            found = load()
        except Exception as raised:
            self.loaded(file, f"{type(raised).__name__}: {raised}"[:300])
            raise
        self.loaded(file)
        return found

    def loaded(self, file: str, error: str = "") -> None:
        """This file was loaded."""
        self._loaded = True
        self.report(Loaded(file, self._local, error, *_line_of_script()))

    # --- torch

    def watch_torch(self, torch: ModuleType) -> None:
        """Sees steps, losses, evaluations, batches, saves and loads."""
        self._torch: Any = torch
        self._watch_files()
        self._watch_loaders()
        self._watch_evaluations()
        self._watch_restores()
        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def observed_backward(tensor: Any, *args: Any, **options: Any) -> Any:
            if self._active:
                self._samples += self._fetched
                self._batches += [self._unnumbered] if self._unnumbered else []
                self._fetched, self._unnumbered = [], ""
            if self._active and tensor.numel() == 1:
                self._loss = repr(tensor.detach().item())
            if self._optimizer is not None or self.loop_modules:
                self.at(Place.STEP)  # before the gradients are averaged, for which all ranks must be there
            return backward(tensor, *args, **options)

        torch.Tensor.backward = observed_backward
        module = sys.modules["torch.optim.optimizer"]
        module.register_optimizer_step_pre_hook(self._before_step)
        module.register_optimizer_step_post_hook(self._after_step)
        self.at(Place.START, "import torch")

    def _watch_files(self) -> None:
        torch, serialization = self._torch, self._torch.serialization
        save, load = torch.save, torch.load

        @functools.wraps(save)
        def observed_save(value: Any, f: Any, *args: Any, **options: Any) -> None:
            self._contents.append(value)
            with self._save(f):
                save(value, f, *args, **options)

        @functools.wraps(load)
        def observed_load(f: Any, *args: Any, **options: Any) -> Any:
            found = self._load(lambda: load(f, *args, **options), f)
            self._contents.append(found)
            return found

        torch.save = serialization.save = observed_save
        torch.load = serialization.load = observed_load
        for name in ("_open_zipfile_writer_file", "_open_zipfile_writer_buffer"):
            if writer := getattr(serialization, name, None):
                writer.__exit__ = self._observed_end(writer.__exit__)

    def _observed_end(self, end: Callable[..., Any]) -> Callable[..., Any]:
        """The end of a file of torch's: the tensors are written, and the directory that makes it readable is not."""

        @functools.wraps(end)
        def observed(writer: Any, *args: Any) -> Any:
            if self._saving:
                self.at(Place.SAVE, Path(str(getattr(writer, "name", "") or "")).name)
            return end(writer, *args)

        return observed

    def _watch_loaders(self) -> None:
        data = sys.modules["torch.utils.data.dataloader"]
        loader, iterator = data.DataLoader, data._BaseDataLoaderIter
        begin, start, following, index = loader.__init__, loader.__iter__, iterator.__next__, iterator._next_index

        @functools.wraps(begin)
        def observed_init(this: Any, *args: Any, **options: Any) -> None:
            own = args and type(args[0]).__name__ == "SeededSamples"  # of ctx.loader(), which is toggled itself
            if self._active and self.orders.toggle_workers and len(args) < 6 and not own:
                options = toggled(options)
            begin(this, *args, **options)

        @functools.wraps(start)
        def observed_iter(this: Any) -> Any:
            if self._active and self._torch.is_grad_enabled():
                self._epoch_begins = True
            return start(this)

        @functools.wraps(index)
        def observed_index(this: Any) -> Any:
            found = index(this)
            this.__dict__.setdefault("_asked", deque()).append(found)
            return found

        @functools.wraps(following)
        def observed_next(this: Any) -> Any:
            if self._active and not self._torch.is_grad_enabled():
                self._in_evaluation()
            try:
                found = following(this)
            except StopIteration:
                if self._torch.is_grad_enabled() and self._local:
                    self.at(Place.EPOCH_END)
                raise
            asked = this.__dict__.get("_asked")
            if asked and self._torch.is_grad_enabled():
                indices = asked.popleft()
                numbers = [one for one in indices if type(one) is int] if type(indices) is list else []
                self._fetched = self._whole_indices(this._dataset, numbers)
                self._unnumbered = "" if self._fetched else self.digest(found)
            elif asked:
                asked.popleft()
            return found

        loader.__init__, loader.__iter__ = observed_init, observed_iter
        iterator.__next__, iterator._next_index = observed_next, observed_index

    def _whole_indices(self, dataset: Any, indices: list[int]) -> list[int]:
        """The indices in the whole dataset. A script may skip samples with a ``Subset`` of those that are left."""
        while type(dataset) is self._torch.utils.data.Subset:
            indices = [int(dataset.indices[index]) for index in indices]
            dataset = dataset.dataset
        return indices

    def _watch_evaluations(self) -> None:
        module = self._torch.nn.Module
        train = module.train

        @functools.wraps(train)
        def observed_train(this: Any, mode: bool = True) -> Any:
            if self._switching or not self._active:
                return train(this, mode)
            self._switching = True
            try:
                found = train(this, mode)
            finally:
                self._switching = False
            if not mode and not self._evaluating:
                self._evaluating = True
                self.report(Evaluated(self._local))
                self._watch_forward()
            elif mode and self._evaluating:
                self._in_evaluation()
                self._evaluating = False
            return found

        module.train = observed_train

    def _watch_restores(self) -> None:
        module = self._torch.nn.Module
        load = module.load_state_dict

        @functools.wraps(load)
        def observed(this: Any, *args: Any, **options: Any) -> Any:
            found = load(this, *args, **options)
            if self._active and (missing := getattr(found, "missing_keys", None)):
                total = len(this.state_dict())
                self.report(Unmatched(len(missing), total, missing[0], *_line_of_script()))
            return found

        module.load_state_dict = observed

    def _watch_forward(self) -> None:
        """An evaluation need not read a loader, and need not end before the next step."""
        if self._pending is not Place.EVALUATION:
            return

        def on_forward(*_: Any) -> None:
            self._in_evaluation()
            if self._pending is not Place.EVALUATION or not self._evaluating:
                handle.remove()

        handle = self._torch.nn.modules.module.register_module_forward_pre_hook(on_forward)

    def _in_evaluation(self) -> None:
        if self._local and self._evaluating:
            self.at(Place.EVALUATION)

    # --- steps

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._active or self._torch.compiler.is_compiling() or self.loop_modules:
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self.begin_step(tuple(repr(float(group["lr"])) for group in optimizer.param_groups))

    def begin_step(self, rates: tuple[str, ...] = ()) -> None:
        """A step begins to change the weights."""
        self._evaluating = False
        weights = self._weights()
        if self._local == 0:
            self._number = self._number_of(weights)
        self.at(Place.STEP)  # of a script whose backward() was not seen
        elapsed = time.monotonic() - self._began
        made = self._loss, rates, tuple(self._samples), self._epoch_begins, " ".join(self._batches)
        self._before = StepMade(self._number, self._local, elapsed, weights, "", *made)
        self._samples, self._batches, self._epoch_begins = [], [], False
        if self.rank == 0:
            self._report_states()

    def _number_of(self, weights: str) -> int | None:
        """How many steps of the whole run precede the one that begins with these weights."""
        known = dict(self.orders.known)
        if self.orders.last_number is not None:
            for attempt in range(self._attempt):  # those that a supervisor has started by itself
                known |= weights_in(read_facts(Path(self.orders.facts.format(rank=self.rank, attempt=attempt))))
            return known.get(weights, None if self._loaded and known else 0)
        return known.get(weights) if known else 0

    def _parameters(self) -> list[Any]:
        if self.loop_modules:
            return [one for module in self.loop_modules for one in module.parameters()]
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _weights(self) -> str:
        return self.digest([one.detach() for one in self._parameters()])

    def digest(self, value: Any) -> str:
        """Equal for equal contents."""
        from clusterddp.training.script_objects import of_value

        return of_value(value)

    def took(self, batch: Any, samples: Sequence[int], epoch_begins: bool) -> None:
        """The script has this batch of a run for its next step. ``samples``: their indices, if they have any."""
        self._samples += samples
        self._batches.append(self.digest(batch))
        self._epoch_begins |= epoch_begins

    def _report_states(self) -> None:
        from clusterddp.training.script_objects import Surroundings

        contents = [one for one in self._contents if type(one) in (dict, list, tuple)]
        search = Surroundings({}, self.loader, contents).search()
        objects = {f"{name}.{key}": value for name, state in search.others.items() for key, value in state.items()}
        kinds = {name: self._kind(value) for name, value in search.objects.items()}
        given = None
        if self.given is not None:
            given = tuple(name for name, value in search.objects.items() if id(value) in self.given)
        variables = {**unset(), **search.variables}
        self.report(States(self._local, objects, variables, kinds, given, self._generators()))

    def _generators(self) -> dict[str, str]:
        states = {"Python's": random.getstate(), "torch's": self._torch.get_rng_state()}
        if numpy := sys.modules.get("numpy"):
            states["NumPy's"] = numpy.random.get_state()
        return {name: self.digest(state) for name, state in states.items()}

    def _kind(self, value: Any) -> str:
        torch = self._torch
        if isinstance(value, torch.optim.Optimizer):
            return "optimizer"
        if isinstance(value, torch.nn.Module):
            own = set(map(id, self._parameters()))
            averaged = type(value).__name__ in ("AveragedModel", "EMA", "ModelEmaV2")
            return "average" if averaged else "model" if any(id(one) in own for one in value.parameters()) else "module"
        if hasattr(value, "get_last_lr") or "Scheduler" in type(value).__name__:
            return "scheduler"
        if "GradScaler" in type(value).__name__:
            return "scaler"
        if isinstance(value, torch.Generator) or "Generator" in type(value).__name__:
            return "generator"
        return type(value).__name__

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._before is not None and optimizer is self._optimizer:
            self.end_step()

    def end_step(self) -> None:
        """The step is done."""
        made, self._before = self._before, None
        if made is None:
            return
        self._local += 1
        self._number = None if self._number is None else self._number + 1
        # A step of a loop begins before its backward().
        loss = self._loss if self.loop_modules else made.loss
        self.report(StepMade(**{**vars(made), "after": self._weights(), "loss": loss}))
        is_last = bool(self.orders.last) and made.weights == self.orders.last
        is_last |= made.number is not None and made.number == self.orders.last_number
        if self._pending is Place.STRETCH and self.rank == 0 and not self._is_early():
            threading.Thread(target=self._reach_later, daemon=True).start()
            self._pending = None
        if self._saves == 0:
            self.at(Place.FIRST_STEPS)
        elif self._saved_at is not None and self._local > self._saved_at:
            self.at(Place.AFTER_SAVE)
        if is_last:
            self.at(Place.LAST_STEP)
        if self._local >= self.orders.steps or (is_last and self.orders.cut):
            self._cut()


def fill_disk(pid: int) -> tuple[int, int]:
    """From now on the kernel refuses to let a file of this process grow, as if there was no space. Returns the limits
    before."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))
    return soft, hard


def unset() -> dict[str, str]:
    """The script's variables that are None, by name, such as a best value that is not known yet."""
    found: dict[str, str] = {}
    for frame in outward(sys._getframe(1)):
        if not is_library(frame.f_code.co_filename):
            scopes = (frame.f_locals, frame.f_globals)
            found |= {name: "None" for scope in scopes for name, value in list(scope.items()) if value is None}
    return found


def toggled(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a loader with two workers in place of none, and none in place of some."""
    if not options.get("num_workers"):
        return {**options, "num_workers": 2}
    of_workers = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")
    return {name: value for name, value in options.items() if name not in of_workers}


def _line_of_script() -> tuple[str, int]:
    """The file and line of the innermost call that is in the script's own code."""
    for frame in outward(sys._getframe(1)):
        if not is_library(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
    return "", 0


def _name(target: Any) -> str | None:
    """The file that a path or a file object stands for."""
    name = target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", None)
    if not isinstance(name, (str, os.PathLike)):
        return None
    file = Path(os.path.realpath(os.fsdecode(os.fspath(name))))
    if file.parent.name.startswith(SAVING):  # clusterddp protects this save
        return str(file.parent.parent / file.name)
    return str(file)
