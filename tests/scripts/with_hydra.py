"""A Hydra app that does not use clusterddp: it saves in its output folder and resumes from there."""

import json
import logging
import os
import time
from dataclasses import dataclass, field

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

log = logging.getLogger(__name__)


@dataclass
class Model:
    lr: float = 0.1
    name: str = "small"


@dataclass
class Config:
    model: Model = field(default_factory=Model)
    steps: int = 20
    gate: str = ""
    stamp: str = "${now:%H%M%S%f}"


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(cfg):
    path = os.path.join(HydraConfig.get().runtime.output_dir, "state.json")
    rank, state = int(os.environ.get("RANK", 0)), {"step": 0, "value": 1.0}
    if os.path.exists(path):
        with open(path) as file:
            state = json.load(file)
    log.info(f"starts at step {state['step']}, stamp {cfg.stamp}, model {cfg.model.name!r}")
    if cfg.model.lr > 1:
        raise ValueError(f"{cfg.model.lr} is too much")
    while state["step"] < cfg.steps:
        if cfg.gate and state["step"] == 3:
            while not os.path.exists(cfg.gate):
                time.sleep(0.05)
        state = {"step": state["step"] + 1, "value": state["value"] * (1 - cfg.model.lr)}
        if rank == 0:
            with open(path + ".tmp", "w") as file:
                json.dump(state, file)
            os.replace(path + ".tmp", path)
    return state["value"]


if __name__ == "__main__":
    main()
