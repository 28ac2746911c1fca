"""The packages: imports point down and form no circle, and only some packages import torch.

All of it by rule: a module or a room that is added later is checked like the others.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "clusterddp"
#: Packages with torch: what a rank's script imports. All others, and the writer process, do not import it.
WITH_TORCH = {"distributed", "checkpoint", "data", "training", "integrations", "digits", "orders"}
WRITER = "checkpoint.writer"

Graph = Mapping[str, Set[str]]


def modules() -> dict[str, Path]:
    """Every module's file, by its name below clusterddp; the package's own is called ``clusterddp``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").rstrip(".") or "clusterddp"] = path
    return found


MODULES = modules()


def imported(path: Path, everywhere: bool) -> set[str]:
    """The modules of clusterddp that a file imports. ``everywhere``: also in functions, and for the type checker."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if not everywhere and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                found.update(name for alias in child.names if (name := known(alias.name)))
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.update(known(f"{child.module}.{alias.name}") or known(child.module) for alias in child.names)
            elif everywhere or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child)

    visit(ast.parse(path.read_text()))
    return found - {""}


def known(name: str) -> str:
    """The module of that dotted name, below clusterddp; empty if it is none."""
    name = name.removeprefix("clusterddp.")
    return name if name in MODULES else ""


def imports(everywhere: bool) -> dict[str, set[str]]:
    """Which module imports which."""
    return {name: imported(path, everywhere) - {name} for name, path in MODULES.items()}


def by_room(graph: Graph) -> dict[str, set[str]]:
    """The same between packages; each module of the top level counts as one, and so does an entry point, which nothing
    imports."""
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        room = name if name.endswith("__main__") else name.split(".")[0]
        rooms.setdefault(room, set()).update({other.split(".")[0] for other in others} - {room})
    return rooms


def layers(graph: Graph) -> list[list[str]]:
    """The modules that import nothing, those that import only these, and so on. Fails at a circle, and names it."""
    found: list[list[str]] = []
    placed: set[str] = set()
    while left := graph.keys() - placed:
        layer = sorted(name for name in left if graph[name] <= placed)
        assert layer, f"a circle of imports among {sorted(left)}"
        found.append(layer)
        placed |= set(layer)
    return found


@pytest.mark.parametrize("everywhere", [True, False])
def test_no_imports_form_a_circle(everywhere: bool) -> None:
    """Neither between modules nor between packages, imports in functions and for the type checker included."""
    graph = imports(everywhere)
    layers(graph)
    layers(by_room(graph))


def test_the_state_of_a_process_is_one_object() -> None:
    """No other module rebinds a name of its own while it runs, except for the patch of torch's CUDA graphs."""
    trees = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
    found = {name for name, tree in trees.items() if any(isinstance(node, ast.Global) for node in ast.walk(tree))}
    assert found == {"worker.rank_process", "distributed.torch_patches"}


def test_the_python_api_is_below_the_command_line() -> None:
    """It uses the same functions, and none of the options and tables."""
    graph, used, seen = imports(everywhere=True), {"api"}, set[str]()
    while new := used - seen:
        seen |= new
        used |= {other for name in new for other in graph[name]}
    assert [name for name in sorted(seen) if name.startswith("cli.")] == []


def test_the_architecture_names_no_file_that_does_not_exist() -> None:
    """With its folder or, where that is clear, without."""
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|md|yaml))`", text):
        found = [*PACKAGE.rglob(name), *PACKAGE.parent.glob(name)]
        assert found or name in ("job.yaml", "clusterddp.yaml"), name


def without_torch() -> set[str]:
    """Login nodes, the supervisor, the rank's own entry and the writer, with everything that they load."""
    graph = imports(everywhere=False)
    found = {name for name in MODULES if name.split(".")[0] not in WITH_TORCH or name == WRITER}
    while more := {other for name in found for other in graph[name]} - found:
        found |= more
    return found


def test_only_packages_for_ranks_import_torch() -> None:
    """Named by file, which says more than the process that loads it in the end."""
    assert [name for name in sorted(without_torch()) if "torch" in top_level_packages(MODULES[name])] == []


def top_level_packages(path: Path) -> set[str]:
    """The packages that a file imports outside functions."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def test_no_process_without_torch_loads_it() -> None:
    """The same, seen: torch takes seconds to import, and more on a shared disk."""
    names = [f"clusterddp.{name}" for name in sorted(without_torch() - {"clusterddp"})]
    code = f"import sys, clusterddp, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_launch_is_a_function() -> None:
    """Nothing that a user imports sets ``clusterddp.launch`` to the folder of the same name."""
    code = (
        "import clusterddp, pickle, types, clusterddp.api, clusterddp.cli.command_line\n"
        "from clusterddp import launch\n"
        "assert isinstance(launch, types.FunctionType) and clusterddp.launch is launch\n"
        "assert pickle.loads(pickle.dumps(launch)) is launch\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
