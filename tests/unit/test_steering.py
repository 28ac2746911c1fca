"""``stacks``, ``save`` and ``stop``: from the command to a supervisor with stub ranks, over real sockets."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shlex
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterddp import protocol
from clusterddp.cli import status, steering
from clusterddp.cli.command_line import command
from clusterddp.errors import RunDirectoryError, SlurmError, SlurmUnavailable, UsageError
from clusterddp.failures.stack_traces import stacks
from clusterddp.history.checkpoints import Checkpoint
from clusterddp.history.words import BY_SLURM, RUN_ENDS
from clusterddp.jobdef.job import Job
from clusterddp.messages import requests
from clusterddp.messages.orders import Order, SendStacks
from clusterddp.messages.reports import End, Left, Stacks
from clusterddp.rundir.claims import JobClaim
from clusterddp.rundir.control_address import Address, read_address, write_address
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import request_client
from clusterddp.runs.request_client import ask, find_nodes, relay
from clusterddp.slurm.commands import JobInfo
from clusterddp.supervisor import lease
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.control_server import ControlServer, Handlers
from clusterddp.supervisor.controller import LocalController
from clusterddp.worker.control_channel import ControlChannel, RunRequests
from clusterddp.worker.rank import obey
from clusterddp.worker.rank_process import RankProcess
from tests.fake_slurm import FakeSlurm, NoRanks
from tests.histories import check_history, happened, view
from tests.waiting import wait_until
from tests.wording import raises, says

TOKEN = "secret of this attempt"


# ---- the connection


class Server:
    """A server whose requests a test can take."""

    def __init__(self) -> None:
        self.requests: queue.Queue[tuple[int, requests.UserRequest]] = queue.Queue()
        take = lambda number, request: self.requests.put((number, request))  # noqa: E731
        self.server = ControlServer(TOKEN, Handlers(lambda *_: None, on_request=take), host="127.0.0.1")
        self.address = Address("127.0.0.1", self.server.port, TOKEN)

    def ask(self, request: requests.UserRequest | None = None) -> queue.Queue[list[Any]]:
        """Asks in a thread; the answers are in the queue once there are all."""
        heard: queue.Queue[list[Any]] = queue.Queue()
        asked = request or requests.Save()
        threading.Thread(target=lambda: heard.put(list(ask(self.address, "127.0.0.1", asked)))).start()
        return heard


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.close()


def test_a_request_gets_news_and_one_last_answer_of_any_length(server: Server) -> None:
    """Such as the stacks of a thousand ranks in as many places."""
    heard = server.ask(requests.Stacks("0"))
    number, request = server.requests.get(timeout=10)
    assert request == requests.Stacks("0")
    server.server.answer(number, requests.News("wait"))
    server.server.answer(number, requests.Refused("x" * 20_000_000))
    news, answer = heard.get(timeout=20)
    assert (news, len(answer.why)) == (requests.News("wait"), 20_000_000)


def test_a_request_without_the_token_is_no_request(server: Server) -> None:
    stranger = Address("127.0.0.1", server.server.port, "another's")
    assert list(ask(stranger, "127.0.0.1", requests.Stop())) == []
    assert server.requests.empty()


def test_an_answer_of_another_version_is_an_error_that_quotes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b'{"answer": "dance"}\n')

        answering = threading.Thread(target=answer)
        answering.start()
        with raises(RunDirectoryError):
            list(ask(Address("127.0.0.1", other.getsockname()[1], TOKEN), "127.0.0.1", requests.Save()))
        answering.join()


def test_a_user_who_does_not_wait_for_the_answer_is_forgotten(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server.port)) as connection:
        connection.sendall(json.dumps({"token": TOKEN, "request": "save"}).encode() + b"\n")
        number, _ = server.requests.get(timeout=10)
    wait_until(lambda: not server.server._clients, "the connection to be dropped")
    server.server.answer(number, requests.Committed(7))
    heard = server.ask()
    server.server.answer(server.requests.get(timeout=10)[0], requests.Committed(8))
    assert heard.get(timeout=10) == [requests.Committed(8)]


def test_too_many_requests_at_a_time_are_refused(server: Server) -> None:
    waiting = [server.ask() for _ in range(16)]
    taken = [server.requests.get(timeout=10)[0] for _ in waiting]
    [refusal] = server.ask().get(timeout=10)
    assert refusal.why == "16 other requests have not been answered yet. Try again later"
    for number in taken:
        server.server.answer(number, requests.Committed(7))
    assert [heard.get(timeout=10) for heard in waiting] == [[requests.Committed(7)]] * 16


def test_a_supervisor_that_exits_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: only ranks get time for their last words."""
    monkeypatch.setattr("clusterddp.supervisor.control_server._LAST_WORDS_S", 60.0)
    server = Server()
    heard = server.ask()
    server.requests.get(timeout=10)
    threading.Thread(target=server.server.close, daemon=True).start()
    assert heard.get(timeout=10) == []


