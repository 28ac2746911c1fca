"""One step of DDP on CPUs, and when each phase of the start was over: ``startup.py ours|empty FOLDER``.

``empty``: the least that a DDP job does, with torchrun's variables. ``ours``: the same as a training script with
clusterddp. Both write FOLDER/rank-N.json: when the process was started, and the end of each phase, in seconds of
CLOCK_BOOTTIME; its CPU seconds; and the modules that it has imported.
"""

import time

script_s = time.clock_gettime(time.CLOCK_BOOTTIME)

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

kind, folder = sys.argv[1:]
phases = {"script": script_s}


def done(phase):
    phases[phase] = time.clock_gettime(time.CLOCK_BOOTTIME)


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

done("import torch")
net = torch.nn.Linear(16, 1)
data = torch.utils.data.TensorDataset(torch.randn(512, 16))
if kind == "empty":
    dist.init_process_group("gloo")
    done("process group")
    rank, model = dist.get_rank(), DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = torch.utils.data.DistributedSampler(data)
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler))
else:
    from clusterddp import init

    done("import clusterddp")
    ctx = init()
    done("process group")
    rank, model = ctx.rank, ctx.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ctx.loader(data, batch_size=4)
    batches = ctx.run(model=model, optimizer=optimizer, loader=loader).steps(2)
done("model")
(batch,) = next(batches)
model(batch).square().mean().backward()
optimizer.step()
done("first step")
cpu_s = time.process_time()
fields = open("/proc/self/stat").read().rsplit(") ", 1)[1].split()
started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
with open(f"{folder}/rank-{rank}.json", "w") as file:
    json.dump({"started": started, "phases": phases, "cpu_s": cpu_s, "modules": sorted(sys.modules)}, file)
if kind == "empty":
    sys.stdout.flush()
    os._exit(0)
for _ in batches:  # the second and last step, so that the run completes
    pass
