"""Changes parameters itself, beside an optimizer that has stepped once: changes_parameters.py RUN_DIR PLACE

Attempt 0 stops in step 3, in an evaluation ``before`` or ``after`` the change.
"""

import sys

import torch

import clusterddp
from tests.stops import request_stop

ctx = clusterddp.init(run_dir=sys.argv[1], seed=1)
net = torch.nn.Linear(1, 1, bias=False)
model = ctx.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
run = ctx.run(model=model, optimizer=optimizer)


def evaluate(place):
    if ctx.attempt == 0 and run.step == 3 and place == sys.argv[2]:
        request_stop(ctx)
        while not clusterddp.stop_requested():
            pass
        run.stop("test")


for step in run.steps(6):
    if step == 0:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    evaluate("before")
    with torch.no_grad():
        net.weight += 1
    evaluate("after")
