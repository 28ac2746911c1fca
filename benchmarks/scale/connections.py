"""Simulated ranks against one real supervisor.

Every figure is of one machine that also runs the simulated ranks. CPU seconds are the supervisor's own.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory

#: Strangers that connect while the ranks do, and the heartbeats' period where the job has none of its own.
FLOOD, BEATS = 2000, 3
#: How long to wait for a phase, and for the ranks to leave after a stop.
WAIT_S, STOP_S = 180.0, 30.0


class Child:
    """A process that answers a request per line."""

    def __init__(self, *words: str, errors: Path) -> None:
        with open(errors, "ab") as err:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen([sys.executable, "-m", *words], stdin=pipe, stdout=pipe, stderr=err)

    def tell(self, name: str, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({name: values}) + "\n").encode())
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.process.args!r} ended with {self.process.wait()}"
        return dict(json.loads(line))

    def ask(self, name: str, **values: Any) -> dict[str, Any]:
        self.tell(name, **values)
        return self.read()


class Driver:
    """The supervisor's process, and the processes of the simulated ranks."""

    def __init__(self, folder: Path, ranks: int, processes: int) -> None:
        self.run, self.ranks = RunDirectory(folder / "run"), ranks
        self.run.create()
        self.log = folder / "supervisor.log"
        self.supervisor = Child("benchmarks.scale.supervised", str(self.run), str(ranks), errors=self.log)
        self.stubs = [Child("benchmarks.scale.stubs", errors=folder / "stubs.log") for _ in range(processes)]
        self._share = -(-ranks // processes)

    def wanted(self) -> None:
        """Returns once the supervisor wants ranks."""
        self._start = self.supervisor.read()["start"]

    def join(self) -> None:
        """All ranks connect at once."""
        start = self._start
        for number, stubs in enumerate(self.stubs):
            first = number * self._share
            count = min(self._share, self.ranks - first)
            stubs.tell("join", port=start["port"], token=start["token"], first=first, count=count)
        for stubs in self.stubs:
            stubs.read()
        self.port, self.token = start["port"], start["token"]

    def counts(self) -> Counter[str]:
        """What all simulated ranks have counted."""
        total: Counter[str] = Counter()
        for stubs in self.stubs:
            for name, value in stubs.ask("counts").items():
                total.update(
                    {f"{name} {kind}": n for kind, n in value.items()} if isinstance(value, dict) else {name: value}
                )
        return total

    def usage(self) -> dict[str, Any]:
        return dict(self.supervisor.ask("usage")["usage"])

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Waits; AssertionError after WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline, (
                f"{what}: {self.counts()} {self.usage()}\n{self.log.read_text()[-2000:]}"
            )
            time.sleep(0.02)

    def of(self, rank: int) -> Child:
        return self.stubs[rank // self._share]

    def close(self) -> None:
        for child in (self.supervisor, *self.stubs):
            assert child.process.stdin is not None
            child.process.stdin.close()
            child.process.kill()
            child.process.wait()


@contextmanager
def driver(ranks: int) -> Iterator[Driver]:
    with tempfile.TemporaryDirectory() as folder:
        made = Driver(Path(folder), ranks, max(1, min(4, ranks // 1024)))
        try:
            yield made
        finally:
            made.close()


def cost(made: Driver, act: Callable[[Driver], Mapping[str, Any]]) -> dict[str, Any]:
    """What ``act`` returns, what it costs the supervisor, and the messages that the ranks counted."""
    before, counted, began = made.usage(), made.counts(), time.time()
    values = act(made)
    wall_s, after, now = time.time() - began, made.usage(), made.counts()
    return {
        **values,
        "cpu_s": round(after["cpu_s"] - before["cpu_s"], 3),
        "wall_s": round(wall_s, 2),
        "rss_mb": round(after["rss_mb"], 1),
        "files": after["files"],
        "counts": {name: number - counted[name] for name, number in now.items() if number != counted[name]},
    }


def join(made: Driver) -> dict[str, Any]:
    """All ranks join; how many had to again."""
    made.join()
    made.until(all_joined(made), "the first join")
    return {"dropped": made.counts()["displaced"]}


def all_joined(made: Driver) -> Callable[[], bool]:
    return lambda: made.counts()["joined"] >= made.ranks and made.usage()["joined"] == made.ranks


def stacks(made: Driver) -> dict[str, Any]:
    """A user asks for the stacks of all ranks."""
    with socket.create_connection(("127.0.0.1", made.port), timeout=WAIT_S) as user:
        hello = {"token": made.token, "request": "stacks", "values": {"ranks": None}}
        user.sendall((json.dumps(hello) + "\n").encode())
        line = user.makefile("rb").readline()
    answer = json.loads(line)
    answered = sum(len(group["ranks"]) for group in answer["stacks"])
    return {"groups": len(answer["stacks"]), "answered": answered, "bytes": len(line)}


def failure(made: Driver) -> dict[str, Any]:
    """A rank is killed, its peers are by the launcher, and the history names it; all join again in place."""
    victim = made.ranks // 2 + 1
    for stubs in made.stubs:
        stubs.ask("beat", every_s=0)
    at = made.of(victim).ask("fail", rank=victim)["at"]
    for stubs in made.stubs:
        stubs.ask("leave")
    ended = time.time()
    made.supervisor.tell("ended", exit_code=137, killed=victim)
    over = made.supervisor.read()["over"]
    made.wanted()
    named = next(event for event in made.run.events() if event["event"] == "rank_failed")
    assert named["rank"] == victim, named
    return {
        "named_s": round(named["time"] - at, 3),
        "all_ended_s": round(ended - at, 3),
        "over_s": round(over["time"] - at, 3),
        "restarts": over["code"] == -1,
    }


def failures(ranks: int, number: int) -> list[dict[str, Any]]:
    """``failure`` in so many runs, each with nothing before it but the join."""
    found = []
    for _ in range(number):
        with driver(ranks) as made:
            made.wanted()
            made.join()
            made.until(all_joined(made), "the join")
            found.append(failure(made))
    return found


def stop(made: Driver) -> dict[str, Any]:
    """A preemption: all ranks are told, confirm, and leave."""
    made.supervisor.tell("preempt")
    deadline = time.monotonic() + STOP_S
    while made.counts()["open"] and time.monotonic() < deadline:
        time.sleep(0.02)
    told, missed = time.time(), made.counts()["open"]
    for stubs in made.stubs:
        stubs.ask("leave")
    made.supervisor.tell("ended", exit_code=0)
    over = made.supervisor.read()["over"]
    lines = made.run.events_file.read_bytes().splitlines()
    return {
        "over_s": round(over["time"] - told, 3),
        "missed": missed,
        "history_lines": len(lines),
        "log_bytes": made.log.stat().st_size,
    }


def measure(ranks: int) -> dict[str, Any]:
    """All phases of one run, with so many simulated ranks."""
    found: dict[str, Any] = {"ranks": ranks}
    with driver(ranks) as made:
        made.wanted()
        started = made.usage()
        found["empty_mb"] = round(started["rss_mb"], 1)
        found["hello"] = cost(made, join)
        period = beat_s(ranks)
        found["heartbeats"] = {"period_s": period, **beats(made, period)}
        found["stacks"] = cost(made, stacks)
        found["failure"] = cost(made, failure)
        found["storm"] = cost(made, storm)
        found["stop"] = cost(made, stop)
    return found


def beat_s(ranks: int) -> float:
    job = Job(name="x", module="x", nodes=ranks // 8, gpus_per_node=8)
    assert job.watchdog is not None
    return job.watchdog.period_s(ranks)


def beats(made: Driver, period: float) -> dict[str, Any]:
    """Heartbeats of all ranks for some periods, and the watchdog's looks at them."""
    before, counted, began = made.usage(), made.counts(), time.monotonic()
    for stubs in made.stubs:
        stubs.ask("beat", every_s=period)
    while time.monotonic() - began < max(6.0, BEATS * period):
        time.sleep(0.5)
    for stubs in made.stubs:
        stubs.ask("beat", every_s=0)
    made.until(lambda: made.usage()["queued"] == 0, "the heartbeats")
    wall_s, after, now = time.monotonic() - began, made.usage(), made.counts()
    sent = now["sent alive"] - counted["sent alive"]
    cpu_s = after["cpu_s"] - before["cpu_s"]
    return {
        "messages": sent,
        "per_s": round(sent / wall_s, 1),
        "cpu_s": round(cpu_s, 3),
        "cpu_share": round(cpu_s / wall_s, 4),
        "lost": now["lost"] - counted["lost"],
    }


def storm(made: Driver) -> dict[str, Any]:
    """The same join after a restart in place, while strangers connect as well."""
    before = made.counts()
    made.join()
    for stubs in made.stubs:
        stubs.tell("flood", port=made.port, count=FLOOD // len(made.stubs))
    for stubs in made.stubs:
        stubs.read()
    made.until(lambda: made.counts()["joined"] - before["joined"] >= made.ranks, "the storm")
    made.until(lambda: made.usage()["joined"] == made.ranks, "the storm's ranks in the state")
    return {"dropped": made.counts()["displaced"] - before["displaced"], "strangers": FLOOD}
