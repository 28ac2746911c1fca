"""A rank of a rehearsal: it runs ``SCRIPT [ARG...]`` or ``-m MODULE [ARG...]``, and is observed.

Under clusterddp this takes the place of the rank's own entry point, and leads to it.
"""

from __future__ import annotations

import faulthandler
import os
import random
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
    """Runs the script in this process, as ``python SCRIPT`` or as clusterddp would."""
    die_with_parent()
    collect_rarely()
    when_imported("torch", lambda _: collect_as_usual())
    attempt = os.environ.get(protocol.ATTEMPT)
    confine([Path(path) for path in os.environ[protocol.REHEARSAL_WRITABLE].split(":")])
    faulthandler.register(STACKS, all_threads=True, chain=False)
    number = int(attempt or 0)
    orders = Orders.of_attempt(Path(os.environ[protocol.REHEARSAL]), number)
    observed = observer.begin(orders, int(os.environ["RANK"]), number)
    if attempt is not None:
        _run_under_clusterddp(observed, number)
        return
    _seed(int(os.environ["RANK"]))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _seed(rank: int) -> None:
    """Seeds the generators of a script that seeds none, so that its runs can be compared."""
    random.seed(rank)
    when_imported("numpy", lambda numpy: numpy.random.seed(rank))
    when_imported("torch", lambda torch: torch.manual_seed(rank))


def _run_under_clusterddp(observed: observer.Observer, attempt: int) -> None:
    from clusterddp.rehearsal import run_observer
    from clusterddp.worker import rank

    run_observer.watch(observed, attempt)
    rank.main()


if __name__ == "__main__":
    main()
