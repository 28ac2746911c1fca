"""Checks of benchmarks/gpu_check that need one process and no supervisor: ``gpu_pieces.py NAME OUT [ARGUMENTS]``.

Each function returns what it has found, which is written to OUT as JSON. A failed assertion is the process's error.
"""

import copy
import json
import mmap
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import clusterddp


def speeds(folder, megabytes, started):
    """The device, the time to its first collective, and GB/s of copies, of fresh memory and of the disk."""
    ctx = clusterddp.init(device="cuda")
    dist.all_reduce(torch.ones(1, device=ctx.device))
    torch.cuda.synchronize()
    start_s, size = time.time() - float(started), int(megabytes) * 2**20

    began = time.perf_counter()
    memory = mmap.mmap(-1, size)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    host.zero_()
    assert int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0)) == 0
    fill = size / (time.perf_counter() - began)

    source = torch.ones(size, dtype=torch.uint8, device=ctx.device)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        host.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)

    path = Path(folder) / "speed"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        file.write(memory)
        os.fsync(file.fileno())
    disk = size / (time.perf_counter() - began)
    path.unlink()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    properties = torch.cuda.get_device_properties(0)
    nccl = getattr(torch.cuda, "nccl", None)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "memory_gb": properties.total_memory / 1e9,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl.version())) if nccl else None,
        "speeds": {"start_s": start_s, "copy": size / min(seconds) / 1e9, "fill": fill / 1e9, "disk": disk / 1e9},
    }


class Net(nn.Module):
    """With convolutions, batch norm, a part that may be unused and one that may be frozen."""

    def __init__(self, unused=False, frozen=False):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4) if unused else None
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu().mean((2, 3)))


def compressing(model):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


#: Of each variant: how the model is made, wrap's options, and what is done to the wrapped model.
VARIANTS = {
    "plain": (Net, {}, None),
    "gradient_as_bucket_view": (Net, {"gradient_as_bucket_view": True}, None),
    "static_graph": (Net, {"static_graph": True}, None),
    "all_used_once": (Net, {"static_graph": True, "all_used_once": True}, None),
    "find_unused_parameters": (lambda: Net(unused=True), {"find_unused_parameters": True}, None),
    "sync_batch_norm": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Net()), {}, None),
    "frozen": (lambda: Net(frozen=True), {}, None),
    "bfloat16": (lambda: Net().bfloat16(), {}, None),
    "channels_last": (lambda: Net().to(memory_format=torch.channels_last), {}, None),
    "small_buckets": (Net, {"bucket_cap_mb": 0.0001}, None),
    "comm_hook": (Net, {}, compressing),
}


def wrap():
    """Gradients of two steps under ctx.wrap() beside those of the same model alone."""
    ctx = clusterddp.init(device="cuda", seed=1)
    for name, (make, options, then) in VARIANTS.items():
        torch.manual_seed(1)
        model = make()
        alone = copy.deepcopy(model).to(ctx.device)
        if name == "sync_batch_norm":  # it has its own kernels
            alone = wrap_none(model, ctx.device)
        wrapped = ctx.wrap(model, **options)
        if then:
            then(wrapped)
        dtype = next(model.parameters()).dtype
        for step in range(3):
            x = torch.randn(8, 3, 12, 12, device=ctx.device, dtype=dtype)
            for one in (wrapped, alone):
                one.zero_grad()
                one(x).square().mean().backward()
            for (key, ours), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                if other.grad is None:
                    assert ours.grad is None or not ours.grad.any(), f"{name}: {key} has a gradient in step {step}"
                    continue
                near = torch.allclose(ours.grad.float(), other.grad.float(), rtol=1e-2, atol=1e-3)
                assert near, f"{name}: the gradient of {key} is another one in step {step}"
    return {"variants": list(VARIANTS)}


def wrap_none(model, device):
    """The same weights with torch's own batch norm."""
    alone = Net()
    alone.load_state_dict(model.state_dict())
    return alone.to(device)


