"""What user code does to its own process: each class is one habit, plugged into the training of ``training.py``.

Every rank has the habit. The standard library only: children that are spawned import this file.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import io
import locale
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

STEPS = 60
PAUSE_S = 0.03
#: The step of a habit that comes once: behind the moments at which a run is disturbed.
ONCE = 50
SECRET = "correct-horse'battery\\staple"


class Behaviour:
    """The training alone."""

    #: How the run ends; where it ends as failed, a pattern in the first failure.
    ends, says = "completed", ""
    #: Whether a stop that comes with notice costs no step.
    hears_notice = True
    #: For ``Context.loader``.
    loader: dict[str, Any] = {}

    def before_init(self) -> None:
        """Called before ``clusterddp.init()``."""

    def after_init(self, ctx: Any) -> None:
        """Called after ``clusterddp.init()``."""

    def before_loop(self, run: Any) -> None:
        """The run is restored."""

    def train(self, steps: Callable[[], None]) -> None:
        """The whole loop."""
        steps()

    def step(self, update: Callable[[], None], run: Any) -> None:
        """One step: forward, backward, the optimizer, and the metrics."""
        update()

    def after_loop(self) -> None:
        """The end of the script."""


class Together(Behaviour):
    """Several habits in one training, the first one innermost."""

    def __init__(self, habits: Sequence[Behaviour]) -> None:
        self._habits = habits
        self.hears_notice = all(habit.hears_notice for habit in habits)
        self.loader = {key: value for habit in habits for key, value in habit.loader.items()}
        for habit in habits:
            if habit.ends != "completed":
                self.ends, self.says = habit.ends, habit.says

    def before_init(self) -> None:
        for habit in self._habits:
            habit.before_init()

    def after_init(self, ctx: Any) -> None:
        for habit in self._habits:
            habit.after_init(ctx)

    def before_loop(self, run: Any) -> None:
        for habit in self._habits:
            habit.before_loop(run)

    def train(self, steps: Callable[[], None]) -> None:
        for habit in self._habits:
            steps = partial(habit.train, steps)
        steps()

    def step(self, update: Callable[[], None], run: Any) -> None:
        for habit in self._habits:
            update = partial(habit.step, update, run)
        update()

    def after_loop(self) -> None:
        for habit in self._habits:
            habit.after_loop()


class Plain(Behaviour):
    """The training alone, for comparison with the others."""


# ---- children


def forever(*_: object) -> None:
    while True:
        time.sleep(60)


def ignore_term_forever() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forever()


class PoolBeforeInit(Behaviour):
    """A pool that is used and closed before ``init()``."""

    def before_init(self) -> None:
        with multiprocessing.Pool(2) as pool:
            assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]


class PoolOpenAcrossTheStop(Behaviour):
    """Every step uses a pool, which is never closed."""

    def after_init(self, ctx: Any) -> None:
        self.pool = multiprocessing.Pool(2)

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        assert self.pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]


class PoolPerStep(Behaviour):
    """A new pool in every tenth step; closing it sends its workers a TERM."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step % 10 == 0:
            with multiprocessing.Pool(2) as pool:
                assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]


class ExecutorLeftOpen(Behaviour):
    """An executor that is never shut down, with a task that never ends."""

    def after_init(self, ctx: Any) -> None:
        self.executor = ProcessPoolExecutor(2)
        self.executor.submit(forever)

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        assert self.executor.submit(abs, -run.step).result() == run.step


class DaemonicProcess(Behaviour):
    """A helper process that multiprocessing ends with TERM at exit."""

    def after_init(self, ctx: Any) -> None:
        multiprocessing.Process(target=forever, daemon=True).start()


class ProcessLeftRunning(Behaviour):
    """A process that multiprocessing would wait for forever."""

    def after_init(self, ctx: Any) -> None:
        multiprocessing.Process(target=forever).start()


class ProcessIgnoringTerm(Behaviour):
    """A daemonic process that ignores TERM."""

    def after_init(self, ctx: Any) -> None:
        multiprocessing.Process(target=ignore_term_forever, daemon=True).start()


