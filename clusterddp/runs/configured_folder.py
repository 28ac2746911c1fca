"""The folder for new runs that the configuration files name."""

from __future__ import annotations

import os
from pathlib import Path

from clusterddp.jobdef.configuration_paths import find_configuration_files
from clusterddp.protocol import RUNS
from clusterddp.slurm.commands import named_cluster


def use_runs_dir() -> None:
    """Sets CLUSTERDDP_RUNS to the key ``runs_dir`` of the configuration files, unless the user has set it.

    Commands then look for runs there, too.
    """
    if RUNS in os.environ:
        return
    files = find_configuration_files(os.environ, Path.cwd())
    if not files:  # the YAML reader takes longer to load than many runs to list
        return
    from clusterddp.jobdef.configuration_files import configured_runs_dir

    if folder := configured_runs_dir(files, lambda: named_cluster(os.environ)):
        os.environ[RUNS] = folder
