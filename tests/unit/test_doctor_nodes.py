"""``doctor --nodes`` and ``preflight: true`` without a cluster: what probes report, who waits, who is at fault."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clusterddp import environment
from clusterddp.checks import batch_step, nodes_job, probe
from clusterddp.checks import node as clock
from clusterddp.checks.batch_step import Conductor, Probe, ProbeServer, results
from clusterddp.checks.node import Check, failed, ok, warning
from clusterddp.checks.nodes_job import nodes_of, summary
from clusterddp.errors import LauncherEnvironmentError, PreflightError, SlurmError
from clusterddp.failures.exclusion import failures, unchecked
from clusterddp.history.codec import sentence
from clusterddp.jobdef.job import Job
from clusterddp.messages.reports import End
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.verdict import Action, RankEnd, judge
from clusterddp.training import preflight
from clusterddp.training.settings import read as read_settings
from tests.fake_slurm import FakeController, FakeRanks, FakeSlurm
from tests.histories import event_of, happened, view
from tests.wording import raises

CPU = torch.device("cpu")

# --- the batch step


class Client:
    """A probe's connection, by hand."""

    def __init__(self, server: ProbeServer, rank: int, token: str | None = None) -> None:
        self.connection = socket.create_connection(("127.0.0.1", server.port), 10)
        self.lines = self.connection.makefile("rb")
        self.send(token=token or server.token, rank=rank, host=f"h{rank}", port=20000 + rank)

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def ready(self) -> None:
        """Is done as soon as it has its place."""
        self.send(ready=True)
        threading.Thread(target=self._take_part, daemon=True).start()

    def _take_part(self) -> None:
        self.place = probe.Place(**json.loads(self.lines.readline()))
        self.send(done=True)


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    server = ProbeServer()
    yield server
    server.shutdown()
    server.server_close()


