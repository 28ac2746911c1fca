"""What a run trains from: ``ctx.loader()``, a loader of another library, or nothing."""

from __future__ import annotations

from typing import TypeAlias

from clusterddp.data.external_loader import ExternalLoader, StatefulLoader
from clusterddp.data.loader import Loader
from clusterddp.data.no_loader import NoLoader
from clusterddp.distributed.process_group import ProcessGroup

#: In the group's store: what rank 0 takes its samples from.
_STREAM = "loader/stream"
#: The argument ``step`` of its methods is the step to be made, from 0.
TrainingLoader: TypeAlias = Loader | ExternalLoader | NoLoader


def training_loader(loader: Loader | StatefulLoader | None, group: ProcessGroup) -> TrainingLoader:
    """What ``ctx.run()`` got as its loader, with the methods that a run needs.

    Raises TypeError for one without a state, ValueError on a rank whose ``ctx.loader()`` is not that of rank 0.
    """
    if loader is None:
        return NoLoader()
    if not isinstance(loader, Loader):
        return ExternalLoader(loader, group)
    _check_same(f"{loader.length} samples in the order {loader.label!r}", group)
    return loader


def _check_same(stream: str, group: ProcessGroup) -> None:
    """The ranks take their parts of one stream, which must therefore be the same on all of them."""
    if group.rank == 0:
        group.store.set(_STREAM, stream)
    elif (of_rank_0 := group.store.get(_STREAM).decode()) != stream:
        raise ValueError(
            f"rank {group.rank} has {stream}, and rank 0 has {of_rank_0}: give ctx.loader() the same dataset and order "
            "on every rank; it gives each rank its part"
        )
