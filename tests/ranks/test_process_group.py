"""Devices and backends as pure decisions; stores, time-outs and wrapping with real gloo ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from clusterddp import environment
from clusterddp.distributed import collectives, devices, process_group
from clusterddp.distributed.devices import choose_devices
from clusterddp.distributed.process_group import choose_backend
from clusterddp.distributed.wrapping import wrap
from clusterddp.errors import DeviceError, LauncherEnvironmentError
from clusterddp.training import settings
from clusterddp.training.run_state import RunState
from tests import ddp
from tests.wording import raises


def place(local_rank: Any, ranks: int, launcher: Any = "slurm") -> Any:
    """The environment of a rank on the only node."""
    return environment.RankEnvironment(local_rank, local_rank, ranks, ranks, 0, (), None, None, launcher)


@pytest.mark.parametrize(
    ("asked", "local_rank", "ranks", "visible", "launcher", "device"),
    [
        (None, 0, 1, 0, "single", "cpu"),
        (None, 0, 1, 1, "single", "cuda:0"),
        ("cpu", 3, 8, 8, "slurm", "cpu"),
        ("cuda", 3, 8, 8, "slurm", "cuda:3"),
        ("cuda", 3, 8, 1, "slurm", "cuda:0"),  # A device of its own for each task.
        ("cuda", 1, 2, 4, "torchrun", "cuda:1"),
        ("cuda:0", 1, 2, 1, "local", "cuda:0"),
    ],
)
def test_the_device_of_a_rank(
    asked: Any, local_rank: Any, ranks: int, visible: Any, launcher: Any, device: Any
) -> None:
    (chosen,) = choose_devices(place(local_rank, ranks, launcher), asked, 1, visible, "n1")
    assert str(chosen) == device


@pytest.mark.parametrize(
    ("asked", "local_rank", "visible", "devices"),
    [
        ("cuda", 0, 8, ["cuda:0", "cuda:1"]),
        ("cuda", 3, 8, ["cuda:6", "cuda:7"]),
        ("cuda", 3, 2, ["cuda:0", "cuda:1"]),  # Two of its own for each task.
        ("cuda:2", 0, 8, ["cuda:2", "cuda:3"]),
        ("cpu", 3, 8, ["cpu", "cpu"]),
    ],
)
def test_a_rank_may_have_several_devices(asked: Any, local_rank: Any, visible: Any, devices: Any) -> None:
    """4 ranks of 2 each."""
    assert list(map(str, choose_devices(place(local_rank, 4), asked, 2, visible, "n1"))) == devices
    with raises(DeviceError):
        choose_devices(place(0, 4), "cuda", 2, 4, "n1")


@pytest.mark.parametrize(
    ("asked", "ranks", "visible", "launcher"),
    [("cuda", 8, 4, "slurm"), ("cuda", 2, 1, "local"), (None, 2, 1, "torchrun"), ("cuda", 1, 0, "slurm")],
)
def test_too_few_gpus_are_an_error_and_never_a_cpu_run(asked: Any, ranks: int, visible: Any, launcher: Any) -> None:
    with raises(DeviceError):
        choose_devices(place(0, ranks, launcher), asked, 1, visible, "n1")


def test_the_backend_of_a_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_backend(None, cpu) == "gloo" and choose_backend(None, gpu) == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", gpu) == "gloo"
    with raises(DeviceError):
        choose_backend("nccl", cpu)
    assert choose_backend("cpu:gloo", cpu) == "cpu:gloo"
    with raises(DeviceError):
        choose_backend("smoke", cpu)


NVLS = "NCCL_NVLS_ENABLE"
PCI_OF_DEVICE = """
#include <stdio.h>
int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    return device > 1 ? 101 : (snprintf(text, length, "0000:%02X:00.0", 0x17 + device), 0);
}
"""


def test_a_gpu_is_known_by_its_pci_address_where_torch_has_no_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.4, whose properties have neither; by the runtime library that torch's own is linked against."""
    without = SimpleNamespace(name="A100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: without)
    library = tmp_path / "libc10_cuda.so"
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=PCI_OF_DEVICE, text=True, check=True)
    monkeypatch.setattr(devices, "TORCH_LIBRARIES", tmp_path)
    found = [devices.gpu_identity(torch.device("cuda", index)) for index in (0, 1)]
    assert found == [f"0000:{bus}:00.0 on {socket.gethostname()}" for bus in (17, 18)]
    with raises(DeviceError):
        devices.gpu_identity(torch.device("cuda", 2))
    without.uuid = "00000000-0000-0000-0000-000000000000"  # of an AMD GPU
    assert devices.gpu_identity(torch.device("cuda", 1)) == found[1]
    without.uuid = "1a2b3c4d-5e6f"
    assert devices.gpu_identity(torch.device("cuda", 0)) == "1a2b3c4d-5e6f"


