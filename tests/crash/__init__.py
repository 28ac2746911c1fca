"""Crash consistency: kill at every system call that changes a run directory, fail each, and replay with a worse disk.

``subject`` is the process that is killed, ``tracing`` records and injects with strace, ``disk`` models what a machine
that died may leave, ``recovery`` says whether a run directory can continue.
"""
