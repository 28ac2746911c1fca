"""Runs a recipe as a rank of the run in a folder: recipe.py RUN_DIR STEP SCRIPT [ARG...]; RUN_DIR is empty in a job

In the first attempt, rank 1 asks for a stop in step STEP.
"""

import runpy
import sys

import clusterddp

RUN_DIR, STEP, *sys.argv = sys.argv[1:]
init = clusterddp.init


def init_with_run_dir():
    ctx = init(run_dir=RUN_DIR or None)
    make_run = ctx.run

    def run(**parts):
        made = make_run(**parts)
        steps = made.steps

        def steps_with_a_stop(total):
            for batch in steps(total):
                if (ctx.attempt, ctx.rank, made.step) == (0, 1, int(STEP)):
                    ctx.request_stop("the test")
                yield batch

        made.steps = steps_with_a_stop
        return made

    ctx.run = run
    return ctx


clusterddp.init = init_with_run_dir
runpy.run_path(sys.argv[0], run_name="__main__")