class ProcessTerminated(Behaviour):
    """Children that the script ends with ``terminate()``."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step % 10 == 5:
            child = multiprocessing.Process(target=forever)
            child.start()
            child.terminate()
            child.join(20)
            assert child.exitcode == -signal.SIGTERM, child.exitcode


class Spawn(Behaviour):
    """Workers by spawn, with their resource tracker."""

    method = "spawn"

    def before_loop(self, run: Any) -> None:
        self.pool = multiprocessing.get_context(self.method).Pool(1)
        assert self.pool.map(abs, [-1]) == [1]


class Forkserver(Spawn):
    """The same by forkserver, whose server keeps running."""

    method = "forkserver"


def fork_in_step(run: Any, child: Callable[[], object]) -> int | None:
    """In every tenth step: the wait status of a forked child that does this."""
    if run.step % 10 != 5:
        return None
    pid = os.fork()
    if pid == 0:
        child()
    return os.waitpid(pid, 0)[1]


class ForkThenSysExit(Behaviour):
    """The forked child raises SystemExit, which passes through the parent's frames."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        assert not fork_in_step(run, sys.exit)


class ForkThenOsExit(Behaviour):
    """The forked child ends at once."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        assert fork_in_step(run, lambda: os._exit(3)) in (None, 3 << 8)


class ForkWhoseChildRaises(Behaviour):
    """The forked child raises an exception, which passes through the parent's frames."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        assert fork_in_step(run, lambda: 1 // 0) in (None, 1 << 8)


class Grandchildren(Behaviour):
    """A forked child that leaves a child behind when it exits."""

    def after_init(self, ctx: Any) -> None:
        if os.fork() == 0:
            if os.fork() == 0:
                forever()
            os._exit(0)
        os.wait()


class SubprocessWithPreexec(Behaviour):
    """A program started with ``preexec_fn``, in its own session."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step % 10 == 5:
            subprocess.run(["true"], preexec_fn=os.setsid, check=True)


class SubprocessIgnoringTerm(Behaviour):
    """A program that is left running and ignores TERM."""

    def after_init(self, ctx: Any) -> None:
        self.process = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 60; done"])


class SubprocessInItsOwnSession(Behaviour):
    """A program outside of the rank's session and process group."""

    def after_init(self, ctx: Any) -> None:
        self.process = subprocess.Popen(["sleep", "1000"], start_new_session=True)


class ChildrenReapedByTheSystem(Behaviour):
    """SIGCHLD is ignored: no child can be waited for."""

    def after_init(self, ctx: Any) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


# ---- signals


class TermHandlerThatExits(Behaviour):
    """A handler that calls sys.exit(0) on TERM, as in many scripts."""

    hears_notice = False

    def after_init(self, ctx: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


class TermHandlerThatRaises(Behaviour):
    """TERM becomes an exception in the middle of a step."""

    hears_notice = False

    def after_init(self, ctx: Any) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, interrupt)


class TermHandlerBeforeInit(Behaviour):
    """A handler that the script installs before ``init()``."""

    def before_init(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)


class IgnoresTerm(Behaviour):
    """SIG_IGN, after ``init()``."""

    def after_init(self, ctx: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class BlocksSignals(Behaviour):
    """All signals are blocked in the main thread for good."""

    def after_init(self, ctx: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


class OwnUserSignals(Behaviour):
    """Handlers for USR1, USR2 and INT."""

    def after_init(self, ctx: Any) -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, lambda *_: None)


class AsyncioSignalHandler(Behaviour):
    """An event loop handles TERM for a while; when it closes, it removes the wakeup descriptor."""

    def after_init(self, ctx: Any) -> None:
        async def work() -> None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, lambda: None)
            await asyncio.sleep(0.01)
            loop.remove_signal_handler(signal.SIGTERM)

        asyncio.run(work())


class TrainsInAnEventLoop(Behaviour):
    """The whole loop runs inside ``asyncio.run``, which handles INT."""

    def train(self, steps: Callable[[], None]) -> None:
        async def main() -> None:
            steps()

        asyncio.run(main())


class WakeupDescriptorTaken(Behaviour):
    """A library sets the wakeup descriptor for itself."""

    def after_init(self, ctx: Any) -> None:
        self.sockets = socket.socketpair()
        for end in self.sockets:
            end.setblocking(False)
        signal.set_wakeup_fd(self.sockets[0].fileno())


class AlarmsAllTheTime(Behaviour):
    """A handler that runs a hundred times a second."""

    def after_init(self, ctx: Any) -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)


# ---- ends


