"""The stand-in devices themselves: what tests on them rely on. Each test is one process with several devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import GPUs


def start(check: Callable[[], None], **variables: str) -> subprocess.Popen[str]:
    """Runs a function of this file in a process of its own."""
    code = f"from {check.__module__} import {check.__name__} as check; check()"
    environ = {**os.environ, **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ)


def run(check: Callable[[], None], **variables: str) -> str:
    """Runs it to its end, and returns what it printed."""
    process = start(check, **variables)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def faults() -> None:
    import threading

    import standin_watch
    import torch

    on = [torch.ones(4, device=f"cuda:{index}") for index in range(6)]

    def forward() -> object:
        return on[0].mul(2)

    on[0].mul(2)
    forward()  # after: 1
    forward()
    for call in (forward, lambda: on[0].sum().item(), lambda: torch.cuda.synchronize(0), torch.cuda.Event().record):
        said = error_of(call)
        assert said.startswith("AcceleratorError: CUDA error: device-side assert triggered\nSearch for"), said
        assert "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n" in said
    assert Path(os.environ["ONCE"]).exists()
    del on[0]  # freeing memory raises nothing
    standin_watch.fail("illegal", 1)
    assert "an illegal memory access was encountered" in error_of(lambda: torch.ones(4, device="cuda:1"))
    said = error_of(lambda: on[1].view(2, 2) @ on[1].view(2, 2))
    assert said.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total"), said
    on[1].view(2, 2) @ on[1].view(2, 2)  # once
    assert "Tried to allocate 8.00 GiB" in error_of(lambda: torch.empty(2 << 30, device="cuda:2"))

    hung = on[2]
    torch.cuda.set_device(3)  # the query of an event needs the current device
    standin_watch.fail("hang", 3)
    later = hung.mul(2)
    event = torch.cuda.current_stream(3).record_event()
    assert not event.query() and not torch.cuda.current_stream(3).query()
    side = torch.cuda.Stream(3)
    assert side.query()
    side.wait_event(event)
    assert not side.query()
    waiting = threading.Thread(target=later.sum().item, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    on[3].mul(2).sum().item()  # other devices compute

    standin_watch.fail("ecc", 4, lose=True)
    assert "uncorrectable ECC error encountered" in error_of(on[3].sum)
    sys.stdout.flush()
    standin_watch.fail("launch", 5, watchdog=True)


@pytest.mark.product  # test_device_faults.py has runs with such faults
def test_devices_fail_as_asked(gpus: GPUs, tmp_path: Path) -> None:
    """Sticky errors, out of memory, a kernel that never ends, NCCL's watchdog, a device that is lost afterwards."""
    once, state = tmp_path / "once", tmp_path / "state"
    planned: list[dict[str, Any]] = [
        {"kind": "assert", "rank": 3, "attempt": 0, "op": "aten::mul", "inside": "forward", "after": 1},
        {"kind": "oom", "op": "aten::mm"},
        {"kind": "illegal", "rank": 4},
    ]
    planned[0]["once"] = str(once)
    gpus(6, faults=json.dumps(planned), state=str(state))
    process = start(faults, RANK="3", CLUSTERDDP_ATTEMPT="0", ONCE=str(once))
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGABRT, err
    assert err.startswith("terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0")
    assert "unspecified launch failure" in err
    assert "5 RuntimeError: CUDA error: invalid device ordinal" in run(lost)


def lost() -> None:
    import torch

    print(torch.cuda.device_count(), error_of(lambda: torch.ones(1, device="cuda:5")))


def holds() -> None:
    import torch

    kept = torch.empty(3 << 28, device="cuda:1")
    print(torch.cuda.mem_get_info(1)[0] >> 20, len(kept), flush=True)
    sys.stdin.readline()


def looks() -> None:
    import torch

    for _ in range(int(os.environ["LOOKS"])):
        print(torch.cuda.mem_get_info(1)[0] >> 20, flush=True)
        if os.environ["LOOKS"] == "1":
            continue
        while torch.cuda.mem_get_info(1)[0] >> 20 == 1024:
            pass


@pytest.mark.product  # test_device_faults.py has an attempt that waits for the memory of the one before
def test_processes_share_the_memory_of_a_device(gpus: GPUs, tmp_path: Path) -> None:
    """What another process uses is not free, nor, for a while, what a killed one used."""
    gpus(2, state=str(tmp_path), held_s="0.5")
    holder = start(holds)
    assert holder.stdout is not None
    assert holder.stdout.readline().split()[0] == "1024"
    assert run(looks, LOOKS="1") == "1024\n"
    holder.kill()
    holder.communicate()
    assert run(looks, LOOKS="2") == "1024\n4096\n"


