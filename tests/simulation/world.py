"""The world of one history: a queue of events in simulated time, and processes whose threads are greenlets.

Exactly one thread runs at a time, until it waits: for time, for a queue, for another thread. Nothing else switches, and
all that is random is drawn from one generator, so that a seed repeats a history exactly.
"""

from __future__ import annotations

import itertools
import random
import time as real_time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from queue import Empty
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

#: When histories begin, in unix seconds.
EPOCH = 1_800_000_000.0
#: The most a thread waits that could go on at once: which of several comes first is drawn.
JITTER_S = 0.002


class Killed(GreenletExit):  # type: ignore[misc]
    """Ends a thread of a killed process, whose further calls do nothing."""


class Process:
    """A process on a node. A killed one never runs again, not even its ``finally`` blocks, as far as anybody sees."""

    def __init__(self, world: World, name: str, node: str, environ: Mapping[str, str] | None = None) -> None:
        self.world, self.name, self.node, self.environ = world, name, node, dict(environ or {})
        self.pid = world.next_pid()
        self.alive = True
        self.code: int | None = None
        #: When it exited.
        self.ended = 0.0
        self.threads: list[Thread] = []
        #: Called with the exit code when the process ends, None if it was killed.
        self.on_exit: Callable[[int | None], Any] = lambda _: None
        #: Until when the process is stopped, if it is.
        self.stopped_until = 0.0
        world.processes.append(self)

    def start(self, work: Callable[[], int]) -> None:
        """Runs ``work``, whose result is the exit code, in the main thread."""

        def main() -> None:
            code = work()
            self.exit(code)

        Thread(self, main, self.name).start()

    def exit(self, code: int) -> None:
        """The main thread returned: the others end with it."""
        if self.alive:
            self.alive, self.code, self.ended = False, code, self.world.now
            self.on_exit(code)

    def kill(self) -> None:
        """As SIGKILL does."""
        if self.alive:
            self.alive = False
            self.on_exit(None)


class Thread:
    """A thread of a process; ``threading.Thread`` for the product."""

    def __init__(self, process: Process, target: Callable[..., Any], name: str, args: tuple[Any, ...] = ()) -> None:
        self.process, self.name, self.done = process, name, False
        self._target, self._args = target, args
        self.greenlet = greenlet(self._run, process.world.hub)
        self.switch = self.greenlet.switch
        #: Counts waits, so that a late wake-up of an earlier wait has no effect; -1 of a thread that has ended.
        self.wait = 0
        self._joining: list[tuple[Thread, int]] = []
        process.threads.append(self)

    def _run(self, _: object = None) -> None:
        try:
            self._target(*self._args)
        except GreenletExit:
            return
        except BaseException as error:
            if self.process.alive:
                self.process.world.crashed(self, error)
            return
        finally:
            self.wait = -1
        self.done = True
        for thread, wait in self._joining:
            self.process.world.wake(thread, wait)

    def start(self) -> None:
        """Begins soon."""
        world = self.process.world
        world.threads.append(self)
        world.wake(self, 0)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread's end."""
        if not self.done:
            world = self.process.world
            self._joining.append(world.waiter())
            world.park(timeout)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.done


@dataclass
class Line:
    """A line of the story."""

    at: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.who:<14} {self.what}"