class CatchesEverythingInTheStep(Behaviour):
    """``except BaseException: pass`` around each step."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        with suppress(BaseException):
            update()


class CatchesEverythingAroundTheLoop(Behaviour):
    """A bare ``except:`` around the loop, then the end of the script."""

    def train(self, steps: Callable[[], None]) -> None:
        with suppress(BaseException):
            steps()


class CatchesTheStopAndExits(Behaviour):
    """The stop is caught, and the script exits with 0."""

    def train(self, steps: Callable[[], None]) -> None:
        try:
            steps()
        except BaseException:
            sys.exit(0)


class SysExitInTheMiddle(Behaviour):
    """Every rank exits with 0 before all steps are done."""

    ends, says = "failed", "exited with code 0 inside its training loop"

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step == ONCE:
            sys.exit(0)


class OsExitInTheMiddle(Behaviour):
    """The same by ``os._exit(0)``, in each attempt."""

    ends, says = "failed", r"called os\._exit\(0\) inside its training loop"

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step == ONCE:
            os._exit(0)


class OneRankExits(Behaviour):
    """The last rank exits with 0, the others wait for it."""

    ends, says = "failed", r"rank [13] \(.*exited with code 0 inside its training loop"

    def after_init(self, ctx: Any) -> None:
        self.last = ctx.rank == ctx.world_size - 1

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step == ONCE and self.last:
            sys.exit(0)


class ExitHandlerThatHangs(Behaviour):
    """An atexit handler that never returns."""

    def after_init(self, ctx: Any) -> None:
        atexit.register(forever)


class ExitHandlerThatRaises(Behaviour):
    """An atexit handler that fails."""

    def after_init(self, ctx: Any) -> None:
        atexit.register(lambda: 1 // 0)


class ThreadThatNeverEnds(Behaviour):
    """A thread that Python would wait for forever."""

    def after_init(self, ctx: Any) -> None:
        threading.Thread(target=forever).start()


class ThreadThatLogs(Behaviour):
    """Another thread logs and prints all the time."""

    def before_loop(self, run: Any) -> None:
        def log() -> None:
            while True:
                with suppress(RuntimeError):
                    run.log(from_a_thread=time.time())
                print("still here", flush=True)
                time.sleep(0.005)

        threading.Thread(target=log, daemon=True).start()


class ThreadsThatUseTorch(Behaviour):
    """Other threads compute, and are inside torch when the process exits."""

    def after_init(self, ctx: Any) -> None:
        import torch

        def multiply() -> None:
            generator = torch.Generator().manual_seed(1)
            while True:
                torch.rand(64, 64, generator=generator) @ torch.ones(64, 64)
                time.sleep(0.001)

        for _ in range(2):
            threading.Thread(target=multiply, daemon=True).start()


class HookThatFails(Behaviour):
    """An exception, and an excepthook that raises itself."""

    ends, says = "failed", "ValueError: the data ends here"

    def after_init(self, ctx: Any) -> None:
        sys.excepthook = lambda *_: 1 // 0

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step == ONCE:
            raise ValueError("the data ends here")


# ---- values


class HugeMetrics(Behaviour):
    """A thousand values with long names in each step."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        run.log(**{f"gradient_norm/transformer.layers.{i}.attention.output.weight": i / 7 for i in range(1000)})


class ListLogged(Behaviour):
    """A list among the values of a step."""

    ends, says = "failed", r"TypeError: run\.log\(losses="

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step == ONCE:
            run.log(losses=[1.0, 2.0])


class NotFinite(Behaviour):
    """NaN and the infinities among the values."""

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        run.log(nan=float("nan"), most=float("inf"), least=-float("inf"))


class HugeResult(Behaviour):
    """More than 1 MiB logged outside of a step."""

    ends, says = "failed", r"run\.log\("

    def after_loop(self) -> None:
        self.run.log(words="x" * 2**21)

    def before_loop(self, run: Any) -> None:
        self.run = run


class HugeException(Behaviour):
    """An exception with three megabytes of text."""

    ends, says = "failed", "ValueError: xxx"

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step == ONCE:
            raise ValueError("x" * 3_000_000)


class SecretInTheException(Behaviour):
    """An exception that shows a password, with its quote and backslash escaped."""

    ends, says = "failed", r"ValueError: cannot log in with .*\*\*\*"

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if run.step == ONCE:
            raise ValueError(f"cannot log in with {os.environ['CHAOS_PASSWORD']!r}")


