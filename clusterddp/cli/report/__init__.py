"""The command ``report``: which runs, and where the page goes; what the page shows is in the package ``report``."""
