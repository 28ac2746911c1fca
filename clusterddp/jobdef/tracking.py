"""What the trackers of a job are, and what they show of its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.trackers.registry import TRACKERS
from clusterddp.trackers.tracker import Tracked


def wanted(job: Job, run_name: str, environ: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """The trackers of a job by key, and how their runs are made."""
    run = Tracked(run_name, job.name, config(without_secrets(job)[0]))
    found = {key: TRACKERS[key].options(given, run, environ) for key, given in job.trackers.items()}
    return {key: options for key, options in found.items() if options is not None}


def check_packages(job: Job) -> None:
    """Raises UsageError if this interpreter lacks the packages of trackers that the job has."""
    if missing := [key for key in job.trackers if not _installed(key)]:
        named = ", ".join(f"{key}: the package {key!r} is not installed" for key in missing)
        unless = " and ".join(f"{key}=false" for key in missing)
        raise UsageError(f"{named}. Run `pip install {' '.join(missing)}`, or set {unless}")


def _installed(package: str) -> bool:
    """Whether a package is installed. A folder such as ``./wandb``, which wandb writes, is not one."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def config(job: Job) -> dict[str, Any]:
    """The fields by which trackers can filter runs: the script's options, and the job's facts."""
    facts = {"seed": job.seed, "world_size": job.world_size, "global_batch": job.global_batch}
    return {name: value for name, value in facts.items() if value is not None} | options_in(job.args)


def options_in(words: Sequence[str]) -> dict[str, Any]:
    """The long options among a script's arguments: ``--lr 1e-3``, ``--lr=1e-3``, ``--amp``."""
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, assigned, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        found[name] = _value(value) if assigned else True if _is_option(following) else _value(following)
    return found


def _is_option(word: str) -> bool:
    """Whether argparse would read a word as an option: a negative number and a single dash are values."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and word != "-"
    return False


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
