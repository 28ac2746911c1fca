"""What the project claims, measured: each program here leaves a table and its raw figures in benchmarks/results/.

A benchmark is a ``measure`` that returns ``common.Found``: its sides take turns (``sides.in_turns``), and rows compare
them (``common.paired``). ``common.main`` is its command line and writes its results. Where a cluster is needed,
``runs`` has it.
"""