def test_mig_devices_of_one_gpu_are_refused_with_nccl() -> None:
    """They have different UUIDs, but one PCI address, by which NCCL tells GPUs apart."""
    store = HashStore()
    process_group.claim_gpu(store, 0, "0000:17:00.0 on n1", True, "n1")
    process_group.claim_gpu(store, 0, "0000:17:00.0 on n1", True, "n1")
    process_group.claim_gpu(store, 2, "0000:18:00.0 on n1", True, "n1")
    with raises(DeviceError):
        process_group.claim_gpu(store, 1, "0000:17:00.0 on n1", True, "n1")


@pytest.mark.parametrize(
    ("version", "given", "added"),
    [
        ("2.4.1+cu121", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.7.1", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.8.0", {}, {"TORCH_FR_BUFFER_SIZE": "2000"}),  # which warns about the older name
        ("2.10.0", {}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ("2.11.0", {}, {}),  # the default there
        ("2.9.1", {"TORCH_FR_BUFFER_SIZE": "0"}, {}),
        ("2.9.1", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}, {}),
        ("2.4.1", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {}),
    ],
)
def test_nccls_flight_recorder_is_on_unless_the_user_set_its_size(
    version: str, given: dict[str, str], added: dict[str, str]
) -> None:
    """torch 2.4 to 2.10 record nothing by default, and would leave no trace of a hang."""
    assert process_group.flight_recorder(version, given) == added


RECORDER = """
import os
import torch
seen = []
torch.distributed.init_process_group = lambda *_, **__: seen.append(os.environ.get("TORCH_FR_BUFFER_SIZE"))
torch.__version__ = type(torch.__version__)("2.9.1")
import clusterddp
clusterddp.init(device="cpu")
print(*seen)
os._exit(0)
"""


