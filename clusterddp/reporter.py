"""What clusterddp says in a rank: one line on standard error, which never fails.

A rank's standard streams belong to its script, which may have closed or replaced them.
"""

from __future__ import annotations

import sys


def say(words: str) -> None:
    """Prints ``words``, marked as clusterddp's; drops them where standard error takes nothing.

    Descriptor 2 is no way out: after a script has closed it, it may be any file of the script's.
    """
    if sys.stderr is None:  # print() would take standard output
        return
    try:
        print(f"clusterddp: {words}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # a full disk, a closed stream, something that is no stream
        return
