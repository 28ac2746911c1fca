"""Matrix factorisation of a ratings table."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

USERS, ITEMS, RANK_OF_MODEL = 200, 120, 24
TOTAL, EVERY = 50, 15
folder = Path("factorisation")


class Factors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = torch.nn.Parameter(torch.randn(USERS, RANK_OF_MODEL) * 0.1)
        self.items = torch.nn.Parameter(torch.randn(ITEMS, RANK_OF_MODEL) * 0.1)

    def forward(self, user, item):
        return (self.users[user] * self.items[item]).sum(dim=1)


class Checkpointer:
    """Writes what it is given, and stops all ranks after SIGTERM."""

    def __init__(self, **objects):
        self.objects = objects
        self.rank = dist.get_rank()
        self.stop = torch.zeros(1)
        signal.signal(signal.SIGTERM, self.on_signal)

    def on_signal(self, *args):
        self.stop += 1

    def stop_requested(self):
        answer = self.stop.clone()
        dist.all_reduce(answer)
        return answer.item() > 0

    def save(self, step):
        if self.rank == 0:
            folder.mkdir(exist_ok=True)
            state = {name: value.state_dict() for name, value in self.objects.items()}
            torch.save({"step": step, **state}, folder / "new.pt")
            os.replace(folder / "new.pt", folder / "current.pt")

    def restore(self):
        if not (folder / "current.pt").exists():
            return 0
        state = torch.load(folder / "current.pt")
        for name, value in self.objects.items():
            value.load_state_dict(state[name])
        return state["step"]


def main() -> int:
    torch.manual_seed(8)
    factors = Factors()
    model = DistributedDataParallel(factors)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    checkpointer = Checkpointer(factors=factors, optimizer=optimizer)
    for step in range(checkpointer.restore(), TOTAL):
        g = torch.Generator().manual_seed(step + 100_000 * dist.get_rank())
        user, item = torch.randint(USERS, (256,), generator=g), torch.randint(ITEMS, (256,), generator=g)
        rating = torch.cos(user / 10) + torch.sin(item / 7)
        loss = torch.nn.functional.mse_loss(model(user, item), rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if checkpointer.stop_requested():
            checkpointer.save(step + 1)
            print("stopped on request")
            return 128 + signal.SIGTERM
        if (step + 1) % EVERY == 0:
            checkpointer.save(step + 1)
    checkpointer.save(TOTAL)
    return 0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    code = main()
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(code)
