"""A small training of a model that fully_shard has sharded, in which the tests of sharded models stop and continue.

usage: sharded.py RUN_DIR STEPS [OPTIONS]. Each rank prints a digest of the whole state, gathered from all ranks, when
it begins and when all steps are done.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clusterddp
from clusterddp.checkpoint.client import CheckpointClient
from clusterddp.jobdef.job import Checkpointing
from clusterddp.training.saving import Saver
from tests.stops import request_stop

parser = argparse.ArgumentParser()
parser.add_argument("run_dir", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--every", type=int)
parser.add_argument("--stop-in", type=int, help="the step in which a rank sends itself a TERM")
parser.add_argument("--batch", type=int, default=12, help="samples per step, of all ranks together")
parser.add_argument("--replicas", type=int, default=1, help="HSDP")
parser.add_argument("--accumulate", type=int, default=1, help="steps of the loop for each of the optimizer's")
parser.add_argument("--unsynced", action="store_true", help="reduces gradients only before the optimizer's step")
parser.add_argument("--precision", action="store_true", help="computes in bfloat16")
parser.add_argument("--columns", action="store_true", help="shards some weights in the second dimension")
parser.add_argument("--evaluate", action="store_true", help="before each step")
parser.add_argument("--init-from", type=Path, help="a file or folder of weights")
parser.add_argument("--plain", action="store_true", help="DDP instead")
parser.add_argument("--largest", action="store_true", help="prints the elements of the largest tensor")
parser.add_argument("--best", type=float, nargs="*", help="the scores of the steps, and one after the loop")
parser.add_argument("--die-after", type=int, help="rank 1 is killed when its file of this step is durable")
parser.add_argument("--hang-in", type=int, help="the step in which rank 1 hangs, in the first attempt")
parser.add_argument("--kill-in", type=int, help="the step in which rank 1 is killed, in the first attempt")
parser.add_argument("--pause", type=float, default=0.0, help="seconds per step")
parser.add_argument("--micro", action="store_true", help="takes each batch in pieces of at most 4 samples")
parser.add_argument("--offload", action="store_true", help="the shards stay in host memory")
parser.add_argument("--compile", action="store_true", help="each block")
parser.add_argument("--recompute", action="store_true", help="activation checkpointing of each block")
parser.add_argument("--scaler", action="store_true", help="a GradScaler")
parser.add_argument("--ema", action="store_true", help="a moving average of the parameters")
parser.add_argument("--wrong", help="what the ranks do not agree on")
options = parser.parse_args()


class Net(nn.Module):
    """A tied weight, a buffer, and weights whose rows no number of ranks from 2 to 4 divides."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 48)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.2)) for _ in range(2))
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Average:
    """A moving average of a model's shards."""

    def __init__(self, model):
        self.model = model
        self.shards = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self):
        for name, parameter in self.model.named_parameters():
            self.shards[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return dict(self.shards)

    def load_state_dict(self, state):
        for name, shard in state.items():
            self.shards[name].copy_(shard)


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor of numbers that an operation of torch makes in saves and loads."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {self.address(one) for one in tree_leaves((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            # A view may be one of a file that is mapped.
            if (address := self.address(one)) and address not in given and one.is_floating_point():
                self.elements = max(self.elements, one.numel())
        return made

    def address(self, one):
        """Of a tensor's memory."""
        if isinstance(one, torch.UntypedStorage):
            return one.data_ptr()
        plain = isinstance(one, torch.Tensor) and not isinstance(one, DTensor)
        return one.untyped_storage().data_ptr() if plain else None

    def watch(self, method):
        """The same method, watched."""

        def watched(*args, **kwargs):
            with self:
                return method(*args, **kwargs)

        return watched


def whole(value):
    """Of a DTensor, all of it, on devices this rank's shard."""
    if value.device.type == "cuda":
        return (value.to_local() if isinstance(value, DTensor) else value).cpu()
    return value.full_tensor() if isinstance(value, DTensor) else value


def digest(parts):
    found = hashlib.blake2b(digest_size=8)

    def add(path, value):
        if isinstance(value, dict):
            for key in value:
                add(f"{path}.{key}", value[key])
        elif isinstance(value, torch.Tensor):
            found.update(
                path.replace(".module.", ".").encode()
                + whole(value).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            found.update(f"{path} {value}".encode())

    add("", {name: part.state_dict() for name, part in parts.items()})
    if ctx.device.type == "cuda":
        digests = [None] * ctx.world_size
        torch.distributed.all_gather_object(digests, found.hexdigest())
        return "".join(digests)
    return found.hexdigest()


ctx = clusterddp.init(
    seed=3, run_dir=options.run_dir, checkpoint=Checkpointing(every_steps=options.every, every_s=None)
)
torch.manual_seed(0)
model = Net().to(ctx.device)
if options.wrong == "keys" and ctx.rank == 1:
    model.register_buffer("only_here", torch.zeros(1))
if options.wrong == "buffers":
    model.seen += ctx.rank
if options.plain:
    model = ctx.wrap(model)
else:
    names = ("replicas", "shards") if options.replicas > 1 else ("shards",)
    shape = (options.replicas, ctx.world_size // options.replicas)[-len(names) :]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if options.precision else MixedPrecisionPolicy()
    given = {"mesh": init_device_mesh(ctx.device.type, shape, mesh_dim_names=names), "mp_policy": policy}
    if options.columns:
        from torch.distributed.tensor import Shard

        given["shard_placement_fn"] = lambda parameter: Shard(1) if parameter.shape == (48, 48) else None
    if options.offload:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        if options.recompute:
            checkpoint(block)
        if options.compile:
            block.compile(backend="aot_eager")
        fully_shard(block, **given)
    fully_shard(model, **given)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
if options.ema:
    parts["average"] = Average(model)
if options.scaler:
    parts["scaler"] = torch.amp.GradScaler(ctx.device.type, init_scale=2.0**127, growth_interval=3)
data = [(torch.randint(11, (5,), generator=torch.Generator().manual_seed(i)), i) for i in range(50)]
loader = ctx.loader(data, batch_size=4 if options.micro else options.batch // ctx.world_size)
largest = Largest() if options.largest else contextlib.nullcontext()
if options.largest:
    for name in ("prepare", "save_if_due", "commit"):
        setattr(Saver, name, largest.watch(getattr(Saver, name)))
with largest:
    run = ctx.run(**parts, loader=loader, best="score" if options.best else None, init_from=options.init_from)
print(f"begin {run.step} {digest(parts)}", flush=True)
print(f"model {digest({'model': model})}", flush=True)
if options.die_after and ctx.rank == 1 and ctx.attempt == 0:
    result = CheckpointClient.result

    def die(client, wait):
        if (saved := result(client, wait)) is not None and saved.step == options.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return saved

    CheckpointClient.result = die
for x, indices in run.steps(options.steps):
    if run.step == options.stop_in and ctx.rank == ctx.world_size - 1:
        request_stop(ctx)
    if options.evaluate and run.every(steps=1):
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    time.sleep(options.pause)
    if run.step == options.hang_in and ctx.rank == 1 and ctx.attempt == 0:
        signal.pause()
    if run.step == options.kill_in and ctx.rank == 1 and ctx.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    last = (run.step + 1) % options.accumulate == 0
    if options.unsynced:
        model.set_requires_gradient_sync(last)
    losses = []
    for piece in run.micro(x) if options.micro else [x]:
        loss = nn.functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        (parts["scaler"].scale(loss) if options.scaler else loss).backward()
        losses.append(loss.detach() * len(piece) / len(x))
    if last:
        if options.scaler:
            parts["scaler"].unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        parts["scaler"].step(optimizer) if options.scaler else optimizer.step()
        if options.scaler:
            parts["scaler"].update()
        if options.ema:
            parts["average"].update()
        scheduler.step()
        optimizer.zero_grad()
    run.log(loss=sum(losses))
    run.log(indices=(1 << indices).sum(), reduce="sum")
    if options.best:
        run.log(score=options.best[run.step])
if options.best:
    run.log(score=options.best[run.step])
print(f"end {run.step} {digest(parts)}", flush=True)
print(f"trained {digest({'model': model})}", flush=True)
if options.largest:
    print(f"largest {largest.elements}", flush=True)
