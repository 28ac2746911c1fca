"""The secrets of a job: where they are in it, and where a run stores them.

They are stored in the run's ``private/secrets.json``. ``job.yaml``, the batch script and command lines contain ``MASK``
instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.masking import MASK, is_secret, known_secrets, masked_arguments
from clusterddp.rundir.records import read_json
from clusterddp.rundir.schemas import is_text


def without_secrets(job: Job) -> tuple[Job, dict[str, str]]:
    """The job with its secrets masked, and the secrets by place: ``env.HF_TOKEN``, ``args.3``."""
    secrets = {f"env.{name}": value for name, value in job.env.items() if is_secret(name) and value}
    shown: dict[str, tuple[str, ...]] = {}
    for place, given in _arguments(job).items():
        words = list(given)
        for index, masked in masked_arguments(words).items():
            secrets[f"{place}.{index}"] = words[index]
            words[index] = masked
        shown[place] = tuple(words)
    env = {name: MASK if f"env.{name}" in secrets else value for name, value in job.env.items()}
    return _with_arguments(dataclasses.replace(job, env=env), shown), secrets


def _arguments(job: Job) -> dict[str, tuple[str, ...]]:
    """All lists of arguments, by their place."""
    found = {"args": job.args}
    if job.resume is not None:
        found |= {"resume.args": job.resume.args, "resume.replace": job.resume.replace or ()}
    return found


def _with_arguments(job: Job, lists: Mapping[str, tuple[str, ...]]) -> Job:
    resume = job.resume and dataclasses.replace(
        job.resume,
        args=lists["resume.args"],
        replace=None if job.resume.replace is None else lists["resume.replace"],
    )
    return dataclasses.replace(job, args=lists["args"], resume=resume)


def with_secrets(job: Job, secrets: Mapping[str, str]) -> Job:
    """The inverse of ``without_secrets``. A value that is not among ``secrets`` stays masked."""
    known = {place: secrets[place] for place in masks(job) if is_text(secrets.get(place))}

    env = {name: known.get(f"env.{name}", value) for name, value in job.env.items()}
    lists = {
        place: tuple(known.get(f"{place}.{index}", word) for index, word in enumerate(words))
        for place, words in _arguments(job).items()
    }
    return _with_arguments(dataclasses.replace(job, env=env), lists)


def masks(job: Job) -> list[str]:
    """The places of masked values."""
    names = [f"env.{name}" for name, value in job.env.items() if value == MASK and is_secret(name)]
    for place, words in _arguments(job).items():
        names += [f"{place}.{index}" for index, text in masked_arguments(words).items() if words[index] == text]
    return names


def secrets_file(job_file: Path) -> Path:
    """Where the secrets of a recorded job are stored."""
    return job_file.parent / "private" / "secrets.json"


def revealed(job: Job, job_file: Path) -> Job:
    """The job with its stored secrets, if this user may read them."""
    if not masks(job):
        return job
    try:
        return with_secrets(job, read_json(secrets_file(job_file)) or {})
    except PermissionError:  # another member of the group
        return job


def check_revealed(job: Job, job_file: Path) -> None:
    """Raises RunDirectoryError if a secret is missing."""
    if missing := masks(job):
        raise RunDirectoryError(
            f"the values of {', '.join(missing)} are masked in {job_file} and missing from {secrets_file(job_file)}. "
            "Submit again with the values and --change"
        )


def secret_values(job: Job, environ: Mapping[str, str]) -> list[str]:
    """The secrets that the processes of a run know, the longest first."""
    found = {*known_secrets(environ), *known_secrets(job.env, *_arguments(job).values())}
    return sorted(found, key=len, reverse=True)
