"""A training that saves when it is preempted. With --forget, a restart does not restore its optimizer."""

import os
import signal
import sys
import types

import torch

STEPS, SAVE_EVERY, FILE = 14, 5, "out/checkpoint.pt"
stop = False


def on_term(_signum: int, _frame: types.FrameType | None) -> None:
    global stop
    stop = True


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{FILE}.new")
    os.replace(f"{FILE}.new", FILE)


def main() -> None:
    signal.signal(signal.SIGTERM, on_term)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = 0
    os.makedirs("out", exist_ok=True)
    if os.path.exists(FILE):
        saved = torch.load(FILE)
        model.load_state_dict(saved["model"])
        step = saved["step"]
        if "--forget" not in sys.argv:
            optimizer.load_state_dict(saved["optimizer"])
    while step < STEPS:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
        if stop or step % SAVE_EVERY == 0:
            save(model, optimizer, step)
        if stop:
            sys.exit(143)


main()
