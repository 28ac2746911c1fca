"""The configuration files of the site, user and project, and the profiles of sites.

A configuration file has ``defaults:`` and ``clusters: {NAME: ...}``, whose values win on that cluster. The user's
file overrides the site's, and the project's overrides both. Both sections may have ``targets: {NAME: ...}``, such as
the kinds of nodes of a cluster, one of which is chosen at submission. The profile of a site, ``sites/NAME.yaml``, has
the values that its documentation names, and is below all of these. A job definition overrides them all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp import protocol
from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef import kinds, yaml12
from clusterddp.jobdef.configuration_paths import ConfigurationFile
from clusterddp.jobdef.job import KEYS
from clusterddp.jobdef.kinds import NotIn
from clusterddp.jobdef.slurm_kinds import INSTEAD_OF_KEY
from clusterddp.jobdef.yaml12 import fields_of, file_fields, get, merged
from clusterddp.keys.kinds import Wrong
from clusterddp.keys.node import Fields, Mistake, Node, Place, raise_mistakes
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
    named = next((node for layer in reversed(layers) if (node := get(layer, "site")) is not None), None)
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
