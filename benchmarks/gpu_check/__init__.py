"""``python -m benchmarks.gpu_check``: everything that needs a GPU, case by case, in calls of nine minutes.

``__main__`` prepares a bare machine, measures how fast it is and carries the cases out; ``case`` says what a case is
and what it may use; ``training``, ``faults`` and ``costs`` have the cases, ``plan`` their order; ``session`` carries
them out.
"""
