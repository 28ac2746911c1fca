"""Placeholders such as ``{run_dir}`` in a job definition, which each attempt fills in.

Only the known names are replaced, so that JSON, ``${...}`` of OmegaConf and templates such as ``{epoch}`` stay as they
are. ``{{run_dir}}`` is the literal text ``{run_dir}``.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

#: Each name with what stands in its place.
NAMES: Mapping[str, str] = {
    "checkpoint": "the script's own checkpoint that the attempt continues from; empty if there is none",
    "run_dir": "the run directory",
    "attempt": "the attempt's number, from 0",
    "node_rank": "the node's number, from 0",
    "nodes": "the number of nodes",
    "master_addr": "the host of rank 0",
    "master_port": "a free port on that host",
}
#: The names whose values only the ranks know.
OF_RANK = frozenset(("node_rank", "master_addr", "master_port"))
#: ``{name}``, or ``{{name}}`` for the text itself; not in ``${name}``.
_PLACEHOLDER = re.compile(r"(?<![${])(?:\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\})", re.ASCII)
#: A brace before a name, with the end of a path's part where the other brace should be.
_OPEN = re.compile(r"(?<![${])\{([A-Za-z_]\w*)(?=/|\Z)", re.ASCII)


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with these names replaced."""

    def replaced(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return match[0][1:-1] if _near(literal) else match[0]
        return values.get(name, match[0])

    return _PLACEHOLDER.sub(replaced, text)


def fill_pattern(pattern: str, run_dir: str) -> str:
    """A glob pattern with ``{run_dir}`` replaced, in which ``*`` and ``[`` stand for themselves."""
    return fill(pattern, {"run_dir": glob.escape(run_dir)})


def shown(path: str, run_dir: str) -> str:
    """A path or pattern in a message: relative to the run directory if it is inside, else absolute."""
    filled = Path(os.path.normpath(Path.cwd() / fill(path, {"run_dir": run_dir})))
    return str(filled.relative_to(run_dir)) if filled.is_relative_to(run_dir) else str(filled)


def used(text: str) -> set[str]:
    """The names that the text uses."""
    return {match[2] for match in _PLACEHOLDER.finditer(text) if match[2] in NAMES}


def wrong(text: str, allowed: Collection[str] = NAMES, *, only: bool = False) -> str | None:
    """What is wrong with the placeholders of a text: a known name that is not ``allowed``, or a misspelt one, or
    one without its closing brace.

    ``only``: braces around any other name are a mistake, too.
    """
    for match in _PLACEHOLDER.finditer(text):
        name = match[2]
        if name is None or name in allowed:
            continue
        near = _near(name)
        if near or only:
            expected = f"expected {' or '.join(f'{{{known}}}' for known in allowed)}"
            hint = f"did you mean {{{near}}}?" if near in allowed and near != name else expected
            literal = f"; for the text itself, write {{{{{name}}}}}" if near else ""
            varying = "; write * for the parts that vary" if only else ""
            return f"unknown placeholder {{{name}}}; {hint}{literal}{varying}"
    unclosed = next((match[0] for match in _OPEN.finditer(text) if match[1] in NAMES), None)
    return f"{unclosed!r} has no '}}'" if unclosed else None


def _near(name: str) -> str | None:
    """The known name that is meant by this one."""
    return next(iter(difflib.get_close_matches(name.lower(), NAMES, 1, 0.8)), None)