@dataclass
class World:
    """One history. ``traced``: whether the story is kept."""

    seed: int
    traced: bool = False
    now: float = 0.0
    events: int = 0
    story: list[Line] = field(default_factory=list)
    #: By how much the clock of a node is wrong.
    skew: dict[str, float] = field(default_factory=dict)
    #: The node that an event outside of threads happens on.
    acting: str = ""
    #: What the product said that no invariant allows, or what broke: (when, which, what).
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.hub = getcurrent()
        self._to_hub = self.hub.switch
        self.thread: Thread | None = None
        self.threads: list[Thread] = []
        self.processes: list[Process] = []
        #: What happens when: (time, order, function, its arguments), or (time, order, None, a thread, its wait).
        self._queue: list[tuple[Any, ...]] = []
        self._next = itertools.count().__next__
        self._until = 0.0
        #: Before this time nobody looks whether the history is over.
        self.look_at = 0.0
        self._pids = itertools.count(1000)
        self._over = False

    def next_pid(self) -> int:
        """A new process id."""
        return next(self._pids)

    def alive_on(self, node: str) -> set[int]:
        """The processes of a node."""
        return {process.pid for process in self.processes if process.alive and process.node == node}

    # --- time

    def after(self, seconds: float, act: Callable[..., Any], *args: Any) -> None:
        """Does something later."""
        heappush(self._queue, (self.now + seconds, self._next(), act, args))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Plays events until none is left, the time is over, or it is ``done``, which is asked from `look_at` on."""
        queue, violations = self._queue, self.violations
        self._until = until
        while queue and not violations:
            event = heappop(queue)
            self.now = now = event[0]
            if now > until:
                break
            self.events += 1
            if (act := event[2]) is not None:
                act(*event[3])
            elif event[4] == (thread := event[3]).wait and (process := thread.process).alive:
                if process.stopped_until > now:
                    at = now + (process.stopped_until - now)
                    heappush(queue, (at, self._next(), None, thread, event[4]))
                else:
                    thread.wait += 1  # a second wake-up of the same wait has no effect
                    self.thread = thread
                    thread.switch()
                    self.thread = None
            if self.now >= self.look_at and done():
                break

    def close(self) -> None:
        """Ends all threads: what they still call raises."""
        self._over = True
        for thread in self.threads:
            thread.process.alive = False
        for thread in self.threads:
            if not thread.greenlet.dead and thread.greenlet:
                thread.greenlet.throw(Killed)

    # --- threads

    @property
    def process(self) -> Process:
        """The process that calls."""
        assert self.thread is not None
        return self.thread.process

    def waiter(self) -> tuple[Thread, int]:
        """What ``wake`` needs for the next ``park`` of the calling thread."""
        thread = self.current()
        return thread, thread.wait + 1

    def current(self) -> Thread:
        """The calling thread; ends it if its process was killed."""
        thread = self.thread
        if thread is None or not thread.process.alive:
            raise Killed
        return thread

    def park(self, timeout: float | None = None) -> None:
        """The calling thread waits until it is woken, or the time is over."""
        thread = self.thread
        if thread is None or not thread.process.alive:
            raise Killed
        thread.wait = wait = thread.wait + 1
        if timeout is not None:
            at = self.now + timeout if timeout > 0.0 else self.now
            heappush(self._queue, (at, self._next(), None, thread, wait))
        following = self._following()
        if following is thread:
            return
        if following is None:
            self._to_hub()
        else:
            following.switch()
        if self._over or not thread.process.alive:
            raise Killed

    def _following(self) -> Thread | None:
        """The thread that goes on as the next event, which then has begun. None if `run` has to decide what follows."""
        if not self._queue or self.now >= self.look_at or self.violations:
            return None
        event = self._queue[0]
        if event[2] is not None or event[0] > self._until:
            return None
        at: float = event[0]
        thread: Thread = event[3]
        wait: int = event[4]
        if wait != thread.wait or not thread.process.alive or thread.process.stopped_until > at:
            return None
        heappop(self._queue)
        self.now = at
        self.events += 1
        thread.wait += 1
        self.thread = thread
        return thread

    #: The calling thread does nothing for a while.
    sleep = park

    def wake(self, thread: Thread, wait: int) -> None:
        """Has a thread go on that waits, soon."""
        at = self.now + self.random.random() * JITTER_S
        heappush(self._queue, (at, self._next(), None, thread, wait))

    def crashed(self, thread: Thread, error: BaseException) -> None:
        """A thread ended by an exception; the main thread's ends its process, as ``entry.exit_with`` does."""
        process = thread.process
        self.tell(process.name, f"{thread.name}: {type(error).__name__}: {error}")
        if thread is process.threads[0]:
            self.on_crash(process, error)
            process.exit(70)

    #: What to do about an error that ends a process.
    on_crash: Callable[[Process, BaseException], Any] = lambda *_: None

    def tell(self, who: str, what: str) -> None:
        """Adds a line to the story."""
        if self.traced:
            self.story.append(Line(self.now, who, what))


class Time:
    """The module ``time``, as the product sees it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sleep = world.park
        self.strptime, self.localtime, self.mktime = real_time.strptime, real_time.localtime, real_time.mktime
        self.strftime, self.gmtime = real_time.strftime, real_time.gmtime

    def time(self) -> float:
        """Unix seconds."""
        world = self._world
        if not world.skew:
            return EPOCH + world.now
        node = world.acting if world.thread is None else world.thread.process.node
        return EPOCH + world.now + world.skew.get(node, 0.0)

    def monotonic(self) -> float:
        """Seconds since the machine's start."""
        return 5000.0 + self._world.now


class SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._waiting: deque[tuple[Thread, int]] = deque()
        self.unfinished_tasks = 0

    def put(self, item: Any) -> None:
        """From any thread, or from an event."""
        self._items.append(item)
        self.unfinished_tasks += 1
        while self._waiting:
            self._world.wake(*self._waiting.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item; raises Empty if none comes in time."""
        deadline = None if timeout is None else self._world.now + timeout
        while not self._items:
            left = None if deadline is None else deadline - self._world.now
            if not block or (left is not None and left <= 0):
                raise Empty
            self._waiting.append(self._world.waiter())
            self._world.park(left)
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether it has no item."""
        return not self._items

    def task_done(self) -> None:
        """An item was dealt with."""
        self.unfinished_tasks -= 1


class Event:
    """``threading.Event``."""

    def __init__(self, world: World) -> None:
        self._world, self._set = world, False
        self._waiting: list[tuple[Thread, int]] = []

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def set(self) -> None:
        """From any thread, or from an event."""
        self._set = True
        for thread, wait in self._waiting:
            self._world.wake(thread, wait)
        self._waiting = []

    def wait(self, timeout: float | None = None) -> bool:
        """Returns whether it has happened in time."""
        if not self._set:
            self._waiting.append(self._world.waiter())
            self._world.park(timeout)
        return self._set


class Lock:
    """``threading.Lock``: no thread is switched while it is held, unless it waits."""

    def __init__(self, world: World) -> None:
        self._world, self._held = world, False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True) -> bool:
        """Waits until it is free."""
        while self._held:
            if not blocking:
                return False
            self._world.sleep(JITTER_S)
        self._held = True
        return True

    def release(self) -> None:
        """Frees it."""
        self._held = False


class Queues:
    """The module ``queue``."""

    Empty = Empty

    def __init__(self, world: World) -> None:
        self.SimpleQueue = self.Queue = _Maker(SimpleQueue, world)


class Threading:
    """The module ``threading``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.Lock, self.Event = _Maker(Lock, world), _Maker(Event, world)

    def Thread(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool | None = None,
    ) -> Thread:
        """A thread of the calling process."""
        return Thread(self._world.process, target, name, args)


class _Maker:
    """Makes a class's objects in this world; may be subscripted, as generic classes are."""

    def __init__(self, made: Callable[..., Any], world: World) -> None:
        self._made, self._world = made, world

    def __getitem__(self, _: Any) -> _Maker:
        return self

    def __call__(self) -> Any:
        return self._made(self._world)
