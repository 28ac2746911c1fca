"""Lightning: a callback that stops all ranks after the same step, lets the Trainer save, and requeues.

``Trainer(plugins=[RankEnvironment(ctx)], callbacks=[SaveAndRequeue(folder)])``. The plugin gives Lightning the
ranks (Lightning's plugin for Slurm would requeue the job itself). The process group is the context's.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Callback

import clusterddp
from clusterddp.training.context import Context

_CHECKPOINT = re.compile(r"step=(\d+)\.ckpt$")


class RankEnvironment(ClusterEnvironment):
    """Lightning's plugin for ranks that clusterddp has started.

    Args:
        ctx: of ``clusterddp.init()``.

    Example: ``Trainer(strategy="ddp", plugins=[RankEnvironment(ctx)])``
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """MASTER_ADDR. The process group exists already."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """MASTER_PORT. The process group exists already."""
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        """Lightning never chooses it itself."""
        return False

    def world_size(self) -> int:
        """The number of ranks."""
        return self._ctx.world_size

    def set_world_size(self, size: int) -> None:
        """Ignored: the number is fixed."""

    def global_rank(self) -> int:
        """This rank."""
        return self._ctx.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the rank is fixed."""

    def local_rank(self) -> int:
        """This rank on its node."""
        return self._ctx.local_rank

    def node_rank(self) -> int:
        """This rank's node."""
        return self._ctx.node_rank


class SaveAndRequeue(Callback):
    """On a stop request, all ranks agree on a step. The Trainer saves after it, and ``fit()`` raises Stopped.

    Make it after ``clusterddp.init()``.

    Args:
        folder: where the checkpoint is saved. Also give it to ModelCheckpoint as ``dirpath``.

    Example: ``Trainer(strategy="ddp", callbacks=[SaveAndRequeue("out/net")])``
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._step = 0
        self._handler = signal.getsignal(signal.SIGTERM)

    @property
    def newest_checkpoint(self) -> str | None:
        """The checkpoint with the highest step in its name, for ``fit(ckpt_path=...)``, or None.

        Example: ``trainer.fit(model, loader, ckpt_path=stop.newest_checkpoint)``
        """
        found = {
            int(match[1]): path for path in self._folder.glob("*.ckpt") if (match := _CHECKPOINT.search(path.name))
        }
        return str(found[max(found)]) if found else None

    def on_sanity_check_start(self, *_: Any) -> None:
        """Restores the TERM handler. Lightning's own would broadcast from the handler, between other collectives."""
        signal.signal(signal.SIGTERM, self._handler)

    on_train_start = on_sanity_check_start

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Stops only after a step of the optimizer, to lose no accumulated gradients."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if clusterddp.stop_requested():
            trainer.save_checkpoint(self._folder / f"stop-step={trainer.global_step}.ckpt")
            clusterddp.requeue()
