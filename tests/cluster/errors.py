"""The one error of this package."""


class ClusterError(RuntimeError):
    """The cluster cannot be brought up, or is not there; the message says why and what to do."""
