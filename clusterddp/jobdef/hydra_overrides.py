"""The command line of a Hydra app: values in Hydra's override grammar, and the overrides that a run adds to the user's.

Nothing here imports Hydra: login nodes and supervisors need not have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from clusterddp.jobdef.yaml12 import Node

#: The left side of an override: ``model.lr``, ``+experiment``, ``db@source``, ``hydra/job_logging``.
KEY = re.compile(r"\+{0,2}[A-Za-z_$][\w$-]*([./@:][\w$-]+)*", re.ASCII)
#: Text that Hydra reads as itself without quotes, unless it is one of the words below.
_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
_WORDS = ("null", "true", "false", "inf", "nan")
#: Numbers that YAML and Hydra read alike; any other number is written as Python does.
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
#: The callback that clusterddp adds, in ``clusterddp/integrations/hydra.py``.
CALLBACK = "clusterddp.integrations.hydra.RunCallback"


def value(node: Node) -> str:
    """A value of a job definition or a sweep as Hydra writes it; what was text stays text."""
    if isinstance(node.value, list):
        return f"[{','.join(map(value, node.value))}]"
    if isinstance(node.value, dict):
        return f"{{{','.join(f'{_dict_key(str(key))}:{value(item)}' for key, item in node.value.items())}}}"
    if node.value is None:
        return "null"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    if isinstance(node.value, (int, float)):
        return node.text if _NUMBER.fullmatch(node.text) else repr(node.value)
    return text(str(node.value))


def text(content: str) -> str:
    """A string, in quotes unless Hydra reads it as this string without them."""
    if _PLAIN.fullmatch(content) and content.lower() not in _WORDS:
        return content
    # A backslash is one, except before a quote and at the end, where it has to be doubled.
    inner = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), content)
    return f"'{inner}'"


def _dict_key(key: str) -> str:
    """A key of a mapping. Hydra takes no quotes there, and backslashes before its special characters."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", key)


def with_overrides(arguments: Sequence[str], overrides: Iterable[str]) -> tuple[str, ...]:
    """A script's arguments with more overrides, which win over the same keys.

    They follow the user's own overrides at once: argparse, which Hydra uses, refuses overrides on both sides of an
    option such as ``--config-name``.
    """
    last = next((at for at in reversed(range(len(arguments))) if _is_override(arguments[at])), len(arguments) - 1)
    return (*arguments[: last + 1], *overrides, *arguments[last + 1 :])


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def of_run(arguments: Sequence[str], run: Path) -> list[str]:
    """A rank's arguments: those of the job, one output folder for all ranks and attempts, and clusterddp's callback.

    The user's own ``hydra.run.dir`` among the arguments wins.
    """
    added = [f"++hydra.callbacks.clusterddp._target_={CALLBACK}"]
    if not any(re.match(r"\+{0,2}hydra\.run\.dir=", argument) for argument in arguments):
        added.append(f"hydra.run.dir={text(str(output_folder(run)))}")
    return list(with_overrides(arguments, added))


def output_folder(run: Path) -> Path:
    """Hydra's output folder of a run: its configuration, its log, and what the app writes there."""
    return run / "hydra"
