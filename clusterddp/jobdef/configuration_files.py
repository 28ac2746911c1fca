"""What job definitions share: configuration files of the site, user and project, and presets for known repositories.

A configuration file has ``defaults:`` and ``clusters: {NAME: ...}``, whose values win on that cluster. The user's
file overrides the site's, and the project's overrides both. Both sections may have ``targets: {NAME: ...}``, such as
the kinds of nodes of a cluster, one of which is chosen at submission. The profile of a site, ``sites/NAME.yaml``, has
the values that its documentation names, and is below all of these. A preset, ``presets/NAME.yaml``, is a piece of a job
definition for a public training repository: ``resume: NAME`` takes all keys of the file. Its first line, a comment,
names the script that it is for. A job definition overrides them all.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp import protocol
from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef import kinds, yaml12
from clusterddp.jobdef.configuration_paths import ConfigurationFile
from clusterddp.jobdef.job import KEYS
from clusterddp.jobdef.kinds import NotIn, preset_names
from clusterddp.jobdef.program import placeholders_in
from clusterddp.jobdef.slurm_kinds import INSTEAD_OF_KEY
from clusterddp.jobdef.yaml12 import fields_of, file_fields, get, merged
from clusterddp.keys.kinds import Wrong, did_you_mean
from clusterddp.keys.node import Fields, Mistake, Node, Place, PresetSource, raise_mistakes
from clusterddp.keys.table import Entry, check_keys, read_fields
from clusterddp.rundir.ownership import why_foreign

SECTIONS = ("defaults", "clusters")
#: In a section, besides keys of a job definition: values to choose among, and the folder of new runs.
TARGETS, RUNS_DIR = "targets", "runs_dir"


#: What to do instead with an unknown key in a section.
_INSTEAD = {
    **{name: "write it into a job definition" for name, entry in KEYS.items() if entry.mark(NotIn)},
    **INSTEAD_OF_KEY,
}


def keys_in(files: str) -> dict[str, Entry]:
    """The keys of a job definition that these files may have: ``configuration`` or ``presets``."""
    return {
        name: entry for name, entry in KEYS.items() if (mark := entry.mark(NotIn)) is None or files not in mark.files
    }


def read_configuration_files(files: Sequence[ConfigurationFile], cluster: str | None) -> Fields:
    """The values for a cluster from all files, for ``load`` and ``from_values``.

    Raises one JobDefinitionError for the mistakes anywhere in the files, and one for a site's or project's file that
    another user may have written: ``setup`` lines are executed.
    """
    mistakes: list[Mistake] = []
    layers: list[Fields] = []
    for file in files:
        if file.owner != "user":
            _check_trusted(file)
        layers += _sections(file.path, cluster, mistakes)
    raise_mistakes(mistakes)
    return merged(layers)


def check_configuration_file(path: Path) -> None:
    """Raises one JobDefinitionError for all mistakes in a file, whoever owns it."""
    mistakes: list[Mistake] = []
    _sections(path, None, mistakes)
    raise_mistakes(mistakes)


def _sections(path: Path, cluster: str | None, mistakes: list[Mistake]) -> list[Fields]:
    """The values for all clusters, and those for this one. All sections are checked."""
    top = file_fields(path, mistakes)
    keys = keys_in("configuration").keys() | {TARGETS, RUNS_DIR}
    check_keys(top, SECTIONS, mistakes, instead=dict.fromkeys(keys, "write it below defaults:"))
    defaults = fields_of(get(top, "defaults"), mistakes)
    clusters = fields_of(get(top, "clusters"), mistakes)
    by_name = {name.lower(): fields_of(node, mistakes) for name, node in clusters.items()}
    for section in (defaults, *by_name.values()):
        targets = fields_of(get(section, TARGETS), mistakes).values()
        _read_runs_dir(section, mistakes)
        for values in (_without(section, TARGETS, RUNS_DIR), *(fields_of(target, mistakes) for target in targets)):
            read_fields(values, keys_in("configuration"), mistakes, instead=_INSTEAD)
    return [defaults, by_name.get((cluster or "").lower(), {})]


def configured_runs_dir(files: Sequence[ConfigurationFile], cluster: Callable[[], str | None]) -> str | None:
    """The folder for new runs that the files name, for the cluster if a section of ``clusters:`` has one, or None.

    ``~`` and variables are replaced. Raises JobDefinitionError for a file that is no YAML, and for a variable that is
    not set. Other mistakes in the files do not matter here.
    """
    mistakes: list[Mistake] = []
    tops = [file_fields(file.path, mistakes) for file in files]
    of_clusters = [fields_of(get(top, "clusters"), []) for top in tops]
    named = any(get(fields_of(node, []), RUNS_DIR) for sections in of_clusters for node in sections.values())
    name = (cluster() or "").lower() if named else ""
    found: Node | None = None
    for top, sections in zip(tops, of_clusters, strict=True):
        own = next((fields_of(node, []) for key, node in sections.items() if key.lower() == name), {})
        for section in (fields_of(get(top, "defaults"), []), own):
            found = _read_runs_dir(section, mistakes) or found
    path = os.path.expandvars(os.path.expanduser(found.text)) if found else None  # noqa: PTH111
    if found and path and (unset := re.search(r"\$\{?\w+", path)):
        mistakes.append(Mistake(found.place, f"{RUNS_DIR}: {unset[0]} is not set in {found.quoted}"))
    raise_mistakes(mistakes)
    return path


def _read_runs_dir(section: Fields, mistakes: list[Mistake]) -> Node | None:
    node = get(section, RUNS_DIR)
    if node is None or node.value is None:
        return None
    if not isinstance(node.value, str) or not node.value.strip() or not node.value.isprintable():
        mistakes.append(Mistake(node.place, f"{RUNS_DIR}: expected a folder, got {node.quoted}"))
    return node


def clusters_in(files: Sequence[ConfigurationFile]) -> list[str]:
    """The names of the clusters that have a section in one of the files, in lower case."""
    mistakes: list[Mistake] = []
    sections = [fields_of(get(file_fields(file.path, mistakes), "clusters"), mistakes) for file in files]
    return [*dict.fromkeys(name.lower() for section in sections for name in section)]


def _without(fields: Fields, *names: str) -> Fields:
    return {key: node for key, node in fields.items() if key not in names}


def _check_trusted(file: ConfigurationFile) -> None:
    instead = {
        "site": f"Set {protocol.SITE_CONFIG} to a copy of your own, or to an empty value to ignore it",
        "project": "Work in a checkout of your own",
    }[file.owner]
    folder = file.path.parent
    closed = folder.exists() and folder.stat().st_mode & 0o077 == 0
    for why in (why_foreign(folder, instead), why_foreign(file.path, instead, closed)):
        if why:
            raise JobDefinitionError(why)


@dataclass(frozen=True)
class SiteProfile:
    """What the documentation of a site says. Nobody has tested it there."""

    text: str
    """The file."""
    about: str
    source: str
    date: str
    cluster: str | None
    """ClusterName at the site, if it is known."""
    values: Fields
    """``defaults`` of the file."""
    targets: Fields


def site_profile(name: str) -> SiteProfile:
    """One of ``kinds.site_names``."""
    text = (kinds.SITES_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    mistakes: list[Mistake] = []
    top = fields_of(yaml12.load(text, f"site {name}"), mistakes)
    words = {str(key): node.text for key, node in top.items()}
    values, targets = (fields_of(get(top, section), mistakes) for section in ("defaults", TARGETS))
    return SiteProfile(text, words["about"], words["source"], words["date"], words.get("cluster"), values, targets)


def with_site(layers: Sequence[Fields], on: str | None, mistakes: list[Mistake]) -> list[Fields]:
    """The layers of a job definition. In the first, the configuration files, the profile of the site that a layer names
    is below, and the target ``on`` is above. No layer names the site or has targets any more."""
    configured, *rest = layers
    named = next((node for layer in reversed(layers) if (node := _get(layer, "site")) is not None), None)
    values, targets = {}, fields_of(get(configured, TARGETS), mistakes)
    if named is not None and named.value is not None:
        try:
            profile = site_profile(kinds.SITE.read(named, "site", mistakes))
        except Wrong as wrong:
            mistakes.append(Mistake(named.place, f"site: {wrong}"))
        else:
            values, targets = profile.values, merged([profile.targets, targets])
    if on is not None and on not in targets:
        known = ", ".join(targets) or "none. Add `targets:` to a configuration file"
        mistakes.append(Mistake(Place(f"--on {on}"), f"unknown target. Known: {known}"))
    target = fields_of(get(targets, on), mistakes) if on is not None else {}
    first = merged([values, _without(configured, TARGETS, RUNS_DIR), target])
    return [_without(layer, "site") for layer in (first, *rest)]


def preset_text(name: str) -> str:
    """The file of a preset."""
    return (kinds.PRESETS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def preset_purpose(name: str) -> str:
    """One line with the script that it is for."""
    return preset_text(name).partition("\n")[0].lstrip("# ")


def with_preset(layers: Sequence[Fields], mistakes: list[Mistake]) -> list[Fields]:
    """The layers of a job definition with the preset that they name. Of several names, the last one counts.

    It comes after the first layer, the configuration files. The job's ``args`` replace those of its ``args`` that set
    the same options.
    """
    named: Node | None = None
    rest: list[Fields] = []
    for layer in layers:
        node = _get(layer, "resume")
        if node is None:
            rest.append(layer)
        elif isinstance(node.value, dict):
            chosen = _get(node.value, "preset")
            named = chosen if chosen is not None and chosen.value is not None else named
            inner = {key: item for key, item in node.value.items() if key != "preset"}
            rest.append(
                {key: dataclasses.replace(node, value=inner) if key == "resume" else layer[key] for key in layer}
            )
        elif isinstance(node.value, list):
            rest.append(layer)  # a mistake
        else:  # a name or a null replaces the value of earlier layers
            named = node if node.value is not None else None
            rest = [{key: item for key, item in one.items() if key != "resume"} for one in [*rest, layer]]
    if named is None:
        return rest
    if named.text not in preset_names():
        hint = did_you_mean(named.text, preset_names()) or f". Presets: {', '.join(preset_names())}"
        expected = "expected a mapping with checkpoint: PATTERN, or the name of a preset"
        mistakes.append(Mistake(named.place, f"resume: {expected}, got {named.quoted}{hint}"))
        return rest
    root = yaml12.load(preset_text(named.text), PresetSource(f"preset {named.text}"))
    preset = root.value if isinstance(root.value, dict) else {}
    given = [(index, node) for index, layer in enumerate(rest) if (node := _get(layer, "args")) is not None]
    if given and isinstance(given[-1][1].value, list):
        index, node = given[-1]
        elsewhere = any(_has_checkpoint(layer) for layer in rest)
        more = _added_arguments(preset, node, None if elsewhere else named, mistakes)
        joined = dataclasses.replace(node, value=[*_items(node), *more])
        rest[index] = {key: joined if key == "args" else item for key, item in rest[index].items()}
    return [*rest[:1], preset, *rest[1:]]


def _added_arguments(preset: Fields, given: Node, named: Node | None, mistakes: list[Mistake]) -> list[Node]:
    """The preset's arguments without the options that the job's own have.

    ``named``: the preset's name if it sets the place of the checkpoints. Options with the folder must then be its own.
    """
    words = [item.text for item in _items(given)]
    kept: list[Node] = []
    for option in _options(_items(_get(preset, "args"))):
        name = option[0].text.partition("=")[0]
        if not any(word == name or word.startswith(f"{name}=") for word in words):
            kept += option
        elif named is not None and any("run_dir" in placeholders_in(item.text) for item in option):
            written = " ".join(item.text for item in option)
            what = f"args: {name} is also set by the preset {named.text} ({written}), which looks for checkpoints there"
            mistakes.append(Mistake(given.place, f"{what}. Remove it, or also set resume.checkpoint"))
    return kept


def _options(words: Sequence[Node]) -> Iterator[list[Node]]:
    """Each option with the words that follow it."""
    option: list[Node] = []
    for word in words:
        if word.text.startswith("-") and option:
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _has_checkpoint(layer: Fields) -> bool:
    node = _get(layer, "resume")
    return node is not None and isinstance(node.value, dict) and _get(node.value, "checkpoint") is not None


def _items(node: Node | None) -> list[Node]:
    return node.value if node is not None and isinstance(node.value, list) else []


def _get(fields: Fields, name: str) -> Node | None:
    return next((node for key, node in fields.items() if key == name), None)
