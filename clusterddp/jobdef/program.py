"""The training program: what its source says, placeholders in its arguments, and the overrides of a Hydra app.

This module neither runs nor imports the program, and does not import Hydra, which login nodes may lack. Placeholders
such as ``{run_dir}`` are filled in by each attempt. Only the known names are replaced, which keeps JSON,
``${...}`` of OmegaConf and templates such as ``{epoch}``. ``{{run_dir}}`` is the literal text ``{run_dir}``.
"""

from __future__ import annotations

import ast
import difflib
import functools
import glob
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.keys.node import Node

#: The value of each name.
PLACEHOLDERS: Mapping[str, str] = {
    "checkpoint": "the script's own checkpoint that the attempt continues from. It is empty without one",
    "checkpoint_number": "the last number in that checkpoint's name, before the first dot. It is empty without one",
    "run_dir": "the run directory",
    "attempt": "the attempt's number, from 0",
    "node_rank": "the node's number, from 0",
    "local_rank": "the rank's number on its node, from 0",
    "nodes": "the number of nodes",
    "master_addr": "the host of rank 0",
    "master_port": "a free port on that host",
}
#: The names whose values only the ranks know.
OF_RANK = frozenset(("node_rank", "local_rank", "master_addr", "master_port"))
#: ``{name}``, or ``{{name}}`` for the literal text, but not ``${name}``.
_PLACEHOLDER = re.compile(r"(?<![${])(?:\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\})", re.ASCII)
#: A brace before a name, with the end of a path's part where the other brace should be.
_OPEN = re.compile(r"(?<![${])\{([A-Za-z_]\w*)(?=/|\Z)", re.ASCII)


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with these names replaced."""

    def replaced(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return match[0][1:-1] if _near_placeholder(literal) else match[0]
        return values.get(name, match[0])

    return _PLACEHOLDER.sub(replaced, text)


def expand_variables(text: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text with the values of ``$NAME`` and ``${NAME}``, and the names of variables that are not set."""
    missing = []

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environ:
            missing.append(name)
        return environ.get(name, "")

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text), missing


def checkpoint_values(path: str) -> dict[str, str]:
    """The placeholders of a checkpoint. ``path`` is empty without one."""
    numbers = re.findall(r"\d+", Path(path).name.partition(".")[0])
    return {"checkpoint": path, "checkpoint_number": numbers[-1] if numbers else ""}


def fill_pattern(pattern: str, run_dir: str) -> str:
    """A glob pattern with ``{run_dir}`` replaced, in which ``*`` and ``[`` stand for themselves."""
    return fill(pattern, {"run_dir": glob.escape(run_dir)})


def shown_path(path: str, run_dir: str) -> str:
    """A path or pattern in a message: relative to the run directory if it is inside, else absolute."""
    filled = Path(os.path.normpath(Path.cwd() / fill(path, {"run_dir": run_dir})))
    return str(filled.relative_to(run_dir)) if filled.is_relative_to(run_dir) else str(filled)


def placeholders_in(text: str) -> set[str]:
    """The names that the text uses."""
    return {match[2] for match in _PLACEHOLDER.finditer(text) if match[2] in PLACEHOLDERS}


def wrong_placeholder(text: str, allowed: Collection[str] = PLACEHOLDERS, *, only: bool = False) -> str | None:
    """The mistake in the placeholders of a text: a known name that is not ``allowed``, or a misspelt one, or
    one without its closing brace.

    ``only``: braces around any other name are a mistake, too.
    """
    for match in _PLACEHOLDER.finditer(text):
        name = match[2]
        if name is None or name in allowed:
            continue
        near = _near_placeholder(name)
        if near or only:
            expected = f"Expected {' or '.join(f'{{{known}}}' for known in allowed)}"
            if near is None:
                return f"unknown placeholder {{{name}}}. {expected}. Write * for the parts that vary"
            hint = f"Did you mean {{{near}}}?" if near in allowed and near != name else f"{expected}."
            literal = f"For the literal text, write {{{{{name}}}}}"
            varying = ". Write * for the parts that vary" if only else ""
            return f"unknown placeholder {{{name}}}. {hint} {literal}{varying}"
    unclosed = next((match[0] for match in _OPEN.finditer(text) if match[1] in PLACEHOLDERS), None)
    return f"{unclosed!r} has no '}}'" if unclosed else None


