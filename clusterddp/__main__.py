"""``python -m clusterddp`` is ``clusterddp``."""

from clusterddp.cli.main import main

if __name__ == "__main__":
    main()
