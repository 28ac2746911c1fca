"""Nodes whose network has no IPv4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import REPOSITORY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network")
def test_two_nodes_train_together_over_ipv6_alone(tmp_path: Path) -> None:
    """The supervisor's address, the store and gloo are on the interface between them."""
    command = ["unshare", "--net", sys.executable, "-m", "tests.ranks.two_networks", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2.0 fd00:8::1 eth0\n" * 2)
