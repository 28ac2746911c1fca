"""Packages that some tests need, and clusterddp does not: `make .venv/integrations` installs them."""

from __future__ import annotations

import importlib.util
import os

import pytest


def require(*packages: str) -> None:
    """Skips a test where one of these packages is missing; fails it in CI, which installs them all."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            (pytest.fail if "CI" in os.environ else pytest.skip)(f"{package} is not installed: make .venv/integrations")
