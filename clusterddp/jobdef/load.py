"""Reads a job definition from YAML and the command line into a ``Job``.

Sources, the last wins: the configuration files, the file, the options of the command line, ``--set key.path=value``.
A null restores a key's built-in default. One error reports all mistakes in all sources.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from clusterddp.errors import JobDefinitionError, RunDirectoryError
from clusterddp.jobdef import program, yaml12
from clusterddp.jobdef.configuration_files import with_preset, with_site
from clusterddp.jobdef.job import KEYS, Job, written
from clusterddp.jobdef.kinds import INSTEAD_OF_KEY, Placeholders, time_text
from clusterddp.jobdef.masking import MASK, is_secret
from clusterddp.jobdef.secrets import revealed, without_secrets
from clusterddp.jobdef.yaml12 import fields_of, file_fields, get, merged, node_of
from clusterddp.keys.node import Fields, Key, Mistake, Node, OptionSource, Place, PresetSource, raise_mistakes
from clusterddp.keys.table import Entry, Section, collections, read_fields
from clusterddp.reporter import counted
from clusterddp.rundir.files import open_binary
from clusterddp.trackers.registry import TRACKERS
from clusterddp.version import __version__

#: The format of run directories that this version writes. A later format is recorded as ``format`` in job.yaml.
RUN_FORMAT = 1
#: Where each given value was written, by dotted key: ``nodes``, ``checkpoint.keep``, ``env.HF_HOME``.
Origins = dict[str, Place]


def load(
    path: str | os.PathLike[str],
    overrides: Mapping[str, str] | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    defaults: Fields | None = None,
    origins: Origins | None = None,
    section: str | None = None,
    on: str | None = None,
) -> Job:
    """Reads the job definition in the file ``path``.

    Args:
        path: the YAML file. A relative ``script`` in it is relative to its folder.
        overrides: the values of ``--set`` by dotted key, read as YAML scalars. They override everything else.
        values: the options of the command line by YAML key. They override the file.
        defaults: what ``read_configuration_files`` returned. The file overrides it.
        origins: a dict that receives the place of each value that was given in any source.
        section: the key of the file that holds the definition. None: the whole file is one.
        on: the target whose values override those of ``defaults``.

    Raises one JobDefinitionError for all mistakes, RunDirectoryError for a run's format that this version cannot read.
    Example: ``load("jobs/digits.yaml", {"checkpoint.keep": "5"})``.
    """
    mistakes: list[Mistake] = []
    fields = _definition(Path(path), section, mistakes)
    given = fields_of(node_of(values or {}, "command line"), mistakes)
    sources = with_site([defaults or {}, fields, given, *_overrides(overrides)], on, mistakes)
    layers = with_preset(sources, mistakes)
    if origins is not None:
        origins |= _places(merged(layers))
    return revealed(_job(layers, Path(path).parent, Place(str(path)), mistakes), Path(path))


def _definition(path: Path, section: str | None, mistakes: list[Mistake]) -> Fields:
    """The fields of the definition in a file, or in a section of it."""
    fields = file_fields(path, mistakes)
    given = get(fields, "format")
    if given is not None and given.value != RUN_FORMAT:
        raise RunDirectoryError(
            f"{path} has run format {given.text}, but clusterddp {__version__} reads format {RUN_FORMAT}. A "
            "newer version recorded this run. To continue it, upgrade clusterddp"
        )
    fields = {key: node for key, node in fields.items() if key != "format"}
    return fields if section is None else fields_of(get(fields, section), mistakes)


def from_values(
    values: Mapping[str, Any],
    *,
    overrides: Mapping[str, str] | None = None,
    defaults: Fields | None = None,
    origins: Origins | None = None,
    on: str | None = None,
) -> Job:
    """Makes a job from Python values by YAML key, such as ``{"gpus_per_node": "a100:4", "nodes": "2"}``.

    Text is read as in YAML. A relative ``script`` is relative to the current folder. The other arguments and the errors
    are those of ``load``.
    """
    mistakes: list[Mistake] = []
    given = fields_of(node_of(values, "command line"), mistakes)
    sources = with_site([defaults or {}, given, *_overrides(overrides)], on, mistakes)
    layers = with_preset(sources, mistakes)
    if origins is not None:
        origins |= _places(merged(layers))
    return _job(layers, Path.cwd(), Place("command line"), mistakes)


def load_resolved(path: str | os.PathLike[str], section: str | None = None) -> Job:
    """Reads a recorded job.yaml, or a section of a record, and the run's secrets where this user may read them.

    The script may be missing, to allow looking at an old run.
    """
    file = Path(path)
    mistakes: list[Mistake] = []
    try:
        open_binary(file).close()  # a pipe, for example, is refused here
    except OSError as error:
        raise JobDefinitionError(f"could not read {path}: {error.strerror}") from error
    layers = with_preset([{}, _definition(file, section, mistakes)], mistakes)
    return revealed(_job(layers, file.parent, Place(str(path)), mistakes, recorded=True), file)


def variants(job: Job, changes: Sequence[Mapping[str, Node]]) -> list[Job]:
    """The job with other values, once for each mapping of dotted keys to nodes.

    Raises one JobDefinitionError for the mistakes in all of them.
    """
    mistakes: list[Mistake] = []
    base = fields_of(yaml12.load(job.to_yaml(), job.name), mistakes)
    found = []
    for change in changes:
        wrong: list[Mistake] = []
        layers = with_preset([base, *(_nested(key, node) for key, node in change.items())], wrong)
        with suppress(JobDefinitionError):
            found.append(_job(layers, Path.cwd(), Place(job.name), wrong, recorded=True))
        mistakes += wrong
    raise_mistakes(mistakes)
    return found


def _places(fields: Fields, prefix: str = "") -> Origins:
    places: Origins = {}
    for key, node in fields.items():
        places[f"{prefix}{key}"] = node.place
        if isinstance(node.value, dict):
            places |= _places(node.value, f"{prefix}{key}.")
    return places


@cache
def _collections() -> frozenset[str]:
    """Keys of lists and mappings, whose values in ``--set`` are read as YAML: ``--set args=[--lr, 1e-3]``."""
    return frozenset(collections(KEYS))


def _overrides(texts: Mapping[str, str] | None) -> list[Fields]:
    return [_override(name, text) for name, text in (texts or {}).items()]


def _override(name: str, text: str) -> Fields:
    place = Place(OptionSource(f"--set {name}={MASK if any(map(is_secret, name.split('.'))) else text}"))
    if name in _collections() and re.match(r"\[|\{(?!\w+\})", text):  # {run_dir}/out is text
        place = Place(OptionSource(f"--set {name}"))  # without the value, which may contain a secret
        node = yaml12.load(text, place.source)
    else:
        node = Node(yaml12.scalar(text), text, place)
    return _nested(name, node)


def _nested(name: str, node: Node) -> Fields:
    """The fields of a dotted key with this value."""
    outer, *inner = name.split(".")
    for key in reversed(inner):
        node = Node({Key(key, node.place): node}, "", node.place)
    return {Key(outer, node.place): node}


# --- from fields to a job


def _job(layers: list[Fields], folder: Path, place: Place, mistakes: list[Mistake], recorded: bool = False) -> Job:
    """The job of all layers. A relative script is relative to ``folder``, and that of a recorded run may be missing."""
    for layer in layers:  # each layer, to report its mistakes even if a later layer overrides them
        read_fields(layer, KEYS, mistakes, instead=INSTEAD_OF_KEY)
    fields = merged(layers)
    values = read_fields(fields, KEYS, [] if mistakes else mistakes, instead=INSTEAD_OF_KEY)
    script, module = (_given_node(fields, name) for name in ("script", "module"))
    if script and module:
        mistakes.append(Mistake(module.place, "module: expected either script or module, got both"))
    if not script and not module:
        mistakes.append(Mistake(place, "no program given. Add script: FILE.py or module: PACKAGE.MODULE"))
    if script and "script" in values:
        given, values["script"] = values["script"], os.path.normpath((folder / values["script"]).absolute())
        # Path.is_file() raises OSError for a name that is too long.
        if not recorded and not os.path.isfile(values["script"]):  # noqa: PTH113
            mistakes.append(Mistake(script.place, why_no_file("script", given, folder)))
    program = Path(values.get("script", "")).stem or values.get("module", "").rpartition(".")[2]
    values.setdefault("name", re.sub(r"[^\w.+=@-]+", "-", program).lstrip(".-")[:50] or "job")
    given = {key: values.pop(key, None) for key in TRACKERS}
    job = Job(**values, trackers={key: config for key, config in given.items() if config not in (None, False)})
    _check_device(job, fields, mistakes)
    _check_time_min(job, fields, mistakes)
    _check_placeholders(job, fields, mistakes)
    if _check_gpus_per_rank(job, fields, mistakes):
        _check_global_batch(job, fields, mistakes)
    raise_mistakes(mistakes)
    return job


def _given_node(fields: Fields, name: str) -> Node | None:
    node = get(fields, name)
    return node if node is not None and node.value is not None else None


def why_no_file(key: str, name: str, folder: Path) -> str:
    """The mistake in a key that names no file in the folder."""
    path, where = folder / name, "" if Path(name).is_absolute() else f" in {folder.absolute()}"
    try:
        if path.is_dir():
            return f"{key} {name!r} is a folder. Name a file"
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except (OSError, ValueError):
        names = []
    near = difflib.get_close_matches(path.name, names, 1)
    hint = f". Did you mean {str(Path(name).with_name(near[0]))!r}?" if near else ""
    return f"{key} {name!r} not found{where}{hint}"


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
    resume = _given_node(fields, "resume")
    inner = resume.value if resume is not None and isinstance(resume.value, dict) else {}
    patterns = job.resume.checkpoint if job.resume else ()
    known = any(mistake.message.startswith(("resume: ", "unknown key 'resume.")) for mistake in mistakes)
    if resume is not None and inner is resume.value and not patterns and not known:
        mistakes.append(Mistake(resume.place, "resume: expected checkpoint: PATTERN, or the name of a preset"))
    args, replace = _given_node(inner, "args"), _given_node(inner, "replace")
    if args and replace:
        of_preset = f". To drop the args of the {args.place.source}, write args: null" if _of_preset(args) else ""
        wrong = "resume: expected args or replace, got both. The key replace replaces all arguments"
        mistakes.append(Mistake(replace.place, wrong + of_preset))
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


def _of_preset(node: Node) -> bool:
    return isinstance(node.place.source, PresetSource)


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
    node = _given_node(fields, "gpus_per_node") or _given_node(fields, "gpus_per_rank")
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
    nodes_node, batch_node = get(fields, "nodes"), _given_node(fields, "global_batch")
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


def list_differences(recorded_job: Job, given_job: Job) -> list[str]:
    """One line per value that differs: ``nodes: 2 recorded, 4 given``."""
    recorded, given = _flat(written(recorded_job)), _flat(written(given_job))
    before, after = (_flat(written(without_secrets(job)[0])) for job in (recorded_job, given_job))
    lines = []
    for key in dict.fromkeys([*recorded, *given]):
        was, now = before.get(key), after.get(key)
        if isinstance(was, tuple) and isinstance(now, tuple) and key.startswith("args"):
            was, now = _where_they_differ(recorded[key], given[key], was, now)
        if recorded.get(key) != given.get(key):
            lines.append(f"{key}: {_shown(was)} recorded, {_shown(now)} given")
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _where_they_differ(
    recorded: tuple[str, ...], given: tuple[str, ...], before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments that only one of two command lines has, an option with its value.

    They are returned as in ``before`` and ``after``, where secrets are masked.
    """
    mine, theirs = _options(recorded), _options(given)
    matcher = difflib.SequenceMatcher(
        None, [recorded[part] for part in mine], [given[part] for part in theirs], autojunk=False
    )
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()
    for kind, low, high, other_low, other_high in matcher.get_opcodes():
        if kind != "equal":
            only_before += tuple(word for part in mine[low:high] for word in before[part])
            only_after += tuple(word for part in theirs[other_low:other_high] for word in after[part])
    return only_before, only_after


def _options(words: tuple[str, ...]) -> list[slice]:
    """The parts of a command line: each option with its value, and each other word."""
    parts: list[slice] = []
    start = 0
    while start < len(words):
        with_value = words[start].startswith("-") and "=" not in words[start] and start + 1 < len(words)
        end = start + (2 if with_value and not words[start + 1].startswith("--") else 1)
        parts.append(slice(start, end))
        start = end
    return parts


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    text = shlex.join(value) if isinstance(value, tuple) else str(value)
    return text if text and text.isprintable() else repr(text)