def test_the_size_of_the_flight_record_is_set_before_the_process_group_reads_it(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", RECORDER], capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout == "2000\n", found.stderr


@pytest.mark.parametrize(
    ("version", "deterministic", "names"),
    [
        ("2.5.1", False, []),
        ("2.6.0+cu124", False, ["TORCH_NCCL_USE_COMM_NONBLOCKING"]),
        ("2.7.0a0+79aa17489c.nv25.4", False, ["TORCH_NCCL_USE_COMM_NONBLOCKING"]),
        ("2.7.0", True, ["TORCH_NCCL_USE_COMM_NONBLOCKING", "NCCL_NVLS_ENABLE"]),
        ("2.7.1", False, []),
        ("2.13.0+cu130", True, ["NCCL_NVLS_ENABLE"]),
    ],
)
def test_nccl_neither_hangs_at_random_nor_sums_in_a_random_order(
    version: str, deterministic: bool, names: list[str]
) -> None:
    assert process_group.nccl_settings(version, deterministic) == dict.fromkeys(names, "0")


@pytest.mark.parametrize("theirs", [None, "2"])
def test_nccl_is_set_up_before_it_connects_and_as_the_user_has_asked(
    theirs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a group of one, whose initializer would need a GPU."""
    seen: list[str | None] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: seen.append(os.environ.get(NVLS)))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(os, "environ", {} if theirs is None else {NVLS: theirs})
    group: Any = object.__new__(process_group.ProcessGroup)
    group.rank, group.world_size, group._start_s = 0, 1, 1.0
    group.device, group.backend, group.store = torch.device("cuda", 0), "nccl", HashStore()
    group._make()
    group._second.allow()
    assert seen == [theirs or "0"]


@pytest.mark.parametrize(
    ("ranks", "changed", "doubt"),
    [
        (4, {}, True),
        (2, {}, False),  # a sum of two has no order
        (4, {"of_script": True}, False),
        (4, {"backend": "gloo"}, False),
        (4, {"capability": (8, 0)}, False),
        (4, {"deterministic": False}, False),
        (4, {"environ": {NVLS: "0"}}, False),
        (4, {"environ": {"NCCL_ALGO": "Ring"}}, False),
        (4, {"environ": {NVLS: "1"}}, True),
    ],
)
def test_sums_over_nvls_in_deterministic_mode_are_noticed(
    ranks: int, changed: dict[str, Any], doubt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a script turns the mode on after ``init()``, on a node with NVSwitches."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: changed.get("deterministic", True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: changed.get("capability", (9, 0)))
    monkeypatch.setattr(os, "environ", changed.get("environ", {}))
    group = object.__new__(process_group.ProcessGroup)
    group.world_size, group.of_script = ranks, changed.get("of_script", False)
    group.device, group.backend = torch.device("cuda", 0), changed.get("backend", "cpu:gloo,cuda:nccl")
    assert group.may_use_nvls is doubt
    state: Any = object.__new__(RunState)
    state._group, state._loader, state._rng = group, SimpleNamespace(inexact=[]), "step"
    state._partly_saved, state._parts = [], {}
    assert state._reasons_for_doubt() == ["NCCL may sum with NVLS, which is not deterministic"] * doubt


HEAD = "import os, sys, time, torch, clusterddp\nimport torch.distributed as dist\nctx = clusterddp.init()\n"


def script(tmp_path: Path, body: Any, head: Any = HEAD) -> Any:
    path = tmp_path / "script.py"
    path.write_text(head + body)
    return path


def test_a_backend_per_device_type_is_known_on_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.4's own check takes a plain name alone."""
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name in ("gloo", "nccl"))
    assert choose_backend("cpu:gloo,cuda:nccl", torch.device("cpu")) == "cpu:gloo,cuda:nccl"
    with raises(DeviceError):
        choose_backend("cpu:smoke", torch.device("cpu"))


CANNOT_CHANGE = (
    r"torch 2\.\S+ cannot change gloo's timeout after the start, so a collective .* times out after \d+ s, not 1 s\."
)


def test_a_gloo_timeout_that_cannot_be_shortened_is_reported_once(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """As on torch 2.4, with a group of two of which only this rank is there."""
    monkeypatch.setattr(process_group, "GLOO_TIMEOUT_CHANGES", False)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", lambda timeout: None)
    # Not by its initializer, which would wait for the other rank.
    group = object.__new__(process_group.ProcessGroup)
    group.rank, group.world_size, group._start_s = 0, 2, 1800.0
    group.device, group.backend, group.of_script = torch.device("cpu"), "gloo", False
    group.shorten_timeout(1.0)
    group.rank = 1
    group.shorten_timeout(1.0)
    assert len(re.findall(CANNOT_CHANGE, capfd.readouterr().err)) == 1


@pytest.mark.skipif(not process_group.GLOO_TIMEOUT_CHANGES, reason="this torch cannot change gloo's timeout")
def test_the_group_uses_the_shorter_timeout(tmp_path: Path) -> None:
    body = (
        "dist.all_reduce(torch.ones(1))\n"
        "ctx._group.shorten_timeout(1.0)\n"
        "try:\n"
        "    if ctx.rank == 0: dist.all_reduce(torch.ones(1))\n"
        "    else: ctx._group.store.wait(['nothing'])\n"  # until rank 0 and its store have exited
        "except RuntimeError as error: print('failed', error, flush=True)\n"
        "os._exit(0)\n"
    )
    ranks = ddp.run(script(tmp_path, body), ranks=2, folder=tmp_path / "out")
    assert re.search("failed .*Timed out waiting 1000ms", ranks.output(0)), ranks.text()


def test_a_strangers_store_is_recognised(tmp_path: Path) -> None:
    body = "print('joined', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
    path, end = script(tmp_path, body), tmp_path / "end"
    port = str(ddp.free_port())
    out = tmp_path / "out"
    mine = ddp.start(path, end, ranks=2, folder=out, MASTER_PORT=port, CLUSTERDDP_TOKEN="one", SLURM_JOB_ID="7")
    mine.wait_for(1, "joined")
    other = ddp.start(path, end, ranks=2, folder=out, MASTER_PORT=port, CLUSTERDDP_TOKEN="two").wait()
    assert other.codes == [1, 1]
    assert f"found another run's store at 127.0.0.1:{port}, which belongs to job 7." in other.output(1)
    assert "could not open rank 0's store" in other.output(0)
    end.touch()
    mine.expect(0)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this torch's store opens its own socket")  # type: ignore[operator]
@pytest.mark.parametrize(("host", "table"), [("127.0.0.1", "tcp"), ("localhost", "tcp6"), ("::1", "tcp6")])
def test_the_store_of_an_ipv4_address_listens_for_ipv4_alone(host: str, table: str) -> None:
    """Otherwise it sees 127.0.0.1 as an IPv6 address, and looks its name up in the DNS."""
    made = object.__new__(process_group.AttemptStore)  # its initializer would wait for another rank
    made.start_s = 30.0
    port = ddp.free_port()
    tcp = made._tcp_store(process_group.StoreAddress(host, port, "token"), is_master=True)
    assert [name for name in ("tcp", "tcp6") if listens(port, name)] == [table]
    del tcp


def listens(port: int, table: str) -> bool:
    """Whether a socket of /proc/net/TABLE listens on a port."""
    lines = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return any(place.endswith(f":{port:04X}") and state == "0A" for _, place, _, state, *_ in lines)


def test_a_rank_says_that_rank_0_did_not_open_its_store() -> None:
    place = environment.RankEnvironment(1, 1, 2, 2, 0, (), None, None, "slurm")
    address = process_group.StoreAddress("127.0.0.1", ddp.free_port(), "token")
    with raises(LauncherEnvironmentError):
        process_group.AttemptStore(place, address, 7.0, await_open=lambda seconds: seconds != 7.0)


def test_a_store_names_its_owner_and_never_the_token() -> None:
    """It shows what it holds to anyone who connects."""
    environ = {
        "CLUSTERDDP_RUN_DIR": "/home/me/runs/net-3",
        "CLUSTERDDP_ATTEMPT": "4",
        "CLUSTERDDP_TOKEN": "secret",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    address = settings.store_address(environ, environment.read(environ))
    assert address.owner == "attempt 4 of run net-3"
    assert "secret" not in address.digest


def test_two_single_processes_need_no_port(tmp_path: Path) -> None:
    path = script(tmp_path, "print(ctx.rank, ctx.world_size, ctx.device, ctx.all_reduce_sum(2))\n")
    outputs = [
        subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=ddp.REPOSITORY, env=alone())
        for _ in range(2)
    ]
    # Torch 2.9's gloo prints a line about its connections before.
    assert [done.stdout.splitlines()[-1:] for done in outputs] == [["0 1 cpu 2.0"]] * 2
    assert [done.returncode for done in outputs] == [0, 0]  # Also after the interpreter's own clean-up.


def alone() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in ddp.environment_of(0, 1, "0").items() if name not in names}


@pytest.mark.parametrize(
    ("backend", "ending", "captured", "at_once", "at_the_end"),
    [
        ("nccl", True, True, ["reset", "destroyed"], []),
        ("nccl", False, True, [], ["reset", "destroyed"]),
        ("nccl", False, False, ["destroyed"], []),
        ("gloo", False, True, ["destroyed"], []),
    ],
)
def test_nccl_is_closed_only_once_no_cuda_graph_is_left(
    backend: str,
    ending: bool,
    captured: bool,
    at_once: list[str],
    at_the_end: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for graphs that have captured collectives. After a ``with`` block, the script may replay them."""
    done: list[str] = []
    later: list[Callable[[], None]] = []

    class Graph:
        def reset(self) -> None:
            done.append("reset")

    graph = Graph() if captured else None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(process_group, "at_exit", later.append)
    group: Any = object.__new__(process_group.ProcessGroup)
    group.device, group.backend = torch.device("cuda", 0), backend
    group.of_script, group._second, group.attempt_store = False, None, SimpleNamespace(close=lambda: None)
    group._destroy = lambda: done.append("destroyed")
    group.close(ending=ending)
    assert done == at_once
    for act in later:
        act()
    assert done == at_once + at_the_end
    del graph


def test_a_transposed_tensor_is_summed_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses tensors that are not contiguous."""
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", summed.append)
    given = torch.arange(6).view(2, 3).T
    found = collectives.all_reduce_sum(given, torch.device("cpu"))
    assert isinstance(found, torch.Tensor) and torch.equal(found, given) and found.data_ptr() != given.data_ptr()
    assert [one.is_contiguous() for one in summed] == [True]


def test_collectives_and_order_on_uneven_ranks(tmp_path: Path) -> None:
    body = (
        "mine = torch.full((ctx.rank, 2), ctx.rank)\n"
        "gathered = ctx.gather(mine)\n"
        "assert gathered[:, 0].tolist() == [1, 2, 2], gathered\n"
        "assert ctx.all_reduce_mean(float(ctx.rank), weight=ctx.rank) == (1 + 4) / 3\n"
        "assert ctx.all_reduce_sum(torch.tensor([1, ctx.rank])).tolist() == [3, 3]\n"
        "for turn in range(3):\n"
        "    with ctx.local_first():\n"
        "        if ctx.local_rank == 0: time.sleep(0.1); open(sys.argv[1] + str(turn), 'w').close()\n"
        "        else: assert os.path.exists(sys.argv[1] + str(turn))\n"
        "ctx.print('only once')\n"
    )
    ranks = ddp.run(script(tmp_path, body), tmp_path / "first", ranks=3, folder=tmp_path / "out")
    assert ranks.text().count("only once") == 1


WRAP = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.b = torch.nn.Linear(8, 8).double()
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.spare = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8) if buffers else torch.nn.Identity()
    def forward(self, x, use_spare):
        x = self.norm(self.frozen(self.a(x)))
        x = self.b(x.double())
        return self.spare(x.float()) if use_spare else x
calls = []
for buffers in (True, False):
    static, promised = {"static_graph": True}, {"static_graph": True, "all_used_once": True}
    for options in ({}, {"find_unused_parameters": True}, static, promised, {"broadcast_buffers": False}):
        net = Net()
        net.register_forward_pre_hook(lambda *a: calls.append(1))
        before = {k: v.clone() for k, v in net.state_dict().items()}
        state = torch.get_rng_state()
        model = ctx.wrap(net, bucket_cap_mb=0.0002, **options)
        assert torch.equal(state, torch.get_rng_state()) and not calls
        assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
        assert all(p.grad is None for p in net.parameters()) and model.module is net
        assert model.broadcast_buffers == options.get("broadcast_buffers", True)
        for step in range(3):
            model.zero_grad()
            use_spare = not options.get("find_unused_parameters")
            model(torch.full((4, 8), float(ctx.rank)), use_spare).sum().backward()
            total = ctx.gather(net.a.weight.grad[None])
            assert torch.equal(total[0], total[1]), options
        calls.clear()
print("all as it was")
"""


def test_wrapping_does_not_change_the_users_state_under_any_option(tmp_path: Path) -> None:
    ranks = ddp.run(script(tmp_path, WRAP), ranks=2, folder=tmp_path / "out")
    assert ranks.text().count("all as it was") == 2


def test_an_error_inside_the_context_ends_without_waiting_for_the_others(tmp_path: Path) -> None:
    body = (
        "with ctx:\n"
        "    if ctx.rank == 0: raise ValueError('the first failure')\n"
        "    try: dist.all_reduce(torch.ones(1))\n"
        "    except RuntimeError: sys.exit(3)\n"
    )
    ranks = ddp.start(script(tmp_path, body), ranks=2, folder=tmp_path / "out").wait()
    assert ranks.codes == [1, 3]


def test_signals_have_their_old_meaning_after_the_context(tmp_path: Path) -> None:
    body = (
        "import signal\n"
        "with ctx: assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "with clusterddp.init() as again: assert again.world_size == 1\n"
    )
    ddp.run(script(tmp_path, body), ranks=1, folder=tmp_path / "out")


STATIC = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x):
        return checkpoint(self.a, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)
def gradient(wrap):
    torch.manual_seed(0)
    model = wrap(Net(), static_graph=True)
    for step in range(3):
        model.zero_grad()
        model(torch.ones(2, 4, requires_grad=True) * (ctx.rank + 1)).sum().backward()
    return model.module.a.weight.grad
assert torch.equal(gradient(ctx.wrap), gradient(DistributedDataParallel))
"""


def test_a_static_graph_has_plain_ddps_gradients(tmp_path: Path) -> None:
    # A throw-away pass would teach DDP that every parameter is used, and used once.
    ddp.run(script(tmp_path, STATIC), ranks=2, folder=tmp_path / "out")


PROMISE = """
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.tied = (torch.nn.Linear(4, 4) for _ in range(3))
        self.tied.weight = self.a.weight
    def forward(self, x, kind):
        if kind == "unused": return self.a(x)
        x = self.b(self.tied(x))
        if kind == "tied": return checkpoint(self.a, x, use_reentrant=False)
        return checkpoint(self.a, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)
for kind, message in (
    ("tied", None),
    ("unused", "Expected to have finished reduction"),
    ("in pieces", "wrap() received all_used_once=True, but a.bias got its gradient in several pieces"),
):
    model = ctx.wrap(Net(), static_graph=True, all_used_once=True)
    try:
        for step in range(3): model(torch.ones(2, 4, requires_grad=True), kind).sum().backward()
        assert message is None, kind
    except RuntimeError as error:
        assert message is not None and message in str(error), (kind, error)
print("kept to it", flush=True)
os._exit(0)
"""


def test_a_broken_promise_about_a_static_graph_is_an_error_and_a_kept_one_is_not(tmp_path: Path) -> None:
    ranks = ddp.run(script(tmp_path, PROMISE), ranks=2, folder=tmp_path / "out")
    assert ranks.text().count("kept to it") == 2


def test_the_promise_is_refused_without_a_static_graph() -> None:
    with raises(TypeError):
        wrap(torch.nn.Linear(1, 1), [torch.device("cpu")], all_used_once=True)