def folder(path):
    """CheckpointFolder without a process group and with NCCL: the state of the save, not of what came after it."""
    found = {}
    for name in ("alone", "nccl"):
        if name == "nccl":
            clusterddp.init(device="cuda")
        nets = [nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).to("cuda:0") for _ in range(2)]
        optimizers = [torch.optim.AdamW(net.parameters()) for net in nets]
        nets[0](torch.randn(8, 512, device="cuda")).sum().backward()
        optimizers[0].step()
        with clusterddp.CheckpointFolder(f"{path}/{name}") as ours:
            assert ours.restore(model=nets[0], optimizer=optimizers[0]) == 0
            for step in (1, 2):
                wanted = copy.deepcopy((nets[0].state_dict(), optimizers[0].state_dict()))
                ours.save(step, model=nets[0], optimizer=optimizers[0])
                optimizers[0].step()
            assert ours.wait().step == 2
        with clusterddp.CheckpointFolder(f"{path}/{name}") as again:
            assert again.restore(model=nets[1], optimizer=optimizers[1]) == 2
        restored = (nets[1].state_dict(), optimizers[1].state_dict())
        assert same(wanted, restored), f"{name}: the restored state is not the saved one"
        found[name] = 2
    return found


def same(one, other):
    """Whether two nested states have the same bits."""
    if isinstance(one, torch.Tensor):
        return one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def training(path, megabytes, every=2):
    """A small training with a run directory that saves every few steps."""
    from clusterddp.jobdef.job import Checkpointing

    ctx = clusterddp.init(
        device="cuda", seed=1, run_dir=path, checkpoint=Checkpointing(every_steps=every, every_s=None)
    )
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    net.register_parameter("ballast", nn.Parameter(torch.ones(int(megabytes) * 2**18)))
    net.ballast.requires_grad_(False)
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW((one for one in net.parameters() if one.requires_grad), fused=True)
    data = torch.utils.data.TensorDataset(torch.randn(256, 64))
    return ctx, model, optimizer, ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, batch_size=16))


def unsynchronized(path, megabytes, steps):
    """Host waits in run.steps(), run.log() and saves, while the device is a fifth of a second behind.

    ``ahead``: in how many steps the device was still behind afterwards. A stand-in computes on the host.
    """
    _, model, optimizer, run = training(path, megabytes)
    waits = counted_waits()
    batches, ahead, seconds, save_waits = run.steps(int(steps)), [], [], 0
    behind = torch.cuda.Event()
    (x,) = next(batches)
    for step in range(int(steps) - 1):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model.module[2].weight.detach().sum()
        torch.cuda._sleep(int(0.2 * 1.5e9))
        behind.record()
        waits.clear()
        began = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run.log(loss=loss, other=1.0)
            (x,) = next(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seconds.append(time.perf_counter() - began)
        # The first save prepares its memory; a save waits for the one before, whose copies this device holds up.
        if step >= 4:
            ahead.append(not behind.query())
            save_waits += len(waits)
        torch.cuda.synchronize()
        if run.step % 2 == 0:
            wait_for_save(path, run.step)
    for _ in batches:
        pass
    assert save_waits == 0, f"the main thread waited {save_waits} times: {waits}"
    return {"steps": len(ahead), "ahead": sum(ahead), "longest_s": max(seconds[4:])}


def wait_for_save(path, step):
    """Until the save after so many steps is a file."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not list(Path(path).glob(f"checkpoints/step-{step:012}.*")):
        time.sleep(0.005)


def counted_waits():
    """The names of the calls by which the main thread waits for a device, appended as they are made.

    Waiting for an event that has happened is no wait.
    """
    import threading

    found = []
    owners = ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize"))
    for owner, name in owners:
        original = getattr(owner, name)

        def waiting(*arguments, original=original, what=f"{owner.__name__}.{name}", **options):
            happened = not what.startswith("torch.cuda") and arguments[0].query()
            if threading.current_thread() is threading.main_thread() and not happened:
                found.append(what)
            return original(*arguments, **options)

        setattr(owner, name, waiting)
    return found


def graph(path, megabytes, steps, mode):
    """CUDA graphs captured and replayed in every step, beside the first save's preparation and each save."""
    ctx, model, optimizer, run = training(path, megabytes, every=1)
    net = copy.deepcopy(model.module)
    still = torch.randn(16, 64, device=ctx.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            net(still).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    failed, wrong = [], 0
    for (x,) in run.steps(int(steps)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=model.module[2].weight.detach().sum())
        captured = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(captured, capture_error_mode=mode):
                for _ in range(20):
                    out = net(still)
        except RuntimeError as error:
            failed.append(f"step {run.step}: {str(error).splitlines()[0]}")
            continue
        captured.replay()
        wrong += not torch.equal(out, net(still))
    return {"failed": failed, "wrong": wrong, "steps": int(steps)}


if __name__ == "__main__":
    name, out, *arguments = sys.argv[1:]
    found = globals()[name](*arguments)
    Path(out).write_text(json.dumps(found))
