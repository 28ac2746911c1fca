"""``python -m clusterddp.supervisor RUN_DIRECTORY``."""

from clusterddp.supervisor.main import main

if __name__ == "__main__":
    main()