def conduct(server: ProbeServer, ranks: int, per_node: int, start_s: float, ended: Collection[int] = ()) -> Conductor:
    """Conducts probes that have already sent what they check alone."""
    nodes = [f"n{number + 1}" for number in range(ranks // per_node)]
    conductor = Conductor(server, nodes, per_node, ended=lambda: ended, save=lambda: None)
    conductor.conduct(clock_port=99, start_s=start_s, together_s=10.0)
    return conductor


def test_the_probes_that_answer_get_their_places_among_themselves(server: ProbeServer) -> None:
    """A silent node and a rank with a broken device are left out; the first of the others holds the store."""
    clients = {rank: Client(server, rank) for rank in (0, 2, 3, 4)}
    for rank, client in clients.items():
        client.send(check=ok("device", "GPU").as_json())
        client.ready() if rank != 0 else client.send(ready=False)
    conductor = conduct(server, 6, 2, start_s=1.0)
    places = [clients[rank].place for rank in (2, 3, 4)]
    assert [(place.rank, place.world_size) for place in places] == [(0, 3), (1, 3), (2, 3)]
    assert {(place.store_host, place.store_port) for place in places} == {("127.0.0.1", 20002)}
    assert places[0].nodes == ["n2", "n3"] and places[0].clock_port == 99
    states = {rank: known.state for rank, known in conductor.probes.items()}
    assert states == {0: "unable", 2: "done", 3: "done", 4: "done"}


def test_a_probe_that_exits_holds_nobody_up(server: ProbeServer) -> None:
    """As soon as its connection ends or, if it never connected, srun says so."""
    Client(server, 0).connection.close()
    other = Client(server, 1)
    other.ready()
    conductor = conduct(server, 3, 1, start_s=3600.0, ended=[2])
    assert {rank: known.state for rank, known in conductor.probes.items()} == {0: "gone", 1: "done"}


def test_strangers_and_noise_do_not_disturb_the_batch_step(server: ProbeServer) -> None:
    """A wrong token, no JSON, no line at all."""
    Client(server, 0, token="wrong")
    socket.create_connection(("127.0.0.1", server.port)).sendall(b"GET / HTTP/1.1\r\n\r\n")
    silent = socket.create_connection(("127.0.0.1", server.port))
    client = Client(server, 0)
    client.ready()
    assert conduct(server, 1, 1, start_s=60.0).probes[0].state == "done"
    silent.close()


def test_an_unfinished_rank_is_reported_with_what_is_known_of_its_end() -> None:
    done = Probe(0, "h0", "10.0.0.1", 1, None, "done", [ok("device", "GPU").as_json()])
    found = results(["n1", "n2"], 1, {0: done}, over=True, ended=[1], why=lambda rank: f"log of rank {rank}")
    assert found["ranks"]["1"] == {"state": "missing", "why": "log of rank 1", "exited": True}
    assert "why" not in found["ranks"]["0"]


# --- the rows


def reported(*ranks: dict[str, Any], per_node: int = 1) -> dict[str, Any]:
    """Results as the batch step writes them."""
    names = [f"n{number + 1}" for number in range(len(ranks) // per_node)]
    known = {str(rank): json.loads(json.dumps(values)) for rank, values in enumerate(ranks)}
    return {"over": True, "nodes": names, "per_node": per_node, "ranks": known}


def rank(*checks: Check, state: str = "done", **values: Any) -> dict[str, Any]:
    return {"state": state, "checks": [check.as_json() for check in checks], **values}


GPU = ok("device", "H100", uuid="1a2b3c4d-5e6f")
OTHER = ok("device", "H100", uuid="9f8e7d6c-5b4a")


def test_each_node_is_a_row_with_what_was_found() -> None:
    """In the words of its first rank."""
    right = ok("compute", "right")
    nodes = nodes_of(reported(rank(GPU, right), rank(OTHER, right), per_node=2))
    (row,) = (node.row for node in nodes)
    assert (row.name, row.state, row.found) == ("n1", "ok", "2 ranks: H100, right")
    assert summary(nodes) == "1 of 1 node passed"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            {"state": "missing", "why": "exit code 1; No module named 'yaml'"},
            "rank 0 did not answer within 120 s (exit code 1",
        ),
        (
            {"state": "missing", "why": "exit code 1", "exited": True},
            "rank 0 exited before its first check (exit code 1)",
        ),
        (rank(GPU, state="starting"), "rank 0 did not continue after the check 'device' within 120 s"),
        (rank(state="gone", why="killed by signal 9"), "rank 0 exited before its first check (killed by signal 9)"),
        (rank(GPU, state="ready"), "rank 0 did not continue after the check 'device' within 90 s"),
        (rank(failed("device", "no GPU", "request one"), state="unable"), "device: no GPU"),
        (rank(warning("clock", "clock differs by +3.0 s from the first node's", "run chrony")), "clock differs"),
    ],
)
def test_what_is_wrong_with_a_node_is_its_row(known: dict[str, Any], words: str) -> None:
    """The other node keeps its own."""
    bad, good = nodes_of(reported(known, rank(GPU)))
    assert words in bad.row.found and bad.row.advice
    assert bad.row.state == ("warning" if "clock" in words else "failed")
    assert good.row.state == "ok"


def test_two_ranks_of_a_node_with_one_gpu_fail_it() -> None:
    """The same GPU on another node is another one only by its UUID."""
    shared, apart = nodes_of(reported(rank(GPU), rank(GPU), rank(OTHER), rank(OTHER, OTHER), per_node=2))
    assert "ranks 0 and 1 share the GPU 1a2b3c4d" in shared.row.found
    assert "ranks 2 and 3 share the GPU 9f8e7d6c" in apart.row.found
    assert nodes_of(reported(rank(GPU), rank(OTHER), per_node=2))[0].row.state == "ok"
    json.dumps(shared.as_json())


# --- waiting for the job


def awaited(run: RunDirectory, queue_s: float = 600.0) -> dict[str, Any]:
    return nodes_job.await_results("7", run, queue_s, ask_s=0.0)


def info(state: str, reason: str = "None") -> str:
    """squeue's line about the job."""
    return f"7|{state}|{'n[1-2]' if state == 'RUNNING' else ''}|N/A|5:00|gpu|{reason}\n"


def test_the_wait_says_why_and_ends_with_the_results(
    tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reason once. Results that are not complete count only once the job has ended."""
    run, pending = RunDirectory(tmp_path), [info("PENDING"), info("PENDING", "Priority"), info("PENDING", "Priority")]
    fake_slurm["squeue"] = [*pending, info("PENDING", "Resources"), info("RUNNING"), info("COMPLETED")]
    write_json(tmp_path / "results.json", {"over": False})
    assert awaited(run)["over"] is False
    assert capsys.readouterr().err.splitlines() == [
        "doctor: job 7 is waiting: jobs with a higher priority start first",
        "doctor: job 7 is waiting: next in the queue, waiting for nodes to become free",
        "doctor: job 7 is running on n[1-2]",
    ]
    write_json(tmp_path / "results.json", {"over": True})
    assert awaited(run)["over"] is True


def test_a_job_without_results_is_an_error_with_its_log(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """As where the nodes do not have the Python environment, or the folder."""
    run = RunDirectory(tmp_path / "job")
    run.create()
    (run.logs / "job-7.log").write_text("bash: /opt/venv/bin/python: No such file or directory\n")
    fake_slurm["squeue"] = info("FAILED")
    with raises(SlurmError):
        awaited(run)


def test_a_job_that_does_not_start_is_given_up(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm["squeue"] = info("PENDING", "Priority")
    with raises(SlurmError):
        awaited(RunDirectory(tmp_path), queue_s=-1.0)


# --- single checks


def test_the_product_of_the_matrices_is_known_without_torch() -> None:
    """Small whole numbers, exact in float16, and not all alike."""
    tile = torch.tensor(clock.product_tile(16))
    index = torch.arange(16)
    left, right = (index[:, None] + index) % 8 < 4, (3 * index[:, None] + index) % 8 < 4
    assert torch.equal((left.long() @ right.long())[:8, :8], tile)
    assert len(tile.unique()) > 2 and max(map(max, clock.product_tile(clock.GPU_SIZE))) <= 2048


def test_a_wrong_element_of_the_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.multiply(CPU).state == "ok"
    tile = clock.product_tile(clock.CPU_SIZE)
    tile[3][5] += 1
    monkeypatch.setattr(clock, "product_tile", lambda size: tile)
    check = clock.multiply(CPU)
    assert (check.state, check.found) == (
        "failed",
        "4,096 of 262,144 elements of a matrix product in float32 are wrong",
    )


@pytest.mark.parametrize(("free", "state"), [(78, "ok"), (60, "warning")])
def test_a_gpu_that_somebody_else_uses_is_told(free: int, state: str) -> None:
    check = clock.judge_gpu("NVIDIA H100", "1a2b3c4d-5e6f", free * clock.GIB, 80 * clock.GIB, visible="0,1")
    assert check.state == state
    assert check.found == f"NVIDIA H100, {free:.1f} of 80.0 GiB free"


@pytest.mark.parametrize(
    ("near", "state"),
    [("0-3,8-11", "ok"), ("0-63", "ok"), ("4-7", "warning"), ("0-3", "warning"), ("", "ok"), (None, "ok")],
)
def test_a_rank_on_cpus_that_are_not_next_to_its_gpu_is_told(
    near: str | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on the other socket, and one that may move there. Virtual machines may not say what is next to a GPU."""
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)
    monkeypatch.setattr(clock, "PCI", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 8})
    if near is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(f"{near}\n")
    check = clock.locality(torch.device("cuda", 0))
    assert check.state == state
    assert (check.values.get("own") == [2, 3, 8]) == bool(near)