def _near_placeholder(name: str) -> str | None:
    """The known name that is meant by this one."""
    return next(iter(difflib.get_close_matches(name.lower(), PLACEHOLDERS, 1, 0.8)), None)


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
    """Whether a program's own file has a function that ``hydra.main`` decorates. False if it cannot be read."""
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
    """The file that ``python -m name`` runs, if it is below ``folder``, else None."""
    base = folder.joinpath(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__main__.py") if file.is_file()), None)


def name_of(function: Callable[..., Any]) -> str:
    """The job name for a function, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"[^\w.+=@-]+", "", name).lstrip(".-") or "function"


def source_of(function: Callable[..., Any]) -> Path | None:
    """The file that defines a function, or the class of a callable object. None for one that was typed in."""
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


#: The left side of an override: ``model.lr``, ``+experiment``, ``db@source``, ``hydra/job_logging``.
HYDRA_KEY = re.compile(r"\+{0,2}[A-Za-z_$][\w$-]*([./@:][\w$-]+)*", re.ASCII)
#: Text that Hydra reads as itself without quotes, unless it is one of the words below.
_HYDRA_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
_HYDRA_WORDS = ("null", "true", "false", "inf", "nan")
#: Numbers that YAML and Hydra read alike. Other numbers are written as in Python.
_HYDRA_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
#: The callback that clusterddp adds, in ``clusterddp/integrations/hydra.py``.
HYDRA_CALLBACK = "clusterddp.integrations.hydra.RunCallback"


def hydra_value(node: Node) -> str:
    """A value of a job definition or a sweep as Hydra writes it. What was text stays text."""
    if isinstance(node.value, list):
        return f"[{','.join(map(hydra_value, node.value))}]"
    if isinstance(node.value, dict):
        return f"{{{','.join(f'{_dict_key(str(key))}:{hydra_value(item)}' for key, item in node.value.items())}}}"
    if node.value is None:
        return "null"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    if isinstance(node.value, (int, float)):
        return node.text if _HYDRA_NUMBER.fullmatch(node.text) else repr(node.value)
    return hydra_text(str(node.value))


def hydra_text(content: str) -> str:
    """A string, in quotes unless Hydra reads it as this string without them."""
    if _HYDRA_PLAIN.fullmatch(content) and content.lower() not in _HYDRA_WORDS:
        return content
    # A backslash is literal, except before a quote and at the end, where it must be doubled.
    inner = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), content)
    return f"'{inner}'"


def _dict_key(key: str) -> str:
    """A key of a mapping. Hydra takes no quotes there, and backslashes before its special characters."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", key)


def with_overrides(arguments: Sequence[str], overrides: Iterable[str]) -> tuple[str, ...]:
    """A script's arguments with more overrides, which win over the same keys.

    They follow the user's own overrides directly, because argparse, which Hydra uses, refuses overrides on both sides
    of an option such as ``--config-name``.
    """
    last = next((at for at in reversed(range(len(arguments))) if _is_override(arguments[at])), len(arguments) - 1)
    return (*arguments[: last + 1], *overrides, *arguments[last + 1 :])


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def hydra_arguments(arguments: Sequence[str], output: Path) -> list[str]:
    """A rank's arguments: those of the job, ``output`` as the folder of all attempts, and clusterddp's callback.

    The user's own ``hydra.run.dir`` among the arguments wins.
    """
    added = [f"++hydra.callbacks.clusterddp._target_={HYDRA_CALLBACK}"]
    if not any(re.match(r"\+{0,2}hydra\.run\.dir=", argument) for argument in arguments):
        added.append(f"hydra.run.dir={hydra_text(str(output))}")
    return list(with_overrides(arguments, added))
