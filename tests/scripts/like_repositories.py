"""Saves and resumes as public training repositories do, without clusterddp and torch. Each step adds 1 to its weight.

``--style``: nanogpt (one file, which is saved again at the start; ``--init_from=resume`` needs it), torchvision
(``checkpoint-N.pth``; ``--resume FILE``), accelerate (folders ``step_N``; ``--resume_from_checkpoint FOLDER``),
detectron2 (``--machine-rank``). Its files have the form of ``torch.save``.

``--wait 0:5``: attempt 0 writes the file ``reached-0-5`` before step 5, and waits until it is removed. ``--die 1:15``:
attempt 1 is killed before step 15, while it writes a checkpoint.
"""

import argparse
import json
import os
import signal
import sys
import time
import zipfile

parser = argparse.ArgumentParser()
parser.add_argument("--style", default="nanogpt")
parser.add_argument("--out_dir", default="out")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--wait", default="")
parser.add_argument("--die", default="")
parser.add_argument("--init_from", default="scratch")
parser.add_argument("--resume", default="")
parser.add_argument("--resume_from_checkpoint", default="")
parser.add_argument("--machine-rank", default="")
parser.add_argument("--num-machines", default="")
parser.add_argument("--dist-url", default="")
args = parser.parse_args()
attempt, main = os.environ["CLUSTERDDP_ATTEMPT"], os.environ["RANK"] == "0"
print("arguments", *sys.argv[1:], flush=True)
if args.style == "detectron2":
    print(f"machine {args.machine_rank} of {args.num_machines} at {args.dist_url}, {os.environ['OUTPUT']}", flush=True)
    sys.exit(0)

os.makedirs(args.out_dir, exist_ok=True)


def place(step):
    """The folder and the name of the file of a checkpoint."""
    if args.style == "nanogpt":
        return args.out_dir, "ckpt.pt"
    if args.style == "torchvision":
        return args.out_dir, f"checkpoint-{step}.pth"
    return os.path.join(args.out_dir, f"step_{step}"), "model.pt"


def write(folder, name, state):
    os.makedirs(folder, exist_ok=True)
    new = os.path.join(folder, f".{name}.tmp")
    with zipfile.ZipFile(new, "w") as file:
        file.writestr("archive/data.pkl", str(time.time()))
        file.writestr("archive/data/0", json.dumps(state))
    os.replace(new, os.path.join(folder, name))  # as torch.save does in a rank; others may read it at this moment


def save(step):
    write(*place(step), {"weight": weight, "step": step})
    if args.style == "accelerate":
        write(place(step)[0], "random_states_0.pkl", {})


def die(step):
    """As by the kernel, in the middle of a save."""
    folder, name = place(step)
    if args.style == "accelerate":
        write(folder, name, {"weight": weight, "step": step})
    elif args.style == "torchvision":
        with open(os.path.join(folder, name), "wb") as file:
            file.write(b"PK\x03\x04" + bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)


weight, first = 0, 0
loaded = os.path.join(args.out_dir, "ckpt.pt") if args.init_from == "resume" else args.resume
loaded = os.path.join(args.resume_from_checkpoint, "model.pt") if args.resume_from_checkpoint else loaded
if loaded:
    with zipfile.ZipFile(loaded) as file:  # a missing file is an error
        state = json.loads(file.read("archive/data/0"))
    weight, first = state["weight"], state["step"]
    if args.style == "nanogpt" and main:
        save(first)
print(f"starts at step {first}", flush=True)
for step in range(first, args.steps):
    if f"{attempt}:{step}" in args.wait.split(",") and main:
        reached = os.path.join(args.out_dir, f"reached-{attempt}-{step}")
        open(reached, "w").close()
        while os.path.exists(reached):
            time.sleep(0.01)
    if f"{attempt}:{step}" in args.die.split(",") and main:
        die(step)
    weight += 1
    if main and (step + 1) % args.every == 0:
        save(step + 1)
print(f"done with weight {weight}", flush=True)
