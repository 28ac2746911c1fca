"""Replays a CUDA graph of the whole step, the optimizer's included: whole_step.py RUN_DIR STEPS WHEN WHERE

The graph is captured ``before`` the run begins, or in a step (``within``). Attempt 0 stops in step 3, in an evaluation
``before`` or ``after`` the replay.
"""

import sys

import torch

import clusterddp
from tests.stops import request_stop

STEPS, WHEN, WHERE = int(sys.argv[2]), sys.argv[3], sys.argv[4]


def train():
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def capture():
    """After a step that is not captured, whose effects are undone."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    momenta = {one: state["momentum_buffer"].clone() for one, state in optimizer.state.items()}
    optimizer.zero_grad()
    train()
    model.load_state_dict(weights)
    for one, state in optimizer.state.items():
        state["momentum_buffer"].copy_(momenta.get(one, torch.zeros_like(one)))
    with torch.cuda.graph(graph):
        for parameter in model.parameters():
            parameter.grad.zero_()
        losses.append(train())


def evaluate(here):
    if here == WHERE and run.step == 3 and ctx.attempt == 0:
        request_stop(ctx)
        while not clusterddp.stop_requested():
            pass
        run.stop("test")


ctx = clusterddp.init(run_dir=sys.argv[1], seed=1)
torch.manual_seed(1)
model = torch.nn.Linear(4, 4, device=ctx.device)  # without DDP: torch needs several passes before a capture with it
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.ones(2, 4, device=ctx.device)
graph, losses = torch.cuda.CUDAGraph(), []
samples = torch.utils.data.TensorDataset(torch.randn(40, 4))
if WHEN == "before" and ctx.attempt == 0:
    capture()
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(samples, batch_size=2))
for (batch,) in run.steps(STEPS):
    if not losses:
        capture()
    x.copy_(batch)
    evaluate("before")
    graph.replay()
    evaluate("after")
    run.log(loss=losses[-1], first=batch[0, 0])
