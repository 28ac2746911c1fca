"""The module that jobs of ``clusterddp.launch()`` name. The code is in ``clusterddp/worker/function.py``."""

from clusterddp.worker.function import main

if __name__ == "__main__":
    main()