def test_the_clocks_of_two_hosts_are_compared_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is 5 s behind; then the same one."""
    server = clock.TimeServer()
    try:
        ahead_s, trip_s = clock.difference("127.0.0.1", server.port)
        assert abs(ahead_s) <= trip_s and probe.judge_clock(ahead_s, trip_s).state == "ok"
        monkeypatch.setattr(clock, "_receive", lambda connection: connection.recv(8) and time.time() - 5.0)
        check = probe.judge_clock(*clock.difference("127.0.0.1", server.port))
        assert check.state == "warning" and "clock differs by +5.0 s" in check.found
    finally:
        server.close()


def test_an_all_reduce_that_does_not_end_is_given_up() -> None:
    class Stuck:
        def is_completed(self) -> bool:
            return False

    with raises(clock.NoAnswer):
        clock.finish(Stuck(), 0.0)  # type: ignore[arg-type]


def test_files_of_other_nodes_must_appear(tmp_path: Path) -> None:
    """With their contents, not only their names."""
    folder = tmp_path / "job"
    folder.mkdir()
    assert probe.write(folder, "n1").state == "ok"
    (folder / "seen-n3").write_text("")
    check = probe.visible(folder, ["n1", "n2", "n3"], within_s=0.0)
    assert (check.state, check.found) == (
        "failed",
        f"files that n2, n3 wrote into {tmp_path} did not appear within 0 s",
    )
    probe.write(folder, "n2"), probe.write(folder, "n3")
    assert probe.visible(folder, ["n1", "n2", "n3"]).state == "ok"


def test_a_loopback_address_among_several_nodes_is_told() -> None:
    assert probe.network("127.0.0.1", 1).state == "ok"
    assert probe.network("127.0.0.1", 2).state == "warning"
    assert probe.network("127.0.0.1", 1).found.startswith("127.0.0.1 on lo")


# --- preflight


def events(*entries: tuple[str, int, Any]) -> list[dict[str, Any]]:
    """Events by name, attempt, and nodes or suspect."""
    keys = {"started": "nodes", "preflight": "warnings"}
    return [
        {"event": name, "attempt": number, "time": 1.0, keys.get(name, "suspect"): what}
        for name, number, what in entries
    ]


@pytest.mark.parametrize(
    ("history", "left"),
    [
        (events(), ["n1", "n2"]),
        (events(("started", 0, "n[1-2]")), ["n1", "n2"]),
        (events(("started", 0, "n[1-2]"), ("preflight", 0, [])), []),
        (events(("started", 0, "n[1-3]"), ("preflight", 0, []), ("started", 1, "n[1-2]")), []),
        (events(("started", 0, "n[2-3]"), ("preflight", 0, [])), ["n1"]),
        (events(("started", 0, "n[1-2]"), ("preflight", 0, []), ("rank_failed", 0, "n2")), ["n2"]),
        (events(("started", 0, "n[1-"), ("preflight", 0, [])), ["n1", "n2"]),
    ],
)
def test_a_node_is_checked_before_its_first_attempt_and_after_a_failure(
    history: list[dict[str, Any]], left: list[str]
) -> None:
    """Of this run."""
    assert unchecked(view(history), ["n1", "n2"]) == left


def test_an_attempt_on_nodes_that_have_passed_is_not_checked_again(tmp_path: Path) -> None:
    """The history decides; the fake controller's node is n1."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    assert attempt_of(run)._on_new_nodes()
    for event in events(("started", 0, "n1"), ("preflight", 0, [])):
        happened(run, event)
    assert not attempt_of(run)._on_new_nodes()
    happened(run, *events(("rank_failed", 0, "n1")))
    assert attempt_of(run)._on_new_nodes()


