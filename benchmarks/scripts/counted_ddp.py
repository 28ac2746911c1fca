"""DDP ranks that print what their kernel counted: messages to rank 0's store, to the supervisor, and connections.

A segment with data is counted as a message: both protocols send one, and wait for the answer. All ranks print a line of
JSON at each of these moments: before and after torch connects the group; then, with a barrier before and after it, when
the process group is there, when the preflight is over, and as ``PHASES`` says. ``benchmarks/scale/counted.py`` reads
them.
"""

import json
import os
import socket
import stat
import struct
import time
from collections import Counter

import torch
import torch.distributed as dist

import clusterddp
from clusterddp.training import log_reduction, preflight
from clusterddp.worker import control_channel

#: What the steps before a moment did.
PHASES = {
    110: "first steps",
    160: "50 steps",
    210: "50 steps with a save",
    250: "40 steps with run.log",
    260: "10 steps",
}
RANK = int(os.environ["RANK"])
supervisor_port = int(os.environ["CLUSTERDDP_SUPERVISOR"].rpartition(":")[2])
channel = control_channel.current
events = Counter()
send = channel.send


def counting_send(event, **values):
    events[event] += 1
    send(event, **values)


channel.send = counting_send
look = log_reduction.Sender._look


def counting_look(sender):
    events["look"] += not sender._active
    look(sender)


log_reduction.Sender._look = counting_look
publish = log_reduction.Sender._publish


def counting_publish(sender, wait):
    before = sender._chunks
    publish(sender, wait)
    events["chunk"] += sender._chunks - before


log_reduction.Sender._publish = counting_publish


def connections():
    """Its local port, the peer's, and the segments with data in and out (linux/tcp.h), of each TCP connection."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    peer = each.getpeername()[1]
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
                    yield each.getsockname()[1], peer, *struct.unpack_from("II", info, 152)
        except OSError:  # closed meanwhile, or not connected
            continue


def mark(what, together=True):
    if together:
        dist.barrier()
    found = Counter()
    for own, peer, received, sent in connections():
        if own == channel.store_port and RANK == 0:
            found.update({"store in": received, "store connections": 1})
        elif peer == channel.store_port:
            found["store out"] += sent
        elif peer == supervisor_port:
            found["supervisor out"] += sent
        else:
            found["others"] += 1
    print(json.dumps({"mark": what, "time": time.time(), "found": found, "events": events}), flush=True)
    if together:
        dist.barrier()


init_process_group = dist.init_process_group


def counted_group(*args, **values):
    mark("the store", together=False)
    init_process_group(*args, **values)
    mark("gloo", together=False)


dist.init_process_group = counted_group


check_ranks = preflight.check_ranks


def counted_check(read, group):
    mark("the process group")
    warnings = check_ranks(read, group)
    mark("preflight")
    return warnings


preflight.check_ranks = counted_check

ctx = clusterddp.init()
model = ctx.wrap(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.ones(4096, 64), torch.ones(4096, 1))
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, batch_size=4))
mark("ctx.run")
for done, (samples, targets) in enumerate(run.steps(max(PHASES) + 1)):
    if done in PHASES:
        mark(PHASES[done])
    loss = (model(samples) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if 210 <= done < 250:
        run.log(loss=loss, reduce="mean")
    time.sleep(0.005)
    if done in (190, 255):  # the save after 185 steps is over before the next moment, as are the logged values
        time.sleep(1)
mark("the last save")
