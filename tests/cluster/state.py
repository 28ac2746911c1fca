"""What the cluster has made on this machine, written down before it is made."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import ClusterConfig, Site
from .errors import ClusterError
from .system import Process

ROOT = Path("/var/lib/clusterddp-cluster")  # only root writes there, and it is short: socket paths end at 107 bytes
LOCK = "\0clusterddp-test-cluster"  # an abstract socket: closed with the process that holds it, however that ends

BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class State:
    """One cluster on this machine; `save` keeps the file in step."""

    site: Site
    config: ClusterConfig
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: float = field(default_factory=time.time)
    boot: str = field(default_factory=lambda: BOOT.read_text().strip())
    source: str = ""
    python: str = ""
    library_path: str = ""
    """For an interpreter that needs it to find its own shared library from where the user sees it."""
    uid: int = -1
    gid: int = -1
    user_made: bool = False
    ready: bool = False
    detached: bool = False
    """Up on its own: `python -m tests.cluster up` made it and has ended."""
    daemons: dict[str, Process] = field(default_factory=dict)
    cgroups_before: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.site.root / "state.json"

    def save(self) -> None:
        """Whole or not at all."""
        partial = self.path.with_suffix(".new")
        partial.write_text(json.dumps(dataclasses.asdict(self), default=str, indent=1))
        os.replace(partial, self.path)

    @classmethod
    def load(cls, root: Path) -> State | None:
        """None where none is. Another version of this code may have written it: what it left out has its default."""
        try:
            fields = json.loads((root / "state.json").read_text())
        except FileNotFoundError:
            return None
        site = fields["site"]
        fields["site"] = Site(**_known(Site, {**site, "root": root, "version": tuple(site["version"])}))
        fields["config"] = ClusterConfig(**_known(ClusterConfig, fields["config"]))
        fields["daemons"] = {name: Process(**process) for name, process in fields["daemons"].items()}
        return cls(**_known(cls, fields))


def _known(kind: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


class Lock:
    """Held from `up` to `down` by the process that will bring the cluster down, so that two never run at once."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(LOCK)
        except OSError:
            self._socket.close()
            raise ClusterError(f"the test cluster is held by {lock_holder()}; end that first") from None
        self._socket.listen()

    def release(self) -> None:
        self._socket.close()


def lock_holder() -> str | None:
    """The process that holds the lock, in words; None if none does."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as client:
        try:
            client.connect(LOCK)
        except OSError:
            return None
        pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    process = Process.of(pid)
    return f"process {pid} ({process.command() if process else 'gone, but a child of it lives'})"
