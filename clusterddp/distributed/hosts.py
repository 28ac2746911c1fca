"""Which ranks share a host's memory: those of one machine and one container, however the launcher counts nodes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hosts:
    """The ranks' hosts. The first rank of each host is its leader, rank 0 among them."""

    rank: int
    """This process's rank."""
    leader_of: tuple[int, ...]
    """The leader of each rank."""
    pid_of: tuple[int, ...]
    """The process id of each rank, as the ranks of its host see it."""

    @classmethod
    def of(cls, facts: Sequence[Sequence[int]], rank: int) -> Hosts:
        """From each rank's ``own_facts``."""
        first: dict[int, int] = {}
        leaders = tuple(first.setdefault(host, other) for other, (host, _) in enumerate(facts))
        return cls(rank, leaders, tuple(pid for _, pid in facts))

    def apart(self) -> Hosts:
        """The same ranks, as if each had a host for itself."""
        return Hosts(self.rank, tuple(range(len(self.leader_of))), self.pid_of)

    @property
    def leaders(self) -> list[int]:
        """The leaders of all hosts, in rank order."""
        return sorted(set(self.leader_of))

    @property
    def leader(self) -> int:
        """The leader of this rank's host."""
        return self.leader_of[self.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is its host's leader."""
        return self.leader == self.rank


def own_facts() -> list[int]:
    """This rank's host, as a number, and process id."""
    return [_host(), os.getpid()]


def _host() -> int:
    """Equal for two ranks that can open each other's files in /proc: one kernel, one PID namespace, one user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        facts = [boot, str(Path("/proc/self/ns/pid").stat().st_ino), str(os.geteuid())]
    except OSError:
        facts = [secrets.token_hex()]
    digest = hashlib.blake2b(" ".join(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
