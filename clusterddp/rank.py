"""``python -m clusterddp.rank``: ``clusterddp.worker`` under the name that older versions use."""

import signal

if __name__ == "__main__":
    # First of all: a stop signal during the imports stays pending instead of killing the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})

from clusterddp.worker.rank import main

if __name__ == "__main__":
    main()