# ---- the process


class ClosesItsOutput(Behaviour):
    """Descriptors 1 and 2 are closed, as a daemon does."""

    def after_init(self, ctx: Any) -> None:
        os.close(1)
        os.close(2)


class ReplacesItsOutput(Behaviour):
    """sys.stdout and sys.stderr are closed objects and None."""

    def after_init(self, ctx: Any) -> None:
        sys.stdout = io.StringIO()
        sys.stdout.close()
        sys.stderr = None


class PrintsToBrokenPipe(Behaviour):
    """The reader of the output has exited."""

    def after_init(self, ctx: Any) -> None:
        read, write = os.pipe()
        os.close(read)
        for descriptor in (1, 2):
            os.dup2(write, descriptor)

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        with suppress(BrokenPipeError):
            print("nobody reads this")


class ChangesDirectory(Behaviour):
    """The script changes the working directory after ``init()``."""

    def after_init(self, ctx: Any) -> None:
        os.chdir(tempfile.gettempdir())


class RemovesItsDirectory(Behaviour):
    """The working directory is deleted, after the optimizer is made, for which torch reads it."""

    def before_loop(self, run: Any) -> None:
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        Path(folder).rmdir()


class UmaskThatClosesFiles(Behaviour):
    """A umask under which new files are unreadable for their owner."""

    def before_init(self) -> None:
        os.umask(0o777)


class SetsTheLocale(Behaviour):
    """A locale in which numbers have a comma, if this machine has one."""

    def before_init(self) -> None:
        for name in ("de_DE.UTF-8", "tr_TR.UTF-8", "C"):
            with suppress(locale.Error):
                locale.setlocale(locale.LC_ALL, name)
                return


class FewDescriptors(Behaviour):
    """A low limit of open files, which the script reaches before it closes its files."""

    def after_init(self, ctx: Any) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for descriptor in taken:
            os.close(descriptor)


class ClearsTheEnvironment(Behaviour):
    """All environment variables are removed."""

    def after_init(self, ctx: Any) -> None:
        os.environ.clear()


class DeletesItsLogs(Behaviour):
    """Rank 0 deletes the run's logs during training."""

    ends = "completed or refused"
    says = "logs"

    def before_loop(self, run: Any) -> None:
        self.first = run.step == 0

    def after_init(self, ctx: Any) -> None:
        self.logs, self.main = os.path.join(os.fspath(ctx.run_dir), "logs"), ctx.is_main

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        if self.main and self.first and run.step == 5:
            shutil.rmtree(self.logs)


class NoGarbageCollection(Behaviour):
    """Garbage collector and fault handler are disabled."""

    def after_init(self, ctx: Any) -> None:
        gc.disable()
        faulthandler.disable()


class WarningsAreErrors(Behaviour):
    """Every warning raises."""

    def after_init(self, ctx: Any) -> None:
        warnings.simplefilter("error")


class LowRecursionLimit(Behaviour):
    """A low recursion limit, set after torch's imports, which need more."""

    def before_loop(self, run: Any) -> None:
        sys.setrecursionlimit(200)


# ---- loaders


class LoaderWithWorkers(Behaviour):
    """Workers of the run's loader, by fork."""

    loader = {"num_workers": 2}


class LoaderWithSpawnedWorkers(Behaviour):
    """The same by spawn."""

    loader = {"num_workers": 1, "multiprocessing_context": "spawn"}


class OwnLoaderLeftOpen(Behaviour):
    """An iterator with workers over the script's own DataLoader."""

    def before_loop(self, run: Any) -> None:
        from torch.utils.data import DataLoader

        numbers: Any = range(100_000)
        loader: Any = DataLoader(numbers, num_workers=2, persistent_workers=True)
        self.batches = iter(loader)

    def step(self, update: Callable[[], None], run: Any) -> None:
        update()
        assert int(next(self.batches)) >= 0


def _name(kind: type[Behaviour]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()


ALL = {
    _name(kind): kind
    for kind in globals().copy().values()
    if isinstance(kind, type) and issubclass(kind, Behaviour) and kind not in (Behaviour, Together)
}


def behaviour(names: str) -> Behaviour:
    """The one of this name, or several together: ``first+second``."""
    habits = [ALL[name]() for name in names.split("+")]
    return habits[0] if len(habits) == 1 else Together(habits)
