"""Python environments for tests of ``stage``: with a torch that only has a name, or with this environment's torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

#: What torch needs.
TORCH = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe")
TORCH_FILES = ("filelock", "fsspec", "typing_extensions.py")
#: With them, more than 30,000 files.
LARGE = ("transformers", "pandas", "mlflow", "tokenizers", "huggingface_hub", "safetensors", "wandb", "pip")


def make(top: Path, packages: int = 3, modules: int = 3) -> Path:
    """Creates one with so many packages besides torch. Returns its interpreter."""
    venv.create(top, symlinks=True, with_pip=False)
    for name in ("torch", *(f"package{number}" for number in range(packages))):
        add(packages_of(top), name, modules)
    (top / "share").mkdir()
    (top / "share/inside").symlink_to("../bin")
    (top / "share/outside").symlink_to("../../elsewhere")
    return top / "bin/python"


def with_torch(top: Path, more: Sequence[str] = ()) -> Path:
    """A virtual environment with this one's torch, by hard links where that is possible. Returns its interpreter."""
    venv.create(top, symlinks=True, with_pip=False)
    link_torch(packages_of(top), more)
    return top / "bin/python"


def prefix_with_torch(top: Path) -> Path:
    """The same as an interpreter with a standard library of its own, as conda has it. Returns its interpreter."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for folder in ("bin", "conda-meta"):
        (top / folder).mkdir(parents=True)
    (top / "conda-meta/history").touch()
    python = Path(shutil.copy2(Path(sys.executable).resolve(), top / "bin" / version))
    (top / "bin/python").symlink_to(version)
    library = Path(os.__file__).parent
    shutil.copytree(
        library,
        top / "lib" / version,
        ignore=shutil.ignore_patterns("test", "*-packages"),
        ignore_dangling_symlinks=True,
    )
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", code], text=True).strip())
    assert site.is_relative_to(top), site
    site.mkdir(parents=True, exist_ok=True)
    link_torch(site)
    return top / "bin/python"


def link_torch(site: Path, more: Sequence[str] = ()) -> None:
    """Gives a folder of packages torch, what that needs, and more."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    own = Path(found.origin).parents[1]
    for name in (*TORCH, *TORCH_FILES, *more):
        if (own / name).is_dir():
            shutil.copytree(own / name, site / name, copy_function=_link)
        elif (own / name).exists():
            _link(str(own / name), str(site / name))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


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
