"""Python environments for tests of ``stage``: virtual environments with a torch that only has a name."""

from __future__ import annotations

import venv
from pathlib import Path


def make(top: Path, packages: int = 3, modules: int = 3) -> Path:
    """Creates one with so many packages besides torch. Returns its interpreter."""
    venv.create(top, symlinks=True, with_pip=False)
    for name in ("torch", *(f"package{number}" for number in range(packages))):
        add(packages_of(top), name, modules)
    (top / "share").mkdir()
    (top / "share/inside").symlink_to("../bin")
    (top / "share/outside").symlink_to("../../elsewhere")
    return top / "bin/python"


def packages_of(top: Path) -> Path:
    """Its folder of packages."""
    (found,) = top.glob("lib/python3*/site-packages")
    return found


def add(site: Path, name: str, modules: int = 3) -> None:
    """A package with metadata, and modules that it imports."""
    package, metadata = site / name, site / f"{name}-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    names = [f"module{number}" for number in range(modules)]
    (package / "__init__.py").write_text(f"from . import {', '.join(names)}\n")
    for module in names:
        (package / f"{module}.py").write_text("x = 1\n")
