"""Saves and resumes as public training repositories do, without clusterddp; 30 steps unless ``--steps`` says otherwise.

``--style``: nanogpt (one file; ``--init_from=resume`` needs it), torchvision (``checkpoint-N.pth``; ``--resume FILE``),
accelerate (folders ``step_N``; ``--resume_from_checkpoint FOLDER``), detectron2 (``--machine-rank``, no checkpoint).
Its files have the form of ``torch.save``. Before a step that ``--wait`` names it writes ``reached-STEP``, and waits until a
test removes the file.
"""

import argparse
import json
import os
import sys
import time
import zipfile

parser = argparse.ArgumentParser()
parser.add_argument("--style", default="nanogpt")
parser.add_argument("--out_dir", default="out")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--wait", default="")
parser.add_argument("--init_from", default="scratch")
parser.add_argument("--resume", default="")
parser.add_argument("--resume_from_checkpoint", default="")
parser.add_argument("--machine-rank", default="")
parser.add_argument("--num-machines", default="")
parser.add_argument("--dist-url", default="")
args = parser.parse_args()
rank = int(os.environ["RANK"])
print("arguments", sys.argv[1:], flush=True)
if args.style == "detectron2":
    print(f"machine {args.machine_rank} of {args.num_machines} at {args.dist_url}, {os.environ['OUTPUT']}", flush=True)
    sys.exit(0)

os.makedirs(args.out_dir, exist_ok=True)
weight, first = 0, 0
loaded = os.path.join(args.out_dir, "ckpt.pt") if args.init_from == "resume" else args.resume
loaded = os.path.join(args.resume_from_checkpoint, "model.pt") if args.resume_from_checkpoint else loaded
if loaded:
    with zipfile.ZipFile(loaded) as file:  # a missing file is an error
        state = json.loads(file.read("archive/data/0"))
    weight, first = state["weight"], state["step"]
print(f"starts at step {first} from {loaded or 'scratch'}", flush=True)


def write(path, state):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", str(time.time()))
        file.writestr("archive/data/0", json.dumps(state))


def save(step):
    state = {"weight": weight, "step": step}
    if args.style == "nanogpt":
        write(os.path.join(args.out_dir, "ckpt.pt"), state)
    elif args.style == "torchvision":
        write(os.path.join(args.out_dir, f"checkpoint-{step}.pth"), state)
    else:
        folder = os.path.join(args.out_dir, f"step_{step}")
        os.makedirs(folder, exist_ok=True)
        write(os.path.join(folder, "model.pt"), state)
        write(os.path.join(folder, "random_states_0.pkl"), {})


def reached(step):
    path = os.path.join(args.out_dir, f"reached-{step}")
    open(path, "w").close()
    while os.path.exists(path):
        time.sleep(0.01)


waits = [int(step) for step in args.wait.split(",") if step]
for step in range(first, args.steps):
    if step in waits and rank == 0:
        reached(step)
    weight += 1
    if rank == 0 and (step + 1) % args.every == 0:
        save(step + 1)
print(f"done with weight {weight}", flush=True)
