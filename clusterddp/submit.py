"""``python -m clusterddp.submit`` is ``clusterddp submit``."""

import sys

from clusterddp.cli.main import main

if __name__ == "__main__":
    main(["submit", *sys.argv[1:]])
