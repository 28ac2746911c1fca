"""Reads a job definition from YAML and the command line into a ``Job``.

A value comes from, last wins: the user's defaults, the file, the command line's own options, ``--set key.path=value``.
A null takes a field back to its built-in default. Every mistake in all of them is reported in one error.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import clusterddp
from clusterddp.errors import JobDefinitionError, RunDirectoryError
from clusterddp.jobdef import yaml12
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.schema import READERS, Fields, check_keys, read_fields
from clusterddp.jobdef.secrets import MASK, is_secret, revealed
from clusterddp.jobdef.values import quoted
from clusterddp.jobdef.yaml12 import Key, Mistake, Node, Place, node_of, raise_mistakes
from clusterddp.rundir.records import retrying

#: The format of run directories that this version records. A later one is to name its own as ``format`` in job.yaml.
RUN_FORMAT = 1
#: What makes a job this job has no default for all of a user's jobs.
_OF_ONE_JOB = {"job_name", "script", "module", "args", "args_on_resume", "steps"}


def load(
    path: str | os.PathLike[str],
    overrides: Mapping[str, str] | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    defaults: Fields | None = None,
) -> Job:
    """Reads the job definition in the file ``path``; raises one JobDefinitionError for all mistakes.

    ``defaults`` (``user_defaults``) lie below the file; ``values``, the command line's own options by YAML key, above
    it; ``overrides`` of ``--set``, by dotted key, on top, each read as a YAML scalar.
    """
    mistakes: list[Mistake] = []
    fields = _supported(_file_fields(Path(path), mistakes), Path(path))
    layers = [defaults or {}, fields, _fields(node_of(values or {}, "command line"), mistakes)]
    return revealed(_job(layers, overrides or {}, Path(path).parent, Place(str(path)), mistakes), Path(path))


def from_values(
    mapping: Mapping[str, Any],
    source: str = "command line",
    folder: str | os.PathLike[str] = ".",
    *,
    overrides: Mapping[str, str] | None = None,
    defaults: Fields | None = None,
) -> Job:
    """Makes a job from Python values by YAML key; ``source`` names them in messages, ``folder`` is the script's.

    Text means what it would mean in YAML: ``{"gpus_per_node": "a100:4", "nodes": "2"}``. For the rest see ``load``.
    """
    mistakes: list[Mistake] = []
    layers = [defaults or {}, _fields(node_of(mapping, source), mistakes)]
    return _job(layers, overrides or {}, Path(folder), Place(source), mistakes)


def load_resolved(path: str | os.PathLike[str]) -> Job:
    """Reads what ``Job.to_yaml`` wrote, and the secrets that were left out of it, where this user may read them.

    The script need not be there any more, so that an old run can be looked at.
    """
    mistakes: list[Mistake] = []
    fields = _supported(_file_fields(Path(path), mistakes), Path(path))
    job = _job([fields], {}, Path(path).parent, Place(str(path)), mistakes, script_must_exist=False)
    return revealed(job, Path(path))


def user_defaults(cluster: str | None, path: str | os.PathLike[str] | None = None) -> Fields:
    """The user's own defaults for a cluster, for ``load``; empty when there is no such file.

    The file is ``$XDG_CONFIG_HOME/clusterddp/config.yaml`` (by default in ``~/.config``), of the form
    ``{defaults: {partition: gpu}, clusters: {NAME: {account: x}}}``; a cluster's own values win. Mistakes are reported
    for the whole file, whichever cluster is asked for.
    """
    config = Path(path) if path is not None else _user_file()
    if config is None:
        return {}
    mistakes: list[Mistake] = []
    top = _file_fields(config, mistakes)
    check_keys(top, ("defaults", "clusters"), mistakes)
    sections = [_fields(_get(top, "defaults"), mistakes)]
    clusters = _fields(_get(top, "clusters"), mistakes)
    by_cluster = {str(name): _fields(node, mistakes) for name, node in clusters.items()}
    for section in [*sections, *by_cluster.values()]:
        check_keys(section, [key for key in READERS if key not in _OF_ONE_JOB], mistakes)
        read_fields(section, READERS, mistakes)
    raise_mistakes(mistakes)
    return _merged([*sections, by_cluster.get(cluster or "", {})])


# --- from text to fields


def _user_file() -> Path | None:
    """None where there is no such file, or no home: HOME is another user's, or not set for an id without a name."""
    home = os.environ.get("XDG_CONFIG_HOME")
    try:
        path = (Path(home) if home else Path("~/.config").expanduser()) / "clusterddp" / "config.yaml"
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _file_fields(path: Path, mistakes: list[Mistake]) -> Fields:
    try:
        text = retrying(path, lambda: path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobDefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobDefinitionError(f"{path}: byte {error.start} is not UTF-8 text") from error
    root = yaml12.load(text, str(path), mistakes)
    fields = _fields(root, mistakes)
    if not isinstance(root.value, (dict, type(None))):
        raise_mistakes(mistakes)  # nothing was read: what else there is to say would only follow from that
    return fields


def _supported(fields: Fields, path: Path) -> Fields:
    """The fields without ``format``. Raises RunDirectoryError for one that only a newer version can read."""
    given = _get(fields, "format")
    if given is not None and given.value != RUN_FORMAT:
        raise RunDirectoryError(
            f"{path} has run format {given.text}, and clusterddp {clusterddp.__version__} reads format {RUN_FORMAT}: "
            "a newer version recorded this run; upgrade clusterddp to continue it"
        )
    return {key: node for key, node in fields.items() if key != "format"}


def _fields(node: Node | None, mistakes: list[Mistake]) -> Fields:
    """A mapping's fields; none for a null, such as an empty file."""
    if node is None or node.value is None:
        return {}
    if isinstance(node.value, dict):
        return node.value
    mistakes.append(Mistake(node.place, f"expected 'key: value' lines, got {quoted(node)}"))
    return {}


def _get(fields: Fields, name: str) -> Node | None:
    return next((node for key, node in fields.items() if key == name), None)


def _merged(layers: Iterable[Fields]) -> Fields:
    """The layers in one, later ones on top; mappings such as ``checkpoint`` or ``env`` are merged key by key."""
    merged: Fields = {}
    for layer in layers:
        for key, node in layer.items():
            below = merged.pop(key, None)
            if below is not None and isinstance(below.value, dict) and isinstance(node.value, dict):
                node = dataclasses.replace(node, value=_merged([below.value, node.value]))
            merged[key] = node  # under the upper layer's key, which has that layer's place
    return merged


#: Fields that take a list or a mapping, which ``--set`` then reads as YAML: ``--set args=[--lr, 1e-3]``.
_COLLECTIONS = {
    *("args", "args_on_resume", "setup", "env", "sbatch", "srun", "checkpoint", "checkpoint.every", "checkpoint.keep"),
    *("timeouts", "watchdog", "limits"),
}


def _override(name: str, text: str) -> Fields:
    place = Place(f"--set {name}={MASK if any(map(is_secret, name.split('.'))) else text}")
    outer, *inner = name.split(".")
    if name in _COLLECTIONS and text.startswith(("[", "{")):
        place = Place(f"--set {name}")  # without what it holds: a secret may be in it
        node = yaml12.load(text, str(place))
    else:
        node = Node(yaml12.scalar(text), text, place)
    for key in reversed(inner):
        node = Node({Key(key, place): node}, "", place)
    return {Key(outer, place): node}


# --- from fields to a job


def _job(
    layers: list[Fields],
    overrides: Mapping[str, str],
    folder: Path,
    place: Place,
    mistakes: list[Mistake],
    script_must_exist: bool = True,
) -> Job:
    given = [*layers, *(_override(name, text) for name, text in overrides.items())]
    for layer in given:
        # Each by itself, so that a mistake is reported even where an upper layer hides it.
        check_keys(layer, READERS, mistakes)
        read_fields(layer, READERS, mistakes)
    fields = _merged(given)
    values = read_fields(fields, READERS, mistakes)
    _resolve_program(values, fields, folder, place, mistakes, script_must_exist)
    _check_device(values, fields, mistakes)
    if _check_gpus_per_rank(values, fields, mistakes):
        _check_global_batch(values, fields, mistakes)
    raise_mistakes(mistakes)
    return Job(**values)


def _resolve_program(
    values: dict[str, Any], fields: Fields, folder: Path, place: Place, mistakes: list[Mistake], must_exist: bool
) -> None:
    """Makes the script's path absolute and names the job after what it runs."""
    script, module = (_given_node(fields, name) for name in ("script", "module"))
    if script and module:
        mistakes.append(Mistake(module.place, "module: a job runs a script or a module, not both"))
    if not script and not module:
        mistakes.append(Mistake(place, "names neither a script nor a module: one of them is needed"))
    if script and "script" in values:
        given = values["script"]
        values["script"] = os.path.normpath((folder / given).absolute())
        if must_exist and not _is_file(values["script"]):
            where = "" if Path(given).is_absolute() else f" in {folder.absolute()}"
            mistakes.append(Mistake(script.place, f"script {given!r} not found{where}{_nearest_file(given, folder)}"))
    program = Path(values.get("script", "")).stem or values.get("module", "").rpartition(".")[2]
    values.setdefault("name", re.sub(r"[^\w.+=@-]+", "-", program).lstrip(".-")[:50] or "job")


def _given_node(fields: Fields, name: str) -> Node | None:
    node = _get(fields, name)
    return node if node is not None and node.value is not None else None


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # such as a name that is too long
        return False


def _nearest_file(script: str, folder: Path) -> str:
    path = folder / script
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {str(Path(script).with_name(near[0]))!r}?" if near else ""


def _check_device(values: dict[str, Any], fields: Fields, mistakes: list[Mistake]) -> None:
    if values.get("device") != "cpu":
        return
    for name, wrong in (("backend", values.get("backend") == "nccl"), ("gpus_per_node", values.get("gpu_type"))):
        node = _get(fields, name)
        if wrong and node is not None:
            mistakes.append(Mistake(node.place, f"{name}: {node.text!r} needs a GPU, but device is cpu"))


def _check_gpus_per_rank(values: dict[str, Any], fields: Fields, mistakes: list[Mistake]) -> bool:
    """A node's GPUs are shared out to its ranks without a rest; whether they are."""
    gpus, each = values.get("gpus_per_node", 1), values.get("gpus_per_rank", 1)
    node = _given_node(fields, "gpus_per_node") or _given_node(fields, "gpus_per_rank")
    if node is None or gpus % each == 0:
        return True
    choices = [str(number) for number in (gpus // each * each, (gpus // each + 1) * each) if number]
    wrong = f"--gpus {gpus} with gpus_per_rank {each}: ranks of {each} GPUs each cannot share {gpus} on a node"
    mistakes.append(Mistake(node.place, f"{wrong}; choose --gpus {' or '.join(choices)}"))
    return False


def _check_global_batch(values: dict[str, Any], fields: Fields, mistakes: list[Mistake]) -> None:
    """The global batch stays the same on every number of nodes, so each of them must be able to share it evenly."""
    most, batch = values.get("nodes", 1), values.get("global_batch")
    per_node = values.get("gpus_per_node", 1) // values.get("gpus_per_rank", 1)
    ranks = {nodes: nodes * per_node for nodes in range(values.get("min_nodes") or most, most + 1)}
    unit = math.lcm(*ranks.values())
    nodes_node, batch_node = _get(fields, "nodes"), _given_node(fields, "global_batch")
    if nodes_node is not None and len(ranks) > 1 and batch_node is None:
        wrong = f"{nodes_node.text} needs a global_batch too, the samples per step over all ranks: a multiple of {unit}"
        mistakes.append(Mistake(nodes_node.place, f"nodes: {wrong}, or less with fewer numbers of nodes"))
    elif batch_node is not None and batch is not None and batch % unit:
        uneven = ", ".join(f"{ranks[nodes]} ({nodes} x {per_node})" for nodes in ranks if batch % ranks[nodes])
        nearest = [str(size) for size in (batch // unit * unit, (batch // unit + 1) * unit) if size]
        choices = [*nearest, *(f"nodes: {nodes}" for nodes in ranks if batch % ranks[nodes] == 0)]
        wrong = f"{batch} samples cannot be shared evenly by {uneven} ranks; choose {' or '.join(choices)}"
        mistakes.append(Mistake(batch_node.place, f"global_batch: {wrong}"))
