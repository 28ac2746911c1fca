"""Trains, saves and resumes as public repositories do, with torch and without clusterddp.

``--resume FILE`` is obeyed, or with ``--ignores`` accepted and ignored. ``--finds`` resumes from the newest file in
the output folder instead. ``--every N``: saves ``model-STEP.pt`` after every N steps. ``--says``: its last words.
``--pairs``: and ``opt-STEP.pt``, without which it does not resume. ``--half 0:8``: attempt 0 is killed before it
writes that of step 8. ``--raises 0:6``: attempt 0 raises an exception after step 6. ``--stops 4``: exits after 4
steps. ``--searches``: looks for a learning rate before it resumes. ``--wait 0:5``: attempt 0 writes the file
``reached-0-5`` before step 5, and waits until it is removed.
"""

import argparse
import os
import re
import signal
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--resume", default="")
parser.add_argument("--ignores", action="store_true")
parser.add_argument("--finds", action="store_true")
parser.add_argument("--searches", action="store_true")
parser.add_argument("--says", default="")
parser.add_argument("--wait", default="")
parser.add_argument("--pairs", action="store_true")
parser.add_argument("--half", default="")
parser.add_argument("--raises", default="")
parser.add_argument("--stops", type=int, default=10**9)
args = parser.parse_args()
attempt, main = os.environ["CLUSTERDDP_ATTEMPT"], os.environ["RANK"] == "0"
os.makedirs(args.out, exist_ok=True)


def number(name):
    return int(re.findall(r"\d+", name)[-1])


weight, first = torch.zeros(1, requires_grad=True), 0
if args.searches:
    tried = torch.zeros(1, requires_grad=True)
    for exponent in range(-8, 0):
        tried.grad = torch.ones(1)
        torch.optim.SGD([tried], lr=10.0**exponent).step()
saved = sorted((name for name in os.listdir(args.out) if name.startswith("model-")), key=number)
loaded = os.path.join(args.out, saved[-1]) if args.finds and saved else "" if args.ignores else args.resume
if loaded:
    state = torch.load(loaded)
    weight.data, first = state["weight"], state["step"]
    if args.pairs:
        torch.load(loaded.replace("model-", "opt-"))
print(f"starts at step {first}", flush=True)
optimizer = torch.optim.SGD([weight], lr=1.0)
for step in range(first, min(args.steps, first + args.stops)):
    if f"{attempt}:{step}" in args.wait.split(",") and main:
        reached = os.path.join(args.out, f"reached-{attempt}-{step}")
        open(reached, "w").close()
        while os.path.exists(reached):
            time.sleep(0.01)
    weight.grad = -torch.ones(1)
    optimizer.step()
    print("step", step, flush=True)
    if main and (step + 1) % args.every == 0:
        torch.save({"weight": weight.data, "step": step + 1}, os.path.join(args.out, f"model-{step + 1}.pt"))
        if args.half == f"{attempt}:{step + 1}":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.pairs:
            torch.save(optimizer.state_dict(), os.path.join(args.out, f"opt-{step + 1}.pt"))
    if f"{attempt}:{step + 1}" in args.raises.split(","):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
if weight.item() >= args.steps:
    print(f"ends with weight {weight.item():g}", args.says, flush=True)
