"""Checks of benchmarks/gpu_check on what a device keeps to itself: ``gpu_devices.py NAME OUT [ARGUMENTS]``.

Each function is one process, or one attempt of a run, and returns what it has found, which is written to OUT as JSON. A
failed assertion is the process's error.
"""

import json
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import clusterddp
from clusterddp.distributed import devices
from clusterddp.jobdef.job import Checkpointing
from clusterddp.training import exactness


def whole_step(path, steps, stop):
    """A graph of the whole step, the optimizer's included. Stops in an evaluation after the replay in step ``stop``."""
    ctx = clusterddp.init(device="cuda", seed=1, run_dir=path)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    still = torch.zeros(16, 64, device=ctx.device)
    data = torch.utils.data.TensorDataset(torch.randn(256, 64))

    def train():
        model(still).square().mean().backward()
        optimizer.step()

    def capture():
        """After a step that is not captured, whose effects are undone."""
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        momenta = {one: state["momentum_buffer"].clone() for one, state in optimizer.state.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            train()
        torch.cuda.current_stream().wait_stream(side)
        model.load_state_dict(weights)
        for one, state in optimizer.state.items():
            state["momentum_buffer"].copy_(momenta.get(one, torch.zeros_like(one)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for parameter in model.parameters():
                parameter.grad.zero_()
            train()
        return graph

    run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, batch_size=16))
    begun, graph = run.step, None
    try:
        for (x,) in run.steps(int(steps)):
            graph = graph or capture()
            still.copy_(x)
            graph.replay()
            if run.step == int(stop) and ctx.attempt == 0:
                signal.raise_signal(signal.SIGTERM)
                while not clusterddp.stop_requested():
                    pass
                run.stop("check")
    except clusterddp.Stopped:
        pass
    return {"begun": begun, "weights": digest(model)}


def tensor_lr(path, steps, stop):
    """A learning rate and a schedule on the device, under a capturable optimizer. Stops after step ``stop``."""
    ctx = clusterddp.init(device="cuda", seed=1, run_dir=path)
    model = ctx.wrap(nn.Linear(64, 64))
    rate = torch.tensor(1e-2, device=ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=True, foreach=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.utils.data.TensorDataset(torch.randn(256, 64))
    run = ctx.run(model=model, optimizer=optimizer, schedule=schedule, loader=ctx.loader(data, batch_size=16))
    begun = run.step
    try:
        for (x,) in run.steps(int(steps)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if run.step == int(stop) and ctx.attempt == 0:
                signal.raise_signal(signal.SIGTERM)
    except clusterddp.Stopped:
        pass
    rate = optimizer.param_groups[0]["lr"]
    steps_on = {str(state["step"].device) for state in optimizer.state.values()}
    return {"begun": begun, "weights": digest(model), "rate": rate.item(), "on": sorted({str(rate.device), *steps_on})}


def digest(model):
    """The sum of all parameters' bits."""
    return sum(int(one.detach().view(torch.int32).sum(dtype=torch.int64)) for one in model.parameters())


def lead(path, seconds):
    """How many steps the host is ahead of a device that takes so long for each, and how long a stop then takes."""
    ctx = clusterddp.init(device="cuda", seed=1, run_dir=path)

    class Slow(torch.optim.Optimizer):
        def step(self):
            torch.cuda._sleep(int(float(seconds) * 1.5e9))

    model = nn.Linear(2, 2, device=ctx.device)
    optimizer = Slow(model.parameters(), {})
    ends, ahead, asked = [], [], 0.0
    try:
        for step in ctx.run(model=model, optimizer=optimizer).steps(100):
            ahead.append(sum(not end.query() for end in ends))
            optimizer.step()
            ends.append(torch.cuda.current_stream().record_event())
            if step == 20:
                asked = time.monotonic()
                signal.raise_signal(signal.SIGTERM)
    except clusterddp.Stopped:
        pass
    return {"ahead": max(ahead), "most": devices.MOST_AHEAD, "stopped_s": time.monotonic() - asked}


def unpinned(path, steps):
    """Saves in every step where CUDA refuses each address that is to be pinned, and keeps the error."""
    ctx = clusterddp.init(device="cuda", seed=1, run_dir=path, checkpoint=Checkpointing(every_steps=1, every_s=None))
    runtime = torch.cuda.cudart()
    register, codes = runtime.cudaHostRegister, []

    def refused(_, size, flags):
        codes.append(int(register(0, size, flags)))
        return codes[-1]

    runtime.cudaHostRegister = refused
    model = ctx.wrap(nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in ctx.run(model=model, optimizer=optimizer).steps(int(steps)):
        model(torch.ones(2, 512, device=ctx.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"codes": codes}


def fingerprints(share):
    """A comparison of a tensor in bfloat16 that takes a twentieth of the device, with so much of the device in use."""
    device = torch.device("cuda", 0)
    total = torch.cuda.mem_get_info(device)[1]
    tensor = torch.ones(total // 40, dtype=torch.bfloat16, device=device)
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.empty(max(0, int(free - (1 - float(share)) * total)), dtype=torch.uint8, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    found = exactness.fingerprints([tensor])
    more = torch.cuda.max_memory_allocated(device) - before
    one = int(tensor[:1].view(torch.int16).item())
    assert found == [one * tensor.numel()], f"{found} instead of {one * tensor.numel()}"
    return {"tensor_gb": tensor.nbytes / 1e9, "held_gb": held.nbytes / 1e9, "more_gb": more / 1e9}


if __name__ == "__main__":
    name, out, *arguments = sys.argv[1:]
    Path(out).write_text(json.dumps(globals()[name](*arguments)))
