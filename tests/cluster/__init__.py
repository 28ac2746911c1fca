"""A real Slurm on one machine, for tests: nodes in network namespaces, fake GPUs, accounting, preemption.

`python -m tests.cluster up|down|status|run` on the command line; `Cluster.up()` in a fixture. It needs root on Debian
or Ubuntu with the packages that `tests/cluster/install.py` installs, and never touches another Slurm.
"""

from .cluster import Cluster
from .config import ClusterConfig
from .errors import ClusterError
from .install import unavailable

__all__ = ["Cluster", "ClusterConfig", "ClusterError", "unavailable"]
