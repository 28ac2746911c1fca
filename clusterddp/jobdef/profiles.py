"""Profiles: files with the values that all jobs of a site, a user or a project have in common, by cluster.

Each has ``defaults:`` and ``clusters: {NAME: ...}``, whose values win on that cluster. Of the files, the more specific
one wins: the site's, then the user's, then the project's. A job definition overrides them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp import protocol
from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef.load import fields_of, file_fields, get, merged
from clusterddp.jobdef.schema import READERS, Fields, check_keys, read_fields
from clusterddp.jobdef.yaml12 import Mistake, raise_mistakes
from clusterddp.rundir.ownership import why_foreign

SITE_FILE = Path("/etc/clusterddp/config.yaml")
#: Below the folder that jobs are submitted from or, inside a git checkout, below one above it.
PROJECT_FILE = Path(".clusterddp", "config.yaml")
SECTIONS = ("defaults", "clusters")
#: Keys of a job definition that no profile has.
_OF_ONE_JOB = {"job_name", "script", "module", "args", "resume", "steps", "done"}
_KEYS = {key: reader for key, reader in READERS.items() if key not in _OF_ONE_JOB}


@dataclass(frozen=True)
class Profile:
    """One of the files, and whose it is."""

    owner: str
    """``site``, ``user`` or ``project``."""
    path: Path

    def __str__(self) -> str:
        return f"{self.owner} {self.path}"


def find_profiles(environ: Mapping[str, str], folder: Path) -> list[Profile]:
    """The files that apply to a submission from ``folder``; the last wins."""
    files = {"site": _site_file(environ), "user": _user_file(environ), "project": _project_file(folder)}
    return [Profile(owner, path) for owner, path in files.items() if path is not None]


def read_profiles(profiles: Sequence[Profile], cluster: str | None) -> Fields:
    """The values for a cluster from all files, for ``load`` and ``from_values``.

    Raises one JobDefinitionError for the mistakes anywhere in the files, and one for a site's or project's file that
    another user may have written: ``setup`` lines are executed.
    """
    mistakes: list[Mistake] = []
    layers: list[Fields] = []
    for profile in profiles:
        if profile.owner != "user":
            _check_trusted(profile)
        layers += _sections(profile.path, cluster, mistakes)
    raise_mistakes(mistakes)
    return merged(layers)


def check_profile(path: Path) -> None:
    """Raises one JobDefinitionError for all mistakes in a file, whoever owns it."""
    mistakes: list[Mistake] = []
    _sections(path, None, mistakes)
    raise_mistakes(mistakes)


def _sections(path: Path, cluster: str | None, mistakes: list[Mistake]) -> list[Fields]:
    """The values for all clusters, and those for this one; all sections are checked."""
    top = file_fields(path, mistakes)
    check_keys(top, SECTIONS, mistakes)
    defaults = fields_of(get(top, "defaults"), mistakes)
    clusters = fields_of(get(top, "clusters"), mistakes)
    by_name = {name.lower(): fields_of(node, mistakes) for name, node in clusters.items()}
    for section in (defaults, *by_name.values()):
        read_fields(section, _KEYS, mistakes)
    return [defaults, by_name.get((cluster or "").lower(), {})]


def _check_trusted(profile: Profile) -> None:
    instead = {
        "site": f"Set {protocol.SITE_CONFIG} to a copy of your own, or to nothing to do without it",
        "project": "Work in a checkout of your own",
    }[profile.owner]
    folder = profile.path.parent
    closed = folder.exists() and folder.stat().st_mode & 0o077 == 0
    for why in (why_foreign(folder, instead), why_foreign(profile.path, instead, closed)):
        if why:
            raise JobDefinitionError(why)


def _site_file(environ: Mapping[str, str]) -> Path | None:
    """The file that the variable names, which must exist, or none if it is empty; without it, the usual one."""
    named = environ.get(protocol.SITE_CONFIG)
    if named is None:
        return SITE_FILE if _exists(SITE_FILE) else None
    return Path(named) if named else None


def _user_file(environ: Mapping[str, str]) -> Path | None:
    """None also without a home directory that this user can read."""
    home = environ.get("XDG_CONFIG_HOME")
    try:
        path = (Path(home) if home else Path("~/.config").expanduser()) / "clusterddp" / "config.yaml"
    except RuntimeError:  # no home directory
        return None
    return path if _exists(path) else None


def _project_file(folder: Path) -> Path | None:
    """The nearest one, from the folder up to the top of its git checkout; outside a checkout, only the folder's own.

    Further up, it might be any user's: in /tmp, for example.
    """
    folders = [folder, *folder.parents]
    top = next((index for index, above in enumerate(folders) if _exists(above / ".git")), 0)
    return next((above / PROJECT_FILE for above in folders[: top + 1] if _exists(above / PROJECT_FILE)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no permission, for example
        return False
