"""Reads a job definition from YAML and the command line into a ``Job``.

Sources, the last wins: the configuration files, the file, the options of the command line, ``--set key.path=value``.
A null restores a key's built-in default. One error reports all mistakes in all sources.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from clusterddp.errors import JobDefinitionError, RunDirectoryError
from clusterddp.jobdef import yaml12
from clusterddp.jobdef.checks import check_together, given_node
from clusterddp.jobdef.configuration_files import with_site
from clusterddp.jobdef.job import KEYS, Job
from clusterddp.jobdef.masking import MASK, is_secret
from clusterddp.jobdef.presets import with_preset
from clusterddp.jobdef.secrets import revealed
from clusterddp.jobdef.slurm_kinds import INSTEAD_OF_KEY
from clusterddp.jobdef.yaml12 import fields_of, file_fields, get, merged, node_of
from clusterddp.keys.node import Fields, Key, Mistake, Node, OptionSource, Place, raise_mistakes
from clusterddp.keys.table import collections, read_fields
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
    script, module = (given_node(fields, name) for name in ("script", "module"))
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
    check_together(job, fields, mistakes)
    raise_mistakes(mistakes)
    return job


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
