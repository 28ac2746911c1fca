"""The pairs of Python and torch, and the environment that each is tested in."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.versions.cuda_stubs import write_stand_ins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".versions"
#: What torch's CUDA builds require for GPUs alone: gigabytes.
FOR_GPUS = ("nvidia-", "cuda-", "triton")
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "jsonschema", "safetensors")
VERSION = "import sys; print('{}.{}'.format(*sys.version_info))"


@dataclass(frozen=True)
class Pair:
    """``others`` is how the other packages are chosen: "oldest" takes pyproject.toml's lower bounds, "constraints"
    takes constraints.txt, "newest" what the index has."""

    python: str
    torch: str
    others: str

    @property
    def name(self) -> str:
        return f"python{self.python}-torch{self.torch}"


PAIRS = (
    Pair("3.10", "2.4.1", "oldest"),
    Pair("3.11", "2.13.0", "constraints"),
    Pair("3.12", "2.9.1", "newest"),
    Pair("3.13", "2.15.0", "newest"),
)


def interpreters(names: Iterable[str]) -> dict[str, str]:
    """By Python's minor version, those of ``names`` (on PATH, or paths) that run."""
    found: dict[str, str] = {}
    for name in names:
        try:
            version = subprocess.run([name, "-c", VERSION], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            continue
        found.setdefault(version, name)
    return found


def environment(pair: Pair, interpreter: str, index: str | None) -> Path:
    """The Python of the pair's environment, which is made unless it is there already."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder = FOLDER / pair.name
    ready, recipe = folder / "ready", _recipe(pair, interpreter, index, project)
    python = folder / "bin" / "python"
    if ready.exists() and ready.read_text() == recipe:
        return python
    subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
    _pip(python, index, "--no-deps", f"torch=={pair.torch}")
    packages = Path(_output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    _pip(python, index, *_of_torch(packages), *other_requirements(pair, project))
    _pip(python, index, "--no-deps", "-e", str(REPOSITORY))
    write_stand_ins(packages)
    ready.write_text(recipe)
    return python


def versions(python: Path) -> dict[str, str]:
    """What the environment has, exactly."""
    names = ("torch", "submitit", "numpy", "cloudpickle", "pyyaml", "rich")
    code = f"import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {names}))"
    return dict(zip(("python", *names), _output(python, code).split(), strict=True))


def _recipe(pair: Pair, interpreter: str, index: str | None, project: Mapping[str, Any]) -> str:
    constraints = (REPOSITORY / "constraints.txt").read_bytes() if pair.others == "constraints" else b""
    words = repr((pair, interpreter, index, other_requirements(pair, project))).encode()
    return hashlib.sha256(words + constraints).hexdigest()


def _of_torch(packages: Path) -> list[str]:
    """What the installed torch requires on a CPU."""
    metadata = next(packages.glob("torch-*.dist-info"))
    wanted = [Requirement(line) for line in PathDistribution(metadata).requires or ()]
    here = {"extra": ""}
    return [
        f"{one.name}{one.specifier}"
        for one in wanted
        if not one.name.startswith(FOR_GPUS) and (one.marker is None or one.marker.evaluate(here))
    ]


def other_requirements(pair: Pair, project: Mapping[str, Any]) -> list[str]:
    lines = [line for line in project["dependencies"] if Requirement(line).name != "torch"]
    if pair.others == "oldest":
        lines = [_lower_bound(line) for line in lines]
    constraints = ["-c", str(REPOSITORY / "constraints.txt")] if pair.others == "constraints" else []
    return [*constraints, *lines, *TEST_TOOLS]


def _lower_bound(line: str) -> str:
    one = Requirement(line)
    lowest = next(part.version for part in one.specifier if part.operator == ">=")
    return f"{one.name}=={lowest}"


def _pip(python: Path, index: str | None, *words: str) -> None:
    # Not --upgrade: pip leaves torch, whose own requirements are not all there, alone.
    extra = ["--extra-index-url", index] if index else []
    quiet = ["-q", "--disable-pip-version-check", "--no-warn-conflicts"]
    subprocess.run([str(python), "-m", "pip", "install", *quiet, *extra, *words], check=True, env=_clean())


def _output(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _clean() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
