"""The module that the job of a launched function names: ``clusterddp/worker/function.py`` under its recorded name."""

from clusterddp.worker.function import main

if __name__ == "__main__":
    main()
