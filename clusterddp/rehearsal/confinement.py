"""Refuses writes outside some folders to this process and its children, with Landlock (Linux 6.2 or newer)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

#: linux/landlock.h and the system calls, whose numbers are the same on all architectures.
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
#: Writing, removing and making files and folders, moving them to another folder (2), truncating them (3).
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES = _WRITE_FILE | _TRUNCATE | sum(1 << bit for bit in range(4, 14))
_ONLY_FILES = _WRITE_FILE | _TRUNCATE
_NEEDED_VERSION = 3
_PR_SET_NO_NEW_PRIVS = 38


def is_available() -> bool:
    """Whether this kernel refuses what ``confine`` asks it to refuse."""
    version: int = ctypes.CDLL(None).syscall(_CREATE, None, 0, _VERSION_FLAG)
    return version >= _NEEDED_VERSION


def confine(writable: Iterable[Path]) -> bool:
    """Refuses writes outside these files and folders from now on. Returns False if the kernel cannot."""
    if not is_available():
        return False
    libc = ctypes.CDLL(None)
    attributes = struct.pack("Q", _CHANGES)
    rules = libc.syscall(_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        for path in writable:
            _allow(libc, rules, path)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(libc.syscall(_RESTRICT, rules, 0) == 0)
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = _CHANGES if path.is_dir() else _ONLY_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
