"""``clusterddp config show``: the job that ``submit`` would start, and where each of its values comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.cli.options import JOB_OPTIONS, PACKAGED_JOB, add_job_arguments, option_values, set_values
from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.jobdef import configuration_files, presets
from clusterddp.jobdef.configuration_paths import find_configuration_files
from clusterddp.jobdef.job import one_line, written
from clusterddp.jobdef.kinds import preset_names, site_names
from clusterddp.jobdef.load import Origins, load
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.jobdef.yaml12 import file_fields
from clusterddp.keys.kinds import did_you_mean
from clusterddp.reporter import counted, put, show
from clusterddp.runs.submission import describe, with_hydra
from clusterddp.runs.sweep_members import is_sweep, jobs_of, named, read_definition
from clusterddp.slurm.commands import named_cluster

#: The version of the JSON. It grows when a field is renamed or removed.
SCHEMA = 1
DEFAULT = "default"


def show_job(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Prints the resolved job and returns the exit code."""
    target = arguments.target or _default_target()
    places: Origins = {}
    job = describe(target, option_values(arguments, script_arguments), set_values(arguments), places, on=arguments.on)
    visible = without_secrets(job)[0]
    cluster, files = named_cluster(os.environ), find_configuration_files(os.environ, Path.cwd())
    show(f"cluster: {cluster or 'unknown'}")
    show(f"configuration files: {', '.join(map(str, files)) or 'none'}")
    origins = {key: _words(key, str(place)) for key, place in places.items()}
    if arguments.json:
        values = written(visible)
        of_all = {key: origins.get(key, DEFAULT) for key in _keys(values)}
        named = [{"owner": file.owner, "file": str(file.path)} for file in files]
        shown = {"cluster": cluster, "configuration_files": named, "job": values, "origins": of_all}
        print(json.dumps({"schema": SCHEMA, **shown}))
        return 0
    lines = list(_lines(written(visible), origins))
    width = min(48, max(len(line) for line, _ in lines))
    for line, origin in lines:
        print(f"{line:<{width}}  # {origin}" if origin and arguments.origin else line)
    return 0


def _default_target() -> str:
    if Path("clusterddp.yaml").exists():
        show("No script given. Showing ./clusterddp.yaml")
        return "clusterddp.yaml"
    show("No script given and no ./clusterddp.yaml. Showing the bundled digits example")
    return str(PACKAGED_JOB)


#: The option of ``submit`` for a key.
_OPTIONS = {key: next(flag for flag in one.flags if flag.startswith("--")) for key, one in JOB_OPTIONS.items()}


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
    """The values that are set, as lines of YAML, each with its origin."""
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, origins, f"{name}.")
        elif value not in (None, (), {}) or name in origins:
            yield f"{indent}{key}: {one_line(value)}", origins.get(name, DEFAULT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of ``config``, each with its own options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help="what to do")
    text = "print the job that submit would start, from configuration files, options and defaults, with secrets masked"
    resolved = actions.add_parser("show", help=text, description=f"{text[0].upper()}{text[1:]}.")
    resolved.add_argument(
        "target", nargs="?", metavar="SCRIPT.py | JOB.yaml",
        help="as for submit (default: ./clusterddp.yaml, else the bundled digits example)",
    )  # fmt: skip
    resolved.add_argument("--origin", action="store_true", help="add where each value comes from, as a comment")
    resolved.add_argument("--json", action="store_true", help="print values and origins as JSON")
    add_job_arguments(resolved)
    text = (
        "check job definitions, sweeps and configuration files, and print a line for each valid file and each mistake"
    )
    checked = actions.add_parser("validate", help=text, description=f"{text[0].upper()}{text[1:]}.")
    checked.add_argument("files", nargs="+", metavar="FILE", help="a job definition, a sweep or a configuration file")
    text = "list the presets for training repositories, or print the one that NAME names"
    listed = actions.add_parser("presets", help=text, description=f"{text[0].upper()}{text[1:]}.")
    listed.add_argument(
        "name", nargs="?", metavar="NAME", help="print this preset, which is a part of a job definition"
    )
    text = "list the profiles of sites, or print the one that NAME names"
    listed = actions.add_parser("sites", help=text, description=f"{text[0].upper()}{text[1:]}.")
    listed.add_argument("name", nargs="?", metavar="NAME", help="print this profile")
    text = "print the JSON Schema of job definitions, for editors"
    actions.add_parser("schema", help=text, description=f"{text[0].upper()}{text[1:]}.")


def run(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Runs one action of ``config`` and returns the exit code."""
    if arguments.action == "show":
        return show_job(arguments, script_arguments)
    if arguments.action == "validate":
        return validate(arguments.files)
    if arguments.action == "presets":
        return show_presets(arguments.name)
    if arguments.action == "sites":
        return show_sites(arguments.name)
    from clusterddp.jobdef.json_schema import job_schema

    print(json.dumps(job_schema(), indent=2))
    return 0


def show_presets(name: str | None) -> int:
    """Prints a line for each preset, or the file of one, and returns the exit code."""
    names = preset_names()
    if name is None:
        width = max(map(len, names))
        put("\n".join(f"{one:<{width}}  {presets.preset_purpose(one)}" for one in names))
        return 0
    if name not in names:
        raise UsageError(f"unknown preset {name!r}{did_you_mean(name, names) or '.'} Presets: {', '.join(names)}")
    put(presets.preset_text(name).rstrip("\n"))
    return 0


def show_sites(name: str | None) -> int:
    """Prints a line for each profile of a site, or one of them, and returns the exit code."""
    names = site_names()
    if name is None:
        width = max(map(len, names))
        for one in names:
            profile = configuration_files.site_profile(one)
            put(f"{one:<{width}}  {profile.about}. Source: {profile.source}, {profile.date}")
        show("The values come from these sites' documentation. clusterddp has not been tested there")
        return 0
    if name not in names:
        raise UsageError(f"unknown site {name!r}{did_you_mean(name, names) or '.'} Sites: {', '.join(names)}")
    text = configuration_files.site_profile(name).text.rstrip("\n")
    put(f"# From the site's documentation, and not tested there. Your own keys override these values.\n{text}")
    return 0


def validate(files: Sequence[str]) -> int:
    """Prints a line for each valid file and for each mistake, and returns the exit code."""
    code = 0
    for name in files:
        try:
            put(f"{name}: valid {_check(Path(name))}")
        except ClusterddpError as error:
            put(str(error))
            code = UsageError.exit_code
    return code


def _check(path: Path) -> str:
    """What kind of file it is. Raises its mistakes. The configuration files that apply here do not matter."""
    keys = file_fields(path, []).keys()
    if keys & {*configuration_files.SECTIONS}:
        configuration_files.check_configuration_file(path)
        return "configuration file"
    if is_sweep(path):
        sweep = read_definition(path)
        job = with_hydra(load(sweep.job, section=sweep.section))
        return f"sweep of {counted(len(jobs_of(job, list(named(sweep.members).values()))), 'member')}"
    load(path)
    return "job definition"
