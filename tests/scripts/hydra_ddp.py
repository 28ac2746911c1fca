"""A Hydra app that trains with DDP, as for torchrun: it does not use clusterddp, and resumes from its own save."""

import time
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from torch.nn.parallel import DistributedDataParallel


@hydra.main(version_base=None, config_path="hydra_conf", config_name="config")
def main(cfg):
    dist.init_process_group("gloo")
    path, rank = Path(HydraConfig.get().runtime.output_dir) / "last.pt", dist.get_rank()
    torch.manual_seed(cfg.seed)
    data = torch.randn(cfg.steps, dist.get_world_size(), 8, 4)[:, rank]
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = hydra.utils.instantiate(cfg.optimizer, model.parameters())
    first = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        first = state["step"]
    for step in range(first, cfg.steps):
        loss = (model(data[step]) - data[step].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(cfg.pause)
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
    dist.barrier()
    last = [float(value) for parameter in model.parameters() for value in parameter.flatten()]
    del model
    dist.destroy_process_group()
    return last


if __name__ == "__main__":
    main()