def attempt_of(run: RunDirectory) -> Attempt:
    """The next attempt of the run, which is not started."""
    job = Job("x", module="x", device="cpu", preflight=True)
    return Attempt(run, job, 1, FakeRanks(run, {}), FakeController())


@pytest.mark.parametrize(
    ("message", "of_the_node"),
    [
        ("node n2 failed the check 'compute' on cuda:3: no result within 120 s", True),
        ("node n2 failed the check 'folder': could not write to /runs/a: Input/output error", True),
        ("could not write to /runs/a: No space left on device", False),
        (f"an all-reduce gave a wrong sum on all 4 ranks. {preflight.FEWER}", False),
    ],
)
def test_a_failed_preflight_restarts_the_run_and_counts_against_its_node(message: str, of_the_node: bool) -> None:
    """As other failures of nodes, unless no single node is at fault."""
    end = RankEnd(1, "n2", End.EXCEPTION, 1.0, error=f"{PreflightError.__name__}: {message}", used_clusterddp=True)
    assert end.of_the_node is of_the_node
    assert judge([end], 1, False, lambda: Cause.NONE).action is Action.RESTART
    event = {"event": "rank_failed", "attempt": 0, "time": 5.0, "suspect": "n2", "error": end.words()}
    assert failures(view([event]), "n2", 6.0) == [event_of(event)]


