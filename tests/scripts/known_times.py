"""A training that writes down itself when it does what, in FOLDER/said/ATTEMPT-RANK: lines ``time what [number]``.

Of tests/soak/test_booking.py, which steers it by files in FOLDER: with ``slow`` rank 1 takes longer in each step;
``crash`` makes it raise; with ``stall`` rank 0's next batch takes as long as if the file system hung; the loop ends
after the step whose number is in ``total``. Times are of CLOCK_REALTIME.
"""

import time

BEGAN = time.time()

import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
said = open(FOLDER / "said" / f"{os.environ['CLUSTERDDP_ATTEMPT']}-{RANK}", "w", buffering=1)


def say(what, at=None):
    said.write(f"{time.time() if at is None else at:.4f} {what}\n")


say("importing", at=BEGAN)
time.sleep(0.5)

import torch  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import clusterddp  # noqa: E402
from clusterddp.training import step_timing  # noqa: E402

BODY_S, BATCH_S, SLOW_S, SAVE_S, EVALUATE_S, RESTORE_S, FIRST_S, STALL_S = 0.08, 0.02, 0.2, 0.3, 1.2, 0.6, 0.5, 8
step_timing.STALL_S = 5  # the run's watchdog waits for 12 s
init = clusterddp.init  # imports what it needs
saving = stepping = False


class Samples(Dataset):
    """A batch takes BATCH_S; training asks for it once the save before it no longer blocks."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index % 2 == 0:
            saved()
            stall()
            time.sleep(BATCH_S)
        return torch.full((4,), index / 64)


class Slow:
    """A part of the state that takes long to save and to restore."""

    def state_dict(self):
        global saving
        # Also asked for when the run begins, prepares for saves, and compares the states of the ranks.
        if not saving and {"save_if_due", "commit"} & {frame.name for frame in traceback.extract_stack()}:
            say("saving")
            saving = True
        time.sleep(SAVE_S)
        return {}

    def load_state_dict(self, _):
        time.sleep(RESTORE_S)


def saved():
    """The loop asks for a batch: nothing blocks it any more."""
    global saving, stepping
    if saving:
        say("saved")
    if not stepping and run.step == begun + 1:
        say("stepping")
        stepping = True
    saving = False


def stall():
    if RANK == 0 and (FOLDER / "stall").exists():
        say("stalling")
        time.sleep(STALL_S)
        (FOLDER / "stall").unlink()
        say("stalled")


def evaluate():
    say("evaluating")
    for _ in held_out:
        time.sleep(EVALUATE_S / len(held_out))
    say("evaluated")


def train():
    for batch in run.steps(1_000_000):
        time.sleep(BODY_S + (FIRST_S if run.step == begun else 0))
        if RANK == 1 and (FOLDER / "crash").exists():
            (FOLDER / "crash").unlink()
            say("crash")
            raise RuntimeError("injected")
        if RANK == 1 and run.step > begun and (FOLDER / "slow").exists():
            say("slow")
            time.sleep(SLOW_S)
            say("usual")
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=0.0)
        if run.step % 60 == 59:
            evaluate()
        if (FOLDER / "total").exists() and run.step + 1 >= int((FOLDER / "total").read_text()):
            run.finish()
        say(f"step {run.step}")


say("rendezvous")
ctx = init()
say("importing")
model = ctx.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = ctx.loader(Samples(), batch_size=2, shuffle=False)
held_out = ctx.eval_loader(torch.zeros(8, 4), batch_size=1)
say("restoring")
run = ctx.run(model=model, optimizer=optimizer, loader=loader, slow=Slow())
say("importing")
begun = run.step
say("first_step")
try:
    train()
    say("after")
finally:
    say("left")
