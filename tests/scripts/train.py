"""A small training for tests that can wait at a chosen moment of each attempt until the test says go.

``--moments`` names a moment per attempt: attempt 0 waits at the first, attempt 1 at the second, and so on. There every
rank leaves ``MARKS/<attempt>-<rank>``, and waits for ``MARKS/<attempt>-go``. ``--pause`` ends with ``MARKS/fast``.
"""

import argparse
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
parser.add_argument("--moments", default="")
parser.add_argument("--marks", type=Path)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--fill-at", type=int, help="after this step attempt 0's rank 1 takes memory without end")
args = parser.parse_args()

ATTEMPT, RANK = int(os.environ.get("CLUSTERDDP_ATTEMPT", 0)), os.environ.get("RANK", "0")
MOMENT = dict(enumerate(args.moments.split(","))).get(ATTEMPT)


def wait_at(moment):
    """Waits for the test, for at most 60 s, if this attempt's moment is this one."""
    if moment != MOMENT:
        return
    (args.marks / f"{ATTEMPT}-{RANK}").touch()
    deadline = time.monotonic() + 60
    while not (args.marks / f"{ATTEMPT}-go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


wait_at("import")

import torch  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import clusterddp  # noqa: E402
from tests.descent import Descent  # noqa: E402


class Noise(Dataset):
    """200 samples; each has random augmentation of its own."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((16,), index / 200) + 0.1 * torch.randn(16), torch.tensor([index % 7 / 7.0])


class Watched:
    """A part of the state that waits while it is saved or restored."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        if self.count == 20:
            wait_at("save")
        return {"count": self.count}

    def load_state_dict(self, state):
        wait_at("restore")
        self.count = state["count"]


if RANK == "1":
    wait_at("rendezvous")  # rank 0 waits inside init()
elif MOMENT == "rendezvous":
    (args.marks / f"{ATTEMPT}-{RANK}").touch()
ctx = clusterddp.init()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
optimizer = Descent(model)
loader = ctx.loader(Noise(), batch_size=4, num_workers=args.workers)
watched = Watched()
run = ctx.run(model=model, optimizer=optimizer, loader=loader, watched=watched)
for number, (x, y) in enumerate(run.steps(args.steps)):
    if number == 0:
        wait_at("first step")
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    watched.count += 1
    run.log(loss=loss)
    if not (args.marks and (args.marks / "fast").exists()):
        time.sleep(args.pause)
    if number == 2 and MOMENT == "evaluation":
        wait_at("evaluation")
        for _ in range(600):
            if clusterddp.stop_requested():
                run.stop("in the evaluation")
            time.sleep(0.1)
    if (run.step, RANK, ATTEMPT) == (args.fill_at, "1", 0):
        taken = [bytearray(b"x") * 2**26 for _ in range(200)]  # 13 GB; any limit of a test is below
    if run.step == args.steps - 1:
        wait_at("last step")
wait_at("after the end")
ctx.print(f"finished at step {run.step}")