def test_the_address_is_for_the_runs_owner_alone(run: RunDirectory) -> None:
    number = run.create_attempt()
    write_address(run, number, Address("n1", 20001, TOKEN, "41"))
    assert read_address(run, number) == Address("n1", 20001, TOKEN, "41")
    assert stat.S_IMODE(run.control_file(number).stat().st_mode) == 0o600


def test_the_nodes_of_an_attempt_may_be_recorded_after_its_address(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = lambda _: happened(run, {"event": "started", "attempt": 0, "nodes": "n[1-2]"})  # noqa: E731
    monkeypatch.setattr(request_client, "time", SimpleNamespace(monotonic=time.monotonic, sleep=record))
    assert find_nodes(run, 0) == ["n1", "n2"]


# ---- a supervisor with stub ranks


class StubRanks(NoRanks):
    """Ranks that are connections of this process. Each has the stacks of this process, in one of two places."""

    name = "local"

    def __init__(self, job: Job) -> None:
        self._job, self.exited = job, threading.Event()
        self._threads = stacks(0).threads
        self.channels: list[ControlChannel] = []

    def start(self, _command: list[str], environment: Mapping[str, str], _logs: Path) -> None:
        self._address, self._token = environment[protocol.SUPERVISOR], environment[protocol.TOKEN]
        threading.Thread(target=self._join, daemon=True).start()

    def _join(self) -> None:
        for rank in range(self._job.world_size):
            channel = ControlChannel.join(self._address, self._token, rank, 1 if rank == 0 else None, timeout=60)
            assert channel is not None
            channel.listen(lambda: None, partial(self._hear, channel, rank))
            self.channels.append(channel)

    def _hear(self, channel: ControlChannel, rank: int, order: Order) -> None:
        self.obey(channel, rank, order)

    def obey(self, channel: ControlChannel, rank: int, order: Order) -> None:
        if isinstance(order, SendStacks) and rank != 1:
            place = "data.py:88 (read)" if rank % 8 == 7 else "the all_reduce of backward"
            channel.send(Stacks(request=order.request, place=place, threads=self._threads))

    def wait(self) -> int:
        self.exited.wait()
        for channel in self.channels:
            channel._closed = True
            channel._connection.shutdown(socket.SHUT_RDWR)  # a thread is reading from it
        return 0


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    run.job_file.write_text(Job(name="x", module="x", device="cpu").to_yaml())
    return run


@pytest.fixture
def supervised(run: RunDirectory) -> Iterator[Callable[[int], StubRanks]]:
    """Starts a supervisor with so many stub ranks, eight per node."""
    threads: list[tuple[StubRanks, threading.Thread]] = []

    def start(count: int) -> StubRanks:
        job = Job(
            name="x", module="x", nodes=max(1, count // 8), gpus_per_node=min(8, count), device="cpu", watchdog=None
        )
        ranks, number = StubRanks(job), run.create_attempt()
        lease.take(run, number, lease.of_this_process())
        attempt = Attempt(run, job, number, ranks, LocalController(run))
        threads.append((ranks, threading.Thread(target=attempt.supervise)))
        threads[-1][1].start()
        wait_until(lambda: len(ranks.channels) == count, "all ranks to join")
        return ranks

    yield start
    for ranks, thread in threads:
        ranks.exited.set()
        thread.join()


RANKS = int(os.environ.get("STUB_RANKS", "64"))


def test_the_stacks_of_many_ranks_are_grouped_and_a_silent_rank_is_named(
    run: RunDirectory,
    supervised: Callable[[int], StubRanks],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervised(RANKS)
    capsys.readouterr()
    slow = RANKS // 8
    assert command(["stacks", str(run), "--rank", f"0,2-{RANKS - 1}"]) == 0
    shown = capsys.readouterr().out
    assert f"{RANKS - slow - 1} ranks in the all_reduce of backward, {slow} in data.py:88 (read)\n\n" in shown
    monkeypatch.setattr("clusterddp.supervisor.user_requests.ANSWER_S", 0.5)
    assert f"({socket.gethostname()}) in data.py:88 (read)\n  MainThread, most recent call first\n    /" in shown
    assert command(["stacks", str(run), "--rank", "0-1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])  # the supervisor, a thread here, may print before
    assert answer["unanswered"] == [1] and [group["ranks"] for group in answer["stacks"]] == [[0]]
    assert answer.keys() == {item.name for item in dataclasses.fields(requests.RankStacks)}


def test_ranks_that_do_not_exist_are_refused(run: RunDirectory, supervised: Callable[[int], StubRanks]) -> None:
    supervised(2)
    with raises(RunDirectoryError):
        command(["stacks", str(run), "--rank", "2"])
    with raises(UsageError):
        command(["stacks", str(run), "--rank", "x"])


def test_a_script_that_saves_on_its_own_is_told_so(run: RunDirectory, supervised: Callable[[int], StubRanks]) -> None:
    """The answer of the rank's own entry point; with a run, the request reaches it."""
    ranks = supervised(2)
    asked: list[str] = []
    ranks.obey = lambda channel, rank, order: obey(RankProcess(channel), order)  # type: ignore[method-assign]
    with raises(RunDirectoryError):
        command(["save", str(run)])

    def save() -> None:
        asked.append("save")
        ranks.channels[0].send(Checkpoint(step=8, blocked_s=0.0, durable_s=0.1, bytes=1))

    ranks.channels[0].run = RunRequests(progress=lambda: (7, 5), save=save)
    assert command(["save", str(run)]) == 0
    ranks.channels[0].run = RunRequests(progress=lambda: (8, 8), save=save)
    assert command(["save", str(run)]) == 0
    assert asked == ["save"]


def test_a_stop_is_answered_once_the_attempt_has_ended(
    run: RunDirectory, supervised: Callable[[int], StubRanks], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = supervised(2)

    def stop(channel: ControlChannel, rank: int, order: Order) -> None:
        channel.send(Left("n1", End.STOPPED, used_clusterddp=True))
        ranks.exited.set()

    ranks.obey = stop  # type: ignore[method-assign]
    assert command(["stop", str(run)]) == 0
    shown = capsys.readouterr()
    stopped = "attempt 0: stopped by `clusterddp stop`. No step was recorded"
    words = f"{stopped}. The run is held until it is submitted again"
    assert words in shown.out
    says(shown.err)
    check_history(run.events())


SAVED, UNSAVED = {"step": 7, "checkpoint": 7}, {"step": 7, "checkpoint": 5}


@pytest.mark.parametrize(
    ("order", "end", "code"),
    [
        ("stop", {"event": "stopped", **SAVED}, 0),
        ("stop", {"event": "stopped", "step": 0, "checkpoint": None}, 0),
        ("stop", {"event": "stopped", **UNSAVED}, 1),
        ("stop", {"event": "completed", "step": 7, "attempts": 1}, 0),
        ("stop", {"event": "requeued", **SAVED}, 1),
        ("drain", {"event": "restarted", **SAVED}, 0),
        ("drain", {"event": "resubmitted", **SAVED}, 0),
        ("drain", {"event": "restarted", **UNSAVED}, 1),
        ("drain", {"event": "failed", "step": 0, "attempts": 1}, 1),
        ("drain", {"event": "stopped", **SAVED}, 1),
        ("requeue", {"event": "requeued", **UNSAVED}, 0),
        ("requeue", {"event": "stopped", **SAVED}, 1),
        ("save", {"event": "stopped", **SAVED}, 0),
        ("save", {"event": "stopped", "step": None, "checkpoint": None}, 1),
    ],
)
def test_the_exit_code_says_whether_the_attempt_ended_as_requested(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, order: str, end: dict[str, Any], code: int
) -> None:
    """The attempt may end for another reason first."""
    monkeypatch.setattr(steering, "request", lambda *_, **__: (0, requests.Ended()))
    more = {} if end["event"] in RUN_ENDS else {"cause": "why"}
    happened(run, {"time": 1.0, "attempt": 0, "reason": "why", **more, **end})
    assert command([order, str(run), *(["n1"] if order == "drain" else [])]) == code


def test_a_local_run_has_no_node_to_drain(run: RunDirectory) -> None:
    lease.loop_started(run)
    with raises(UsageError):
        command(["drain", str(run), "n1"])
    write_json(run.outcome_file, {"state": "completed", "step": 9, "reason": "all ranks finished"})
    with raises(RunDirectoryError):
        command(["drain", str(run), "n1"])


# ---- who is asked


def job(state: str, reason: str = "None") -> JobInfo:
    """Job 41 on a cluster that is not there."""
    return JobInfo("41", state, reason, "n1" if state == "RUNNING" else "", 0, None, None)


def over(run: RunDirectory) -> None:
    write_json(run.outcome_file, {"state": "completed", "step": 9, "reason": "all ranks finished"})


def queued(run: RunDirectory) -> None:
    lease.submitted(run, "41")


def of_another_machine(run: RunDirectory) -> None:
    entry = dataclasses.replace(lease.of_this_process(), host="other", machine="other")
    lease.take(run, run.create_attempt(), entry)


def test_who_wants_to_stop_a_run_that_waits_learns_how_to_keep_it_from_starting(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """That is no help to those who want its stacks."""
    fake_slurm["scontrol show job"] = job("PENDING", "Priority")
    queued(run)
    with raises(RunDirectoryError):
        command(["stop", str(run)])
    with raises(RunDirectoryError):
        command(["stacks", str(run)])


@pytest.mark.parametrize(
    "make",
    [
        lambda run: None,
        over,
        queued,
        of_another_machine,
    ],
)
def test_a_run_that_takes_no_orders_says_why(
    run: RunDirectory, fake_slurm: FakeSlurm, make: Callable[[RunDirectory], None]
) -> None:
    fake_slurm["scontrol show job"] = job("PENDING", "Priority")
    make(run)
    for order in ("stacks", "stop", "save"):
        with raises(RunDirectoryError):
            command([order, str(run)])


def test_a_command_in_a_message_can_be_copied_also_for_a_path_with_blanks(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = RunDirectory(run.path.rename(run.path.with_name("it's my run")))
    assert command(["status", str(moved)]) == 0
    line = capsys.readouterr().out.partition("Continue with: ")[2].partition("\n")[0]
    assert shlex.split(line) == ["clusterddp", "submit", "--run-dir", str(moved)]


def test_requeue_of_a_failed_run_says_how_to_continue_it(run: RunDirectory) -> None:
    """A run that failed can be continued, whatever nodes are named."""
    write_json(run.outcome_file, {"state": "failed", "step": 9, "attempts": 1, "reason": "why"})
    with raises(RunDirectoryError):
        command(["requeue", str(run), "--exclude", "n1"])


@pytest.mark.parametrize("words", [["save", "RUN"], ["requeue", "RUN"]])
def test_another_users_run_takes_no_orders(
    run: RunDirectory, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has no name in a container."""

    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    def unknown(_: Path) -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(lease, "waiting_claim", closed)
    monkeypatch.setattr(lease, "read_claim", closed)
    with raises(RunDirectoryError):
        command([str(run) if word == "RUN" else word for word in words])
    monkeypatch.setattr(Path, "owner", unknown)
    with raises(RunDirectoryError):
        command([str(run) if word == "RUN" else word for word in words])


def test_a_run_that_waits_already_is_not_requeued_again(
    run: RunDirectory, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    queued(run)
    fake_slurm["scontrol show job"] = job("PENDING", "BeginTime")
    assert command(["requeue", str(run)]) == 0
    says(capsys.readouterr().out)
    with raises(RunDirectoryError):
        command(["requeue", str(run), "--exclude", "n[1-2]"])


@pytest.mark.parametrize(
    ("end", "waits"),
    [
        ({"event": "requeued"}, True),
        ({"event": "stopped", "then": BY_SLURM}, True),
        ({"event": "stopped"}, False),  # in the user's own allocation, which stays
        ({"event": "training"}, False),
    ],
)
def test_a_job_that_is_being_requeued_is_waited_for(
    run: RunDirectory,
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    end: Any,
    waits: bool,
) -> None:
    """Slurm has it as running until its batch step has ended, and as completing until the epilog has."""
    lease.take(run, run.create_attempt(), JobClaim("41"))
    happened(run, {"time": 1.0, "attempt": 0, **end})
    fake_slurm["scontrol show job"] = [job("RUNNING"), job("COMPLETING"), job("PENDING", "BeginTime")]
    found = request_client.waiting_job(run, query_s=0.0)
    assert (found and found.state, len(fake_slurm.asked)) == (("PENDING", 3) if waits else (None, 1))
    assert capsys.readouterr().err.count("job 41 is being requeued (RUNNING). Waiting until") == waits


def test_a_requeue_without_nodes_that_the_run_needs_is_refused_before_it_stops(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    job = Job(name="x", module="x", nodes=2, gpus_per_node=1, device="cpu")
    fake_slurm["scontrol show node"] = "NodeAddr=10.0.0.1 "
    fake_slurm["scontrol show config"] = "JobSubmitPlugins = (null)\nCliFilterPlugins = (null)\n"
    fake_slurm["sinfo"] = "low|low*|n1|idle\nlow|low*|n2|idle\nlow|low*|n3|idle\n"
    steering.check_nodes(run, job, ["n3"])
    with raises(UsageError):
        steering.check_nodes(run, job, ["n2", "n3"])
    fake_slurm["sinfo"] += "gpu|gpu|n4|idle\ngpu|gpu|n5|idle\n"
    with raises(UsageError):
        steering.check_nodes(run, job, ["n2", "n3"])
    fake_slurm["scontrol show config"] = "JobSubmitPlugins = lua\nCliFilterPlugins = (null)\n"
    steering.check_nodes(run, job, ["n2", "n3"])  # the site chooses the partition, and n4 and n5 remain
    with raises(UsageError):
        steering.check_nodes(run, dataclasses.replace(job, nodelist="n[1-2]"), ["n2", "n3"])

    fake_slurm["scontrol show node -o n9"] = SlurmError("`scontrol show node -o n9` failed: Node n9 not found")
    with raises(UsageError):
        steering.check_nodes(run, job, ["n9"])
    lease.loop_started(run)
    with raises(UsageError):
        steering.check_nodes(run, job, ["n3"])
    with raises(UsageError):
        command(["requeue", str(run), "--exclude", "n["])


# ---- how


def test_status_says_why_a_node_is_excluded() -> None:
    """A drained node that the job definition requires is not excluded from the next job."""
    job = Job(name="x", module="x", nodelist="n4")
    requested = {"time": 1.0, "attempt": 0, "event": "requested", "request": "requeue", "nodes": ["n3"]}
    failed = {"time": 1.0, "attempt": 0, "event": "excluded", "nodes": ["n1"], "failures": [2]}
    drained = {**requested, "request": "drain", "nodes": ["n4"]}
    assert status.excluded_nodes(job, view([requested, failed, drained]), 2.0) == [
        ("excluded", "n1: failed repeatedly in this run"),
        ("excluded", "n3: by `clusterddp requeue --exclude` or `clusterddp drain`"),
    ]


@pytest.fixture
def in_a_job(
    run: RunDirectory, server: Server, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], None]:
    """Attempt 0 trains as job 41, at an address that cannot be reached from here. ``srun`` becomes the given script."""
    lease.take(run, run.create_attempt(), JobClaim("41"))
    write_address(run, 0, Address("n1", server.server.port, TOKEN, "41"))
    fake_slurm |= {"scontrol show job": job("RUNNING"), "scontrol show node": "NodeAddr=127.0.0.2 "}
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def make(srun: str) -> None:
        (tmp_path / "srun").write_text(f"#!/bin/bash\n{srun}\n")
        (tmp_path / "srun").chmod(0o755)

    return make


def test_where_the_node_cannot_be_reached_a_step_of_the_job_asks(
    run: RunDirectory, server: Server, in_a_job: Callable[[str], None], tmp_path: Path
) -> None:
    """It reads the token itself: command lines are visible to everyone."""
    in_a_job('printf "%s " "$@" > $(dirname $0)/given; while [[ $1 == --* ]]; do shift; done; exec "$@"')
    heard: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: heard.put(request_client.request(run, requests.Stacks("0")))).start()
    number, request = server.requests.get(timeout=20)
    assert request == requests.Stacks("0")
    server.server.answer(number, requests.News("wait"))
    server.server.answer(number, requests.RankStacks(unanswered=[1]))
    assert heard.get(timeout=10) == (0, requests.RankStacks(unanswered=(1,)))
    given = (tmp_path / "given").read_text()
    assert given.startswith("--jobid=41 --nodelist=n1 --chdir=/ --overlap ") and TOKEN not in given


def test_where_neither_way_works_both_reasons_are_given(run: RunDirectory, in_a_job: Callable[[str], None]) -> None:
    in_a_job("echo 'srun: error: Job is completing' >&2; exit 1")
    with raises(RunDirectoryError):
        request_client.request(run, requests.Save())


def test_a_step_that_finds_no_supervisor_says_so(run: RunDirectory) -> None:
    """In the place of a traceback, which the command quotes."""
    run.create_attempt()
    with raises(RunDirectoryError):
        relay(str(run), 0, '{"request": "save"}')
    with socket.create_server(("127.0.0.1", 0)) as closed:
        write_address(run, 0, Address("n1", closed.getsockname()[1], TOKEN))
    with raises(RunDirectoryError):
        relay(str(run), 0, '{"request": "save"}')


def test_an_unreachable_controller_does_not_keep_a_request_from_the_supervisor(
    run: RunDirectory, server: Server, in_a_job: Callable[[str], None], fake_slurm: FakeSlurm
) -> None:
    """Then a hung run is of most interest."""
    in_a_job("exit 1")
    fake_slurm |= dict.fromkeys(fake_slurm, SlurmUnavailable("Unable to contact slurm controller"))
    write_address(run, 0, Address("127.0.0.1", server.server.port, TOKEN, "41"))
    heard: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: heard.put(request_client.request(run, requests.Save()))).start()
    server.server.answer(server.requests.get(timeout=20)[0], requests.Committed(7))
    assert heard.get(timeout=10) == (0, requests.Committed(7))
