"""What the source of a training program says; nothing is executed or imported."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterddp.errors import UsageError


def calls_method(file: Path, folder: Path, name: str) -> bool:
    """Whether a program calls a method ``name``, in ``file`` or in a module below ``folder`` that it imports."""
    waiting, seen = [file], set[Path]()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        tree = _parse(source)
        nodes = list(ast.walk(tree))
        if any(isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == name for n in nodes):
            return True
        waiting += _imported(nodes, source, folder)
    return False


def is_hydra_app(file: Path) -> bool:
    """Whether a program's own file has a function that ``hydra.main`` decorates; False if it cannot be read."""
    try:
        nodes = list(ast.walk(_parse(file)))
    except (UsageError, OSError, ValueError):
        return False
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {f"{alias.asname or alias.name}.main" for alias in node.names if alias.name == "hydra"}
        elif isinstance(node, ast.ImportFrom) and node.module == "hydra":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "main"}
    functions = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    decorators = (decorator for function in functions for decorator in function.decorator_list)
    return any(ast.unparse(one.func if isinstance(one, ast.Call) else one) in names for one in decorators)


def module_file(name: str, folder: Path) -> Path | None:
    """The file that ``python -m name`` runs, if it is below ``folder``; else None."""
    base = folder.joinpath(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__main__.py") if file.is_file()), None)


def name_of(function: Callable[..., Any]) -> str:
    """The job name for a function, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"[^\w.+=@-]+", "", name).lstrip(".-") or "function"


def source_of(function: Callable[..., Any]) -> Path | None:
    """The file that defines a function, or the class of a callable object; None for one that was typed in."""
    while isinstance(function, functools.partial):
        function = function.func
    with suppress(TypeError, OSError):
        path = Path(inspect.getsourcefile(function if inspect.isroutine(function) else type(function)) or "")
        return path.absolute() if path.is_file() else None
    return None


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise UsageError(f"{file}:{error.lineno}: {error.msg}") from error


def _imported(nodes: list[ast.AST], source: Path, folder: Path) -> Iterator[Path]:
    """The files below ``folder`` that the nodes of ``source`` may import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            bases = [folder.joinpath(*alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = source.parents[node.level - 1] if node.level else folder
            package = start.joinpath(*(node.module or "").split("."))
            bases = [package, *(package / alias.name for alias in node.names)]
        else:
            continue
        files = (file for base in bases for file in (base.with_name(base.name + ".py"), base / "__init__.py"))
        yield from (file for file in files if file.is_file())
