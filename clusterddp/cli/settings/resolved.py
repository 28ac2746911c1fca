"""``clusterddp config show``: the job that ``submit`` would start, and where each of its values comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.cli.options import JOB_OPTIONS, PACKAGED_JOB, describe, option_values, set_values
from clusterddp.jobdef.job import one_line, written
from clusterddp.jobdef.load import Origins
from clusterddp.jobdef.profiles import find_profiles
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.reporter import show
from clusterddp.slurm.commands import submission_cluster

#: The version of the JSON; it grows when a field is renamed or removed.
SCHEMA = 1
DEFAULT = "default"


def show_job(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Prints the resolved job; returns the exit code."""
    target = arguments.target or _default_target()
    places: Origins = {}
    job = describe(target, option_values(arguments, script_arguments), set_values(arguments), places)
    visible = without_secrets(job)[0]
    cluster, profiles = submission_cluster(os.environ), find_profiles(os.environ, Path.cwd())
    show(f"cluster: {cluster or 'unknown'}; profiles: {', '.join(map(str, profiles)) or 'none'}")
    origins = {key: _words(key, str(place)) for key, place in places.items()}
    if arguments.json:
        values = written(visible)
        files = [{"owner": profile.owner, "file": str(profile.path)} for profile in profiles]
        of_all = {key: origins.get(key, DEFAULT) for key in _keys(values)}
        print(json.dumps({"schema": SCHEMA, "cluster": cluster, "profiles": files, "job": values, "origins": of_all}))
        return 0
    lines = list(_lines(written(visible), origins))
    width = min(48, max(len(line) for line, _ in lines))
    for line, origin in lines:
        print(f"{line:<{width}}  # {origin}" if origin and arguments.origin else line)
    return 0


def _default_target() -> str:
    if Path("clusterddp.yaml").exists():
        show("no script given: showing ./clusterddp.yaml")
        return "clusterddp.yaml"
    show("no script given and no ./clusterddp.yaml: showing the bundled digits example")
    return str(PACKAGED_JOB)


#: The option of ``submit`` for a key.
_OPTIONS = {key: next(flag for flag in flags if flag.startswith("--")) for flags, key, *_ in JOB_OPTIONS}


def _words(key: str, place: str) -> str:
    """An origin in words: ``job.yaml:3:8``, ``option --nodes``, ``--set seed=1``."""
    if place != "command line":
        return place
    if key == "script":
        return "command line"
    return f"option {_OPTIONS[key]}" if key in _OPTIONS else "arguments after --"


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted key of each value."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _lines(values: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values as lines of YAML, each with its origin; without those that are not set anywhere."""
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, origins, f"{name}.")
        elif value not in (None, (), {}) or name in origins:
            yield f"{indent}{key}: {one_line(value)}", origins.get(name, DEFAULT)
