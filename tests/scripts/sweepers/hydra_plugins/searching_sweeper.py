"""Hydra sweepers that print how members ended: the basic one, and one that chooses a second batch by the first."""

import json
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper


@dataclass
class ListingConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.searching_sweeper.Listing"


@dataclass
class SearchingConf:
    _target_: str = "hydra_plugins.searching_sweeper.Searching"


ConfigStore.instance().store(group="hydra/sweeper", name="listing", node=ListingConf)
ConfigStore.instance().store(group="hydra/sweeper", name="searching", node=SearchingConf)


class Listing(BasicSweeper):
    def sweep(self, arguments):
        print(json.dumps([(job.status.name, job.return_value) for job in super().sweep(arguments)[0]]))


class Searching(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        first = self.launch(["model.lr=0.5", "model.lr=2"], arguments, 0)
        best = min((value, lr) for status, value, lr in first if status == "COMPLETED")[1]
        print(json.dumps(first + self.launch([f"model.lr={best / 2}"], arguments, len(first))))

    def launch(self, batch, arguments, number):
        found = []
        for job in self.launcher.launch([[*arguments, override] for override in batch], initial_job_idx=number):
            value = job.return_value if job.status == JobStatus.COMPLETED else str(job._return_value)
            found.append((job.status.name, value, job.cfg.model.lr))
        return found
