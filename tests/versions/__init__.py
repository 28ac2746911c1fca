"""The matrix of versions: pairs of Python and torch, and several Slurms, each with the tests that depend on them.

``make test-versions`` writes docs/measurements/versions.md and versions.json. It is not part of ``make test``: it
installs four environments and takes most of an hour on two cores.
"""
