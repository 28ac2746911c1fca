"""``clusterddp config``: shows the resolved job, checks files, and prints the JSON Schema of job definitions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from clusterddp.cli.options import add_job_arguments, with_hydra
from clusterddp.cli.settings.resolved import show_job
from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.jobdef import presets, profiles
from clusterddp.jobdef.load import file_fields, load
from clusterddp.jobdef.values import did_you_mean
from clusterddp.reporter import counted, put
from clusterddp.sweeps import definition
from clusterddp.sweeps.jobs import jobs_of
from clusterddp.sweeps.members import named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of ``config``, each with its own options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help="what to do")
    text = "print the job that submit would start, with profiles, options and defaults; secrets are masked"
    resolved = actions.add_parser("show", help=text, description=f"{text[0].upper()}{text[1:]}.")
    resolved.add_argument(
        "target", nargs="?", metavar="SCRIPT.py | JOB.yaml",
        help="as for submit; default: ./clusterddp.yaml, else the bundled digits example",
    )  # fmt: skip
    resolved.add_argument("--origin", action="store_true", help="add where each value comes from, as a comment")
    resolved.add_argument("--json", action="store_true", help="print values and origins as JSON")
    add_job_arguments(resolved)
    text = "check job definitions, sweeps and profiles; print a line for each valid file and for each mistake"
    checked = actions.add_parser("validate", help=text, description=f"{text[0].upper()}{text[1:]}.")
    checked.add_argument("files", nargs="+", metavar="FILE", help="a job definition, a sweep or a profile")
    text = "list the presets for training repositories; with a NAME, print one"
    listed = actions.add_parser("presets", help=text, description=f"{text[0].upper()}{text[1:]}.")
    listed.add_argument("name", nargs="?", metavar="NAME", help="print this preset, a piece of a job definition")
    text = "print the JSON Schema of job definitions, for editors"
    actions.add_parser("schema", help=text, description=f"{text[0].upper()}{text[1:]}.")


def run(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Carries out one action of ``config``; returns the exit code."""
    if arguments.action == "show":
        return show_job(arguments, script_arguments)
    if arguments.action == "validate":
        return validate(arguments.files)
    if arguments.action == "presets":
        return show_presets(arguments.name)
    from clusterddp.jobdef.json_schema import job_schema

    print(json.dumps(job_schema(), indent=2))
    return 0


def show_presets(name: str | None) -> int:
    """Prints a line for each preset, or the file of one; returns the exit code."""
    names = presets.names()
    if name is None:
        width = max(map(len, names))
        put("\n".join(f"{one:<{width}}  {presets.purpose(one)}" for one in names))
        return 0
    if name not in names:
        raise UsageError(f"no preset {name!r}{did_you_mean(name, names)}; presets: {', '.join(names)}")
    put(presets.text_of(name).rstrip("\n"))
    return 0


def validate(files: Sequence[str]) -> int:
    """Prints a line for each valid file and for each mistake; returns the exit code."""
    code = 0
    for name in files:
        try:
            put(f"{name}: valid {_check(Path(name))}")
        except ClusterddpError as error:
            put(str(error))
            code = UsageError.exit_code
    return code


def _check(path: Path) -> str:
    """What kind of file it is. Raises what is wrong with it, regardless of the profiles that apply here."""
    keys = file_fields(path, []).keys()
    if keys & {*profiles.SECTIONS}:
        profiles.check_profile(path)
        return "profile"
    if keys & {*definition.KEYS}:
        sweep = definition.read_definition(path)
        job = with_hydra(load(sweep.job or path, section=None if sweep.job else "job"))
        return f"sweep of {counted(len(jobs_of(job, list(named(sweep.members).values()))), 'member')}"
    load(path)
    return "job definition"