def settings_of(run: RunDirectory | None, world_size: int, local_world_size: int) -> Any:
    """Of rank 0, on a node h0."""
    read = read_settings({"CLUSTERDDP_PREFLIGHT": "on"})
    ranks = environment.RankEnvironment(0, 0, world_size, local_world_size, 0, ("h0", "h1"), None, None, "slurm")
    assert read.preflight
    return dataclasses.replace(read, ranks=ranks, run_dir=run)


@pytest.mark.parametrize(
    ("wrong", "world_size", "local", "words"),
    [
        (1, 4, 2, "node h0 failed the check 'all-reduce': wrong sum on 1 of 4 ranks"),
        (4, 4, 2, f"an all-reduce gave a wrong sum on all 4 ranks. {preflight.FEWER}"),
        (2, 2, 2, "node h0 failed the check 'all-reduce': wrong sum on 2 of 2 ranks"),
    ],
)
def test_a_wrong_sum_is_the_fault_of_the_node_that_has_it_alone(
    wrong: int, world_size: int, local: int, words: str
) -> None:
    assert preflight.wrong_sum(settings_of(None, world_size, local), wrong) == words


def test_a_run_directory_that_one_node_cannot_write_is_that_nodes_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is nobody's; after a success nothing is left behind."""
    run = RunDirectory(tmp_path)
    run.create()
    preflight.check_node(settings_of(run, 2, 1), [CPU])
    assert list(run.private.iterdir()) == []
    for number in (5, 28):
        refused = OSError(number, "refused")
        monkeypatch.setattr(preflight, "write_atomically", lambda *_, error=refused, **__: _raise(error))
        with raises(PreflightError):
            preflight.check_node(settings_of(run, 2, 1), [CPU])


def _raise(error: Exception) -> None:
    raise error


def test_a_device_that_never_answers_fails_the_check() -> None:
    """The thread is left behind."""
    check = preflight.bounded("compute", lambda: time.sleep(60) or ok("compute", "right"), 0.01)
    assert (check.state, check.found) == ("failed", "no result within 0.01 s")


def test_a_passed_preflight_is_told_with_its_warnings() -> None:
    event = {"event": "preflight", "attempt": 0, "seconds": 1.25, "warnings": ["the clock of n2 differs by +3.0 s"]}
    assert (
        sentence(event_of(event))
        == "attempt 0: all nodes passed the preflight in 1.2 s, with warnings: the clock of n2 differs by +3.0 s"
    )


def test_the_batch_step_tells_how_a_probe_ended(tmp_path: Path) -> None:
    """From srun, and the last line that the probe printed."""
    log = tmp_path / "rank-0.err"
    log.write_text("Traceback ...\nModuleNotFoundError: No module named 'torch'\n\n")
    status = batch_step.ExitStatus.of_code(1)
    assert batch_step.how_ended(log, status) == "exit code 1, ModuleNotFoundError: No module named 'torch'"
    assert batch_step.how_ended(tmp_path / "none", None) == ""


def test_a_batch_step_on_a_node_without_the_interface_starts_no_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No probe could reach it. The error is the end of the job's log, which the command shows."""
    monkeypatch.setattr(batch_step, "prepare_process", lambda: None)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    folder = RunDirectory(tmp_path / "job")
    folder.create()
    (folder.path / probe.JOB_FILE).write_text(
        Job(name="doctor", module="clusterddp.checks.probe", interface=("ib99",)).to_yaml()
    )
    with pytest.raises(LauncherEnvironmentError, match="no ib99"):
        batch_step.check_nodes(folder)
    assert not (folder.path / probe.RESULTS_FILE).exists()
