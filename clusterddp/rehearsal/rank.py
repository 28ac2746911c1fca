"""A rank of a rehearsal under plain Slurm: it runs ``SCRIPT [ARG...]`` or ``-m MODULE [ARG...]``, and is observed."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path

from clusterddp import protocol
from clusterddp.import_hooks import when_imported
from clusterddp.process import collect_as_usual, collect_rarely, die_with_parent
from clusterddp.rehearsal import observer
from clusterddp.rehearsal.confinement import confine
from clusterddp.rehearsal.facts import Orders

#: On this signal a rank prints the stacks of its threads to standard error.
STACKS = signal.SIGRTMAX - 3


def main() -> None:
    """Runs the script in this process, as ``python SCRIPT`` would."""
    die_with_parent()
    collect_rarely()
    when_imported("torch", lambda _: collect_as_usual())
    confine([Path(path) for path in os.environ[protocol.REHEARSAL_WRITABLE].split(":")])
    faulthandler.register(STACKS, all_threads=True, chain=False)
    observer.begin(Orders.from_json(Path(os.environ[protocol.REHEARSAL]).read_text()), int(os.environ["RANK"]))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
