"""Runs a script after a statement that breaks something for it: changed.py STATEMENT SCRIPT [ARG...]"""

import runpy
import sys

import torch.distributed as dist  # noqa: F401  (for the statement)

exec(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
