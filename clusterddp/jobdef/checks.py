"""What must hold for several keys of a job definition together: device, placeholders, ranks and the global batch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from clusterddp.jobdef import program
from clusterddp.jobdef.job import KEYS, Job
from clusterddp.jobdef.kinds import Placeholders
from clusterddp.jobdef.slurm_kinds import time_text
from clusterddp.jobdef.yaml12 import get
from clusterddp.keys.node import Fields, Mistake, Node, PresetSource
from clusterddp.keys.table import Entry, Section
from clusterddp.reporter import counted


def check_together(job: Job, fields: Fields, mistakes: list[Mistake]) -> None:
    """Appends the mistakes. ``fields``: as given, of which the job was made."""
    _check_device(job, fields, mistakes)
    _check_time_min(job, fields, mistakes)
    _check_placeholders(job, fields, mistakes)
    if _check_gpus_per_rank(job, fields, mistakes):
        _check_global_batch(job, fields, mistakes)


def given_node(fields: Fields, name: str) -> Node | None:
    """The node of a key. None for a null, too."""
    node = get(fields, name)
    return node if node is not None and node.value is not None else None


def _check_device(job: Job, fields: Fields, mistakes: list[Mistake]) -> None:
    for name, needs_gpus in (("backend", job.backend == "nccl"), ("gpus_per_node", job.gpu_type is not None)):
        node = get(fields, name)
        if job.device == "cpu" and needs_gpus and node is not None:
            mistakes.append(Mistake(node.place, f"{name}: {node.text!r} needs GPUs, but device is cpu"))


def _check_time_min(job: Job, fields: Fields, mistakes: list[Mistake]) -> None:
    node = get(fields, "time_min")
    if node is not None and job.time_s is not None and (job.time_min_s or 0) > job.time_s:
        longest = f"expected at most the job's time, {time_text(job.time_s)}"
        mistakes.append(Mistake(node.place, f"time_min: {longest}, got {node.quoted}"))


def _check_placeholders(job: Job, fields: Fields, mistakes: list[Mistake]) -> None:
    """``resume`` names a checkpoint. The placeholders of all keys are known, and have a value there."""
    resume = given_node(fields, "resume")
    inner = resume.value if resume is not None and isinstance(resume.value, dict) else {}
    patterns = job.resume.checkpoint if job.resume else ()
    known = any(mistake.key == "resume" or mistake.key.startswith("resume.") for mistake in mistakes)
    if resume is not None and inner is resume.value and not patterns and not known:
        mistakes.append(Mistake(resume.place, "resume: expected checkpoint: PATTERN, or the name of a preset"))
    args, replace = given_node(inner, "args"), given_node(inner, "replace")
    if args and replace:
        wrong = "resume: expected args or replace, got both. The key replace replaces all arguments"
        if isinstance(args.place.source, PresetSource):
            wrong += f". To drop the args of the {args.place.source}, write args: null"
        mistakes.append(Mistake(replace.place, wrong))
    for name, marked, owner in _with_placeholders(KEYS, fields):
        for node in _texts(owner):
            wrong_text = _wrong_path(node.text, marked.only) if marked.only else program.wrong_placeholder(node.text)
            of_checkpoint = sorted(program.placeholders_in(node.text) & program.checkpoint_values("").keys())
            if of_checkpoint and not patterns and not marked.only:
                wrong_text = f"{{{of_checkpoint[0]}}} needs resume.checkpoint, the pattern of the script's checkpoints"
            if wrong_text:
                mistakes.append(Mistake(node.place, f"{name}: {wrong_text}"))


def _with_placeholders(
    table: Mapping[str, Entry], fields: Fields, prefix: str = ""
) -> Iterator[tuple[str, Placeholders, Node]]:
    """The given keys whose texts may contain placeholders, also those in sections."""
    for key, node in fields.items():
        if key not in table:
            continue
        entry = table[key]
        if isinstance(entry.kind, Section) and isinstance(node.value, dict):
            yield from _with_placeholders(entry.kind.table, node.value, f"{prefix}{key}.")
        elif marked := entry.mark(Placeholders):
            yield f"{prefix}{key}", marked, node


def _wrong_path(pattern: str, allowed: Sequence[str]) -> str | None:
    """Why a pattern of the script's files never matches."""
    if pattern.startswith("~"):
        return "'~' is not expanded. Write the full path"
    if variable := re.search(r"\$([A-Za-z_]\w*|\{[^}]*\}?)", pattern):
        return f"{variable[0]!r} is not expanded. Write the full path"
    if why := program.wrong_placeholder(pattern, allowed, only=True):
        return why
    if "[" in re.sub(r"\[!?\]?[^]]*\]", "", pattern):
        return f"{pattern!r} has a '[' without a closing ']'. Write [[] for a literal '['"
    return None


def _texts(node: Node | None) -> list[Node]:
    """The scalars of a key: of a list, of a mapping's values, or itself."""
    if node is None or node.value is None:
        return []
    if isinstance(node.value, dict):
        return list(node.value.values())
    return node.value if isinstance(node.value, list) else [node]


def _check_gpus_per_rank(job: Job, fields: Fields, mistakes: list[Mistake]) -> bool:
    """Whether the GPUs of a node can be divided evenly among its ranks."""
    gpus, each = job.gpus_per_node, job.gpus_per_rank
    node = given_node(fields, "gpus_per_node") or given_node(fields, "gpus_per_rank")
    if node is None or gpus % each == 0:
        return True
    choices = [str(number) for number in (gpus // each * each, (gpus // each + 1) * each) if number]
    wrong = f"gpus_per_node: {gpus} is not a multiple of gpus_per_rank, which is {each}"
    mistakes.append(Mistake(node.place, f"{wrong}. Choose {' or '.join(choices)}"))
    return False


def _check_global_batch(job: Job, fields: Fields, mistakes: list[Mistake]) -> None:
    """The global batch is the same on every number of nodes, and all of them must divide it evenly."""
    batch, per_node = job.global_batch, job.ranks_per_node
    ranks = {nodes: nodes * per_node for nodes in job.node_counts}
    unit = math.lcm(*ranks.values())
    nodes_node, batch_node = get(fields, "nodes"), given_node(fields, "global_batch")
    if nodes_node is not None and len(ranks) > 1 and batch_node is None:
        missing = (
            f"the range {nodes_node.text} requires global_batch, which is the number of samples per step over all ranks"
        )
        fitting = f"A multiple of {unit} fits every number of nodes. A smaller range allows other values"
        mistakes.append(Mistake(nodes_node.place, f"nodes: {missing}. {fitting}"))
    elif batch_node is not None and batch is not None and batch % unit:
        uneven = " or ".join(f"{ranks[nodes]} ({nodes} x {per_node})" for nodes in ranks if batch % ranks[nodes])
        nearest = [str(size) for size in (batch // unit * unit, (batch // unit + 1) * unit) if size]
        choices = [*nearest, *(f"nodes: {nodes}" for nodes in ranks if batch % ranks[nodes] == 0)]
        wrong = (
            f"{counted(batch, 'sample')} cannot be divided evenly among {uneven} ranks. Choose {' or '.join(choices)}"
        )
        mistakes.append(Mistake(batch_node.place, f"global_batch: {wrong}"))
