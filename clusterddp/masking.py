"""Values that nobody else may see: which they are, where a run keeps them, and text without them.

A value is secret by its name: ``HF_TOKEN`` in ``env:``, ``--api-key`` among the arguments. It is not in ``job.yaml``,
the batch script or any command line, but in the run's ``private/secrets.json``; ``MASK`` stands in its place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.job import Job
from clusterddp.records import is_text, read_json

MASK = "***"

_ANYWHERE = {"secret", "password", "passwd", "passphrase"}
_LAST = {"token", "key", "apikey", "credential", "credentials", "pwd"}
#: What stands for where a secret is, and not for the secret.
_PLACES = {"file", "path", "dir", "id", "name"}
#: Shorter values are not looked for in text: they would be found everywhere.
_SHORTEST = 6


def is_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret: WANDB_API_KEY, --hf-token, db.password."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower())
    if words == ["pwd"]:  # the shell's name for the folder that it is in
        return False
    return bool(words) and words[-1] not in _PLACES and (words[-1] in _LAST or bool(_ANYWHERE & set(words)))


def without_secrets(job: Job) -> tuple[Job, dict[str, str]]:
    """The job as anyone may see it, and its secrets by place: ``env.HF_TOKEN``, ``args.3``."""
    secrets = {f"env.{name}": value for name, value in job.env.items() if is_secret(name) and value}
    shown: dict[str, tuple[str, ...]] = {}
    for field in ("args", "args_on_resume"):
        words = list(getattr(job, field))
        for index, masked in _masked_arguments(words).items():
            secrets[f"{field}.{index}"] = words[index]
            words[index] = masked
        shown[field] = tuple(words)
    env = {name: MASK if f"env.{name}" in secrets else value for name, value in job.env.items()}
    return dataclasses.replace(job, env=env, args=shown["args"], args_on_resume=shown["args_on_resume"]), secrets


def with_secrets(job: Job, secrets: Mapping[str, str]) -> Job:
    """The inverse; a secret that is not known stays masked."""

    known = {place: secrets[place] for place in masks(job) if is_text(secrets.get(place))}

    def words(field: str) -> tuple[str, ...]:
        return tuple(known.get(f"{field}.{index}", word) for index, word in enumerate(getattr(job, field)))

    env = {name: known.get(f"env.{name}", value) for name, value in job.env.items()}
    return dataclasses.replace(job, env=env, args=words("args"), args_on_resume=words("args_on_resume"))


def masks(job: Job) -> list[str]:
    """The places where a mask stands instead of a value."""
    names = [f"env.{name}" for name, value in job.env.items() if value == MASK and is_secret(name)]
    for field in ("args", "args_on_resume"):
        words = getattr(job, field)
        names += [f"{field}.{index}" for index, text in _masked_arguments(words).items() if words[index] == text]
    return names


def secrets_file(job_file: Path) -> Path:
    """Where the secrets of a recorded job are."""
    return job_file.parent / "private" / "secrets.json"


def revealed(job: Job, job_file: Path) -> Job:
    """The job with the secrets that are kept next to its file, where this user may read them."""
    if not masks(job):
        return job
    try:
        return with_secrets(job, read_json(secrets_file(job_file)) or {})
    except PermissionError:  # another member of the group, who looks on
        return job


def check_revealed(job: Job, job_file: Path) -> None:
    """Raises RunDirectoryError when a secret is missing."""
    if missing := masks(job):
        raise RunDirectoryError(
            f"{job_file} has {MASK} for {', '.join(missing)}, and {secrets_file(job_file)} does not have the values: "
            "give them again, with --change"
        )


def secret_values(job: Job, environ: Mapping[str, str]) -> list[str]:
    """The secrets that a run's processes know, the longest first."""
    named = [value for name, value in environ.items() if is_secret(name)]
    own = [value.rpartition("=")[2] for place, value in without_secrets(job)[1].items() if not place.startswith("env.")]
    own += [value for name, value in job.env.items() if is_secret(name)]
    return sorted({value for value in [*named, *own] if len(value) >= _SHORTEST}, key=len, reverse=True)


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text without these values."""
    for value in secrets:
        text = text.replace(value, MASK)
    return text


def _masked_arguments(words: Sequence[str]) -> dict[int, str]:
    """The arguments that hold a secret, by index, as they may be seen: ``--api-key=X``, ``--api-key X``, ``key=X``."""
    found: dict[int, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and value and is_secret(name) and re.fullmatch(r"[\w.+~/-]+", name):
            found[index] = f"{name}={MASK}"
        elif index and word and not word.startswith("-") and _is_secret_option(words[index - 1]):
            found[index] = MASK
    return found


def _is_secret_option(word: str) -> bool:
    return word.startswith("-") and "=" not in word and is_secret(word)
