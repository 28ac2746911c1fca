"""The job of each member of a sweep: which keys are those of the job definition, which are the script's arguments."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef import hydra_overrides, placeholders
from clusterddp.jobdef.hydra_overrides import with_overrides
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import variants
from clusterddp.jobdef.schema import INSTEAD_OF_KEY, READERS
from clusterddp.jobdef.secrets import is_secret
from clusterddp.jobdef.yaml12 import Mistake, raise_mistakes
from clusterddp.sweeps.members import Values

_ARGUMENT = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


def jobs_of(base: Job, members: Sequence[Values]) -> list[Job]:
    """The job of each member: ``base`` with its values. A JobDefinitionError lists all mistakes."""
    mistakes = [*_wrong_keys(members, bool(base.hydra)), *_wrong_arguments(members, bool(base.hydra))]
    raise_mistakes(mistakes)
    changes = [{key: node for key, node in values.items() if not argument_of(key)} for values in members]
    jobs = [
        replace(job, args=with_overrides(job.args, _overrides(values)) if job.hydra else (*job.args, *_words(values)))
        for job, values in zip(variants(base, changes), members, strict=True)
    ]
    _check_own_checkpoints(jobs)
    return jobs


def _check_own_checkpoints(jobs: Sequence[Job]) -> None:
    """Members whose scripts save to the same place would continue from each other's checkpoints."""
    patterns = [pattern for job in jobs if job.resume for pattern in job.resume.checkpoint]
    shared = [one for one in patterns if "run_dir" not in placeholders.used(one) and patterns.count(one) > 1]
    if shared:
        raise JobDefinitionError(
            f"resume.checkpoint: {shared[0]!r} is the same for several members, which would continue from each other's "
            "checkpoints: have the script save below {run_dir}, and begin the pattern with it"
        )


def argument_of(key: str) -> str | None:
    """The name of the script's argument that a key stands for; None for a key of the job definition."""
    if key.startswith("args."):
        return key.removeprefix("args.")
    return None if key.partition(".")[0] in READERS else key


def _words(values: Values) -> Iterator[str]:
    """The script's arguments: ``--lr 1e-3``; true stands for the option alone, false and null for none."""
    for key, node in values.items():
        name = argument_of(key)
        if name is None or node.value is None or node.value is False:
            continue
        option = f"-{name}" if len(name) == 1 else f"--{name}"
        if node.value is True:
            yield option
        elif node.text.startswith("-"):  # argparse would take -x for an option
            yield f"{option}={node.text}"
        else:
            yield option
            yield node.text


def _overrides(values: Values) -> Iterator[str]:
    """The same for a Hydra app: ``model.lr=1e-3``."""
    for key, node in values.items():
        if name := argument_of(key):
            yield f"{name}={hydra_overrides.value(node)}"


def _wrong_keys(members: Sequence[Values], hydra: bool) -> Iterator[Mistake]:
    first = {key: node for values in reversed(members) for key, node in values.items()}
    for key, node in first.items():
        name, top = argument_of(key), key.partition(".")[0]
        if is_secret(key):
            yield Mistake(node.place, f"{key}: a secret cannot be swept: its values would be in names of folders")
        elif key == "args":
            yield Mistake(node.place, "args: expected args.NAME, for the script's argument --NAME")
        elif name is not None and not (hydra_overrides.KEY if hydra else _ARGUMENT).fullmatch(name):
            yield Mistake(node.place, f"{key}: expected a key of the job definition or the name of an argument")
        elif name == key and (hint := _meant(top)):
            yield Mistake(node.place, f"{key} is no key of a job definition: {hint} (for --{key}, args.{key})")


def _meant(key: str) -> str | None:
    """What a key that looks like one of the job definition was meant to be."""
    if instead := INSTEAD_OF_KEY.get(key.replace("-", "_")):
        return instead
    candidates = READERS.keys() - {"script", "module"}  # --model is an argument of many scripts
    near = difflib.get_close_matches(key, sorted(candidates), 1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else None


def _wrong_arguments(members: Sequence[Values], hydra: bool) -> Iterator[Mistake]:
    for values in members:
        for key, node in values.items():
            if argument_of(key) and ((isinstance(node.value, (list, dict)) and not hydra) or "\0" in node.text):
                yield Mistake(node.place, f"{key}: expected a single value for the script's argument")
            elif argument_of(key) and (why := placeholders.wrong(node.text)):
                yield Mistake(node.place, f"{key}: {why}")
