"""Prints where each tensor of a run's state is, after two steps of each attempt: places.py RUN_DIR STEPS

Each part keeps what ``load_state_dict`` gives it, as with ``torch.load(map_location=device)``. On two devices per rank,
``far`` is on the second one.
"""

import sys

import torch
from torch import nn

import clusterddp
from clusterddp.checkpoint.packing import pack


class Kept:
    """State that is there from the beginning, nested, and with two names for one tensor."""

    def __init__(self):
        mean = torch.zeros(4, device=ctx.device)
        self.state = {"mean": mean, "same": mean, "on host": torch.zeros(4)}
        self.state |= {"nested": [{"pair": (torch.zeros(2, device=far), 1.5)}]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Later(Kept):
    """State that begins with the first steps."""

    def __init__(self):
        self.state = {"seen": [], "far": None, "counts": []}

    def update(self, x):
        self.state["seen"].append(x.clone())
        self.state["far"] = x.to(far)
        self.state["counts"].append(torch.ones(1))


class Extra(nn.Linear):
    """A module whose ``get_extra_state`` is a tensor on its device."""

    def __init__(self):
        super().__init__(4, 4)
        self.extra = torch.zeros(3, device=ctx.device)

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]


class Counting(torch.optim.Optimizer):
    """Counts its steps on the device, in an entry that torch leaves where it is."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", torch.zeros((), device=parameter.device)) + 1


ctx = clusterddp.init(run_dir=sys.argv[1], seed=1)
ctx.devices = ctx.device, torch.device("cuda", ctx.rank + ctx.world_size)  # as with gpus_per_rank=2
far = ctx.devices[1]
rate = torch.tensor(1e-3, device=ctx.device)
model = ctx.wrap(Extra().to(ctx.device))
parameters = list(model.parameters())
adam = torch.optim.Adam(parameters, lr=rate, capturable=True, foreach=True)
fused = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
counting = Counting(parameters)
schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
scaler = torch.amp.GradScaler("cuda")
kept, later, own = Kept(), Later(), Later()
parts = {"model": model, "fused": fused, "counting": counting, "schedule": schedule, "scaler": scaler}
x = torch.ones(2, 4, device=ctx.device)
for _ in ctx.run(**parts, adam=adam, kept=kept, later=later, per_rank=own).steps(int(sys.argv[2])):
    scaler.scale(model(x).sum()).backward()
    scaler.step(fused)
    scaler.update()
    counting.step()
    adam.step()
    schedule.step()
    model.zero_grad()
    kept.state["mean"] += x[0]
    later.update(x)
    own.update(x)
everything = {**parts, "adam": adam, "kept": kept, "later": later, "own": own}
_, tensors = pack({name: part.state_dict() for name, part in everything.items()})
for name, tensor in tensors.items():
    print("place", name, "host" if not tensor.is_cuda else ctx.devices.index(tensor.device))
print("same", kept.state["mean"] is kept.state["same"], "rate", adam.param_groups[0]["lr"].device == ctx.device)