def computes() -> None:
    import copy
    import pickle

    import standin_watch
    import torch
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    assert torch.cuda.device_count() == 8
    assert standin_watch.counts()["contexts"] == {}  # asking opens none
    assert len({str(torch.cuda.get_device_properties(index).uuid) for index in range(8)}) == 8
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == 1
    assert "invalid device ordinal" in error_of(lambda: torch.ones(1, device="cuda:8"))
    said = error_of(lambda: torch.ones(2, device="cuda:1") + torch.ones(2))
    assert "Expected all tensors to be on the same device" in said, said
    torch.cuda.set_device(2)
    kept = pickle.loads(pickle.dumps(torch.arange(3, device="cuda:2")))
    assert kept.device.index == 2 and kept.tolist() == [0, 1, 2]
    before = torch.cuda.memory_allocated(2)
    more = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated(2) - before == 4 << 20
    del more

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(2))
            self.rest = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), nn.Linear(16, 4))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.rest(self.first(batch).transpose(1, 2)).mean(1)
            return found

    torch.manual_seed(0)
    model, batches = Model(), torch.randn(4, 8, 1, 8, 8)
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        trained = []
        for device in ("cpu", "cuda"):
            copied = copy.deepcopy(model).to(device)
            steps = optimizer(copied.parameters(), lr=0.01, foreach=True)
            for batch in batches.to(device):
                steps.zero_grad()
                with sdpa_kernel(SDPBackend.MATH):
                    loss = nn.functional.cross_entropy(copied(batch), torch.arange(8, device=device) % 4)
                loss.backward()
                nn.utils.clip_grad_norm_(copied.parameters(), 1.0)
                steps.step()
            trained.append({name: value.cpu() for name, value in copied.state_dict().items()})
        for name, value in trained[0].items():
            assert torch.equal(value, trained[1][name]), (optimizer, name)
    assert set(standin_watch.counts()["contexts"]) == {1, 2}
    assert standin_watch.counts()["races"] == []


