"""Where the configuration files of the site, the user and the project are.

Apart from ``configuration_files.py``, which reads them, because every command looks for them, and most find none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp import protocol

SITE_FILE = Path("/etc/clusterddp/config.yaml")
#: Below the folder that jobs are submitted from or, inside a git checkout, below one above it.
PROJECT_FILE = Path(".clusterddp", "config.yaml")


@dataclass(frozen=True)
class ConfigurationFile:
    """One of the files, with its owner."""

    owner: str
    """``site``, ``user`` or ``project``."""
    path: Path

    def __str__(self) -> str:
        return f"{self.owner} {self.path}"


def find_configuration_files(environ: Mapping[str, str], folder: Path) -> list[ConfigurationFile]:
    """The files that apply to a submission from ``folder``. The last wins."""
    files = {"site": _site_file(environ), "user": _user_file(environ), "project": _project_file(folder)}
    return [ConfigurationFile(owner, path) for owner, path in files.items() if path is not None]


def _site_file(environ: Mapping[str, str]) -> Path | None:
    """The file that the variable names, which must exist, or None if empty. Without the variable, the usual file."""
    named = environ.get(protocol.SITE_CONFIG)
    if named is None:
        return SITE_FILE if _exists(SITE_FILE) else None
    return Path(named) if named else None


def _user_file(environ: Mapping[str, str]) -> Path | None:
    """The user's file, or None, also without a readable home directory."""
    home = environ.get("XDG_CONFIG_HOME")
    try:
        path = (Path(home) if home else Path("~/.config").expanduser()) / "clusterddp" / "config.yaml"
    except RuntimeError:  # no home directory
        return None
    return path if _exists(path) else None


def _project_file(folder: Path) -> Path | None:
    """The nearest one, from the folder up to the top of its git checkout. Outside a checkout, only the folder's own.

    Further up, it might belong to any user, for example in /tmp.
    """
    folders = [folder, *folder.parents]
    top = next((index for index, above in enumerate(folders) if _exists(above / ".git")), 0)
    return next((above / PROJECT_FILE for above in folders[: top + 1] if _exists(above / PROJECT_FILE)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no permission, for example
        return False
