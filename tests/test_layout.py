"""Imports point down: two halves that share only the ground floor, and a command line without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "clusterddp"
GROUND = {
    "entry",
    "reporter",
    "errors",
    "sharing",
    "environment",
    "hostlist",
    "yaml12",
    "job",
    "job_fields",
    "job_values",
    "job_file",
    "records",
    "rundir",
    "link",
    "process",
    "completion",
    "rank_exit",
    "archive",
    "checkpoints",
    "masking",
    "trust",
}


def imported(path: Path) -> set[str]:
    """The clusterddp modules that a file imports anywhere, as dotted names without the package's."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("clusterddp.") for name in names if name.startswith("clusterddp.")}


def test_the_halves_never_import_each_other() -> None:
    """Launch runs on login nodes without torch; training runs under any launcher."""
    for half, other in (("launch", "training"), ("training", "launch")):
        for path in (PACKAGE / half).glob("*.py"):
            assert not [name for name in imported(path) if name.split(".")[0] in (other, "submit", "options")], path


def test_the_ground_floor_imports_nothing_above_itself() -> None:
    """What both halves share must not pull one of them in."""
    for name in GROUND:
        assert {module.split(".")[0] for module in imported(PACKAGE / f"{name}.py")} <= GROUND, name
    for name in ("rank", "function"):
        assert {module.split(".")[0] for module in imported(PACKAGE / f"{name}.py")} <= GROUND | {name}


def test_the_command_line_does_not_import_torch() -> None:
    """Neither submit nor the supervisor nor the shim: torch takes seconds to import, and more on a shared disk."""
    modules = (
        "clusterddp.submit, clusterddp.launch.batch, clusterddp.launch.status, clusterddp.rank, "
        "clusterddp.command_line, clusterddp.api, clusterddp.function"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