def counts() -> None:
    import threading

    import standin_watch
    import torch

    torch.cuda.set_device(1)
    value = torch.ones(8, device="cuda")
    host = torch.empty(8, pin_memory=True)
    with standin_watch.tracing() as waits:
        host.copy_(value.mul(2), non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        while not event.query():
            pass
        value.sum().item()
        value.cpu()
        event.synchronize()  # has passed
        late = host.copy_(value, non_blocking=True)
        torch.cuda.current_stream().record_event().synchronize()
        torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        value[value > 0]
    names = "aten::_local_scalar_dense copy_ event.synchronize stream.synchronize synchronize".split()
    assert [wait["name"] for wait in waits][:5] == names
    assert len(waits) == 6 and late is host  # the last one is for the indices of true values
    assert all(any(frame.endswith("counts") for frame in wait["stack"][:2]) for wait in waits)
    torch.cuda.set_sync_debug_mode("error")
    assert "called a synchronizing CUDA operation" in error_of(value.sum().item)
    host.copy_(value, non_blocking=True)
    torch.cuda.set_sync_debug_mode("default")
    assert set(standin_watch.counts()["contexts"]) == {1}
    asking = threading.Thread(target=event.query, name="asking")
    asking.start()
    asking.join()
    opened = standin_watch.counts()["contexts"]
    assert set(opened) == {0, 1} and opened[0].startswith("asking: ")
    print(json.dumps({"waits": standin_watch.counts()["waits"]}))


def lags() -> None:
    import standin_watch
    import torch

    source, late = torch.arange(4.0, pin_memory=True), torch.empty(4, pin_memory=True)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def copied(into: torch.Tensor | None = None) -> torch.Tensor:
        with torch.cuda.stream(side):
            return source.to("cuda", non_blocking=True) if into is None else into.copy_(source, non_blocking=True)

    def race(call: Callable[[], object]) -> str:
        said = error_of(call)
        torch.cuda.synchronize()
        return said

    # Waited for: right. Not waited for: raised, and the memory has what was there before.
    batch = copied()
    main.wait_stream(side)
    batch.record_stream(main)
    assert batch.add(0).tolist() == [0, 1, 2, 3]
    batch = copied()
    assert not side.query()
    assert "reads memory that stream" in race(lambda: batch.add(0))
    # A copy to the host is late, and what is queued behind it on the stream waits.
    value = torch.ones(4, device="cuda")
    late.zero_()
    late.copy_(value, non_blocking=True)
    done = main.record_event()
    assert not done.query() and late.tolist() == [0] * 4
    value.fill_(2)
    done.synchronize()
    assert late.tolist() == [1] * 4

    # Memory in use elsewhere is freed: found unless recorded or waited for; poisoned, and reused at once.
    def use(recorded: bool, ordered: bool) -> None:
        main.wait_stream(side)
        mine = copied()
        main.wait_stream(side)
        mine.add(0)
        if recorded:
            mine.record_stream(main)
        if ordered:
            side.wait_stream(main)

    for recorded, ordered in ((True, False), (False, True)):
        use(recorded, ordered)
        assert race(lambda: value.add(1)) == ""
    use(False, False)
    assert "record_stream was not called" in race(lambda: value.add(1))
    # A copy that is still to come finds its target freed, and writes into its next owner's memory.
    target = torch.empty(4, device="cuda")
    side.wait_stream(main)
    copied(target)
    place = target.data_ptr()
    del target
    assert "record_stream was not called" in race(lambda: value.add(1))
    again = torch.empty(4, device="cuda")
    assert again.data_ptr() == place
    freed = torch.ones(1 << 10, device="cuda")
    place = freed.data_ptr()
    del freed
    assert torch.empty(1 << 10, device="cuda").isnan().all()
    # Kernels of two streams on the same memory.
    with torch.cuda.stream(side):
        value.mul(2)
    assert "writes memory that stream" in race(lambda: value.fill_(1))
    assert len(standin_watch.counts()["races"]) == 4


def collects() -> None:
    import datetime

    import _standin
    import standin_watch
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        store = torch._C._distributed_c10d.FileStore(f"{os.environ['STORE']}-{backend[:3]}", 2)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=60),
            device_id=torch.device("cuda", rank),
        )
        model = torch.nn.Linear(4, 2).cuda()
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        wrapped(torch.full((3, 4), rank + 1.0, device="cuda")).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.flatten().tolist() == [4.5] * 8
        both = [torch.empty(1, device="cuda") for _ in range(2)]
        dist.all_gather(both, torch.full((1,), float(rank), device="cuda"))
        assert [one.item() for one in both] == [0, 1]
        if backend != "nccl":
            number = torch.tensor([rank])
            dist.all_reduce(number)
            assert number.item() == 1
        else:
            assert "No backend type associated with device type cpu" in error_of(lambda: dist.all_reduce(torch.ones(1)))
        if backend == "nccl":
            dist.destroy_process_group()
    # Rank 1's device hangs: the hosts go on, and would wait where they need the sum.
    _standin.configure(1 << 30, 0, 0, 0.3, True)
    total = torch.ones(1, device="cuda")
    if rank == 1:
        standin_watch.fail("hang")
    for _ in range(2):
        dist.all_reduce(total)
    total.mul_(2)
    assert not torch.cuda.current_stream().query()
    store.set(f"seen by {rank}", "")
    store.wait(["seen by 0", "seen by 1"])
    os._exit(0)  # gloo's threads can hang a process at the end of Python


@pytest.mark.product  # test_jobs.py and test_exact_resume.py train on it
def test_models_train_to_the_cpu_s_bits(gpus: GPUs) -> None:
    """Convolution, normalization, attention, two optimizers; ordinals, mixed devices, pickles, memory."""
    gpus(8)
    run(computes)


def test_contexts_and_host_waits_are_counted(gpus: GPUs, tmp_path: Path) -> None:
    """A wait with its stack, as torch's sync debug mode counts them; a context that a thread opens elsewhere."""
    gpus(2, counts=str(tmp_path), delay_ms="1")
    told = json.loads(run(counts, RANK="5"))
    (file,) = tmp_path.glob("rank-5.*.json")
    written = json.loads(file.read_text())
    assert written["waits"] == told["waits"] == len(written["traced"])
    assert set(written["contexts"]) == {"0", "1"}


def test_missing_synchronization_shows(gpus: GPUs) -> None:
    """Late copies, kernels on two streams, memory that is freed while another stream uses it."""
    gpus(1, delay_ms="50")
    run(lags)


@pytest.mark.product  # the ranks of test_jobs.py reduce over both
def test_ranks_reduce_over_both_backends(gpus: GPUs, tmp_path: Path) -> None:
    """DDP with device_ids over nccl and cpu:gloo,cuda:nccl; hosts that do not wait for a collective that hangs."""
    gpus(2)
    ranks = [start(collects, RANK=str(rank), STORE=str(tmp_path / "store")) for rank in range(2)]
    for rank in ranks:
        _, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
