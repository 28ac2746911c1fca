"""What a run trains from: ``ctx.loader()``, a loader of another library, or nothing."""

from __future__ import annotations

from typing import TypeAlias

from clusterddp.data.external_loader import ExternalLoader, StatefulLoader
from clusterddp.data.loader import Loader
from clusterddp.data.no_loader import NoLoader
from clusterddp.distributed.process_group import ProcessGroup

#: The argument ``step`` of its methods is the step to be made, from 0.
TrainingLoader: TypeAlias = Loader | ExternalLoader | NoLoader


def training_loader(loader: Loader | StatefulLoader | None, group: ProcessGroup) -> TrainingLoader:
    """What ``ctx.run()`` got as its loader, with the methods that a run needs. Raises TypeError without a state."""
    if loader is None:
        return NoLoader()
    return loader if isinstance(loader, Loader) else ExternalLoader(loader, group)
