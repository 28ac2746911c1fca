"""The matrix of versions: pairs of Python and torch, and several Slurms, each with the tests that depend on them.

``make test-versions`` writes RESULTS.json here and docs/measurements/versions.md. It is not part of ``make test``: it
installs four environments and takes most of an hour on two cores.
"""
