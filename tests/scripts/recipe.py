"""Runs a script as a rank of the run in a folder: recipe.py RUN_DIR STEPS SCRIPT [ARG...]; RUN_DIR is empty in a job

STEPS, such as 20,39: the last rank asks for a stop at the beginning of step 20 of attempt 0, and of step 39 of attempt
1. All ranks wait there for the request, so that they stop at the next point where they can.
"""

import runpy
import signal
import sys

import clusterddp
from tests.stops import await_stop

RUN_DIR, stops, *sys.argv = sys.argv[1:]
STOPS = dict(enumerate(map(int, stops.split(",") if stops else [])))
init = clusterddp.init


def stop(ctx):
    if ctx.rank == ctx.world_size - 1:
        signal.raise_signal(signal.SIGTERM)
    await_stop(ctx)


def init_with_run_dir():
    ctx = init(run_dir=RUN_DIR or None)
    make_run = ctx.run

    def run(**parts):
        made = make_run(**parts)
        steps = made.steps

        def steps_with_a_stop(total):
            for batch in steps(total):
                if STOPS.get(ctx.attempt) == made.step:
                    stop(ctx)
                yield batch

        made.steps = steps_with_a_stop
        return made

    ctx.run = run
    return ctx


clusterddp.init = init_with_run_dir
runpy.run_path(sys.argv[0], run_name="__main__")
