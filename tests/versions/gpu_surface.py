"""``python -m tests.versions.gpu_surface``: the names of torch's CUDA builds that clusterddp uses, and who lacks some.

It finds the names in the syntax trees of clusterddp, downloads each release's CUDA build, imports it over stand-ins for
the CUDA libraries, which no name needs, and looks the names up. Writes GPU_SURFACE.json and .md here.
The exit code says whether clusterddp handles every name that is missing somewhere.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.markdown import table
from tests.versions.cuda_stubs import write_stand_ins
from tests.versions.environments import REPOSITORY

PACKAGE, FOLDER = REPOSITORY / "clusterddp", REPOSITORY / "build"
PAGE = Path(__file__).with_name("GPU_SURFACE.md")
FIGURES = PAGE.with_suffix(".json")
#: Releases; the last one stands for the newest.
RELEASES = ("2.4.1", "2.6.0", "2.9.1", "2.11.0", "newest")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
#: What the names begin with.
SURFACE = ("torch.cuda", "torch._C", "torch.distributed", "torch.backends", "torch.version")
#: What calls return, and annotations name: instances of these.
TYPES = {
    "torch.cuda.Event": "torch.cuda.Event",
    "torch.cuda.Stream": "torch.cuda.Stream",
    "torch.cuda.current_stream": "torch.cuda.Stream",
    "torch.cuda.get_device_properties": "torch._C._CudaDeviceProperties",
    "torch.cuda.cudart": "torch._C._cudart",
}
#: Names that are looked up with getattr, and the module that has them.
BY_STRING = {"_dump_": "torch._C._distributed_c10d"}
#: What clusterddp does where a name that it asks for is missing.
INSTEAD = {
    "torch._C._CudaDeviceProperties.uuid": "the PCI address, by the CUDA runtime",
    "torch._C._distributed_c10d._dump_nccl_trace_json": "the pickled record, `_dump_nccl_trace`",
    "torch._C._distributed_c10d._dump_fr_trace_file": "NCCL's flight record is in `_dump_nccl_trace_json`",
    "torch._C._distributed_c10d._dump_fr_trace_json": "no flight record of gloo's collectives; the rank's log says so",
    "torch.distributed.ProcessGroup.set_timeout": "gloo keeps its timeout of the start; rank 0's log says so",
}
HEAD = """# Names of torch's CUDA builds

`make gpu-surface` looks up every name of {surface} that clusterddp uses
in the CUDA builds of torch {releases}, imported over stand-ins for the CUDA libraries.
"""

LOOK_UP = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed, torch.nn.parallel
def exists(name):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
names = json.load(sys.stdin)
missing = [name for name in names if not exists(name)]
print(json.dumps({"build": torch.__version__, "cuda": torch.version.cuda, "missing": missing}))
"""


class Uses(ast.NodeVisitor):
    """The names that one module uses. ``found``: names of the surface. ``members``: attributes of what may be an
    instance of one of TYPES. ``asked``: names that it asks for with hasattr or getattr."""

    def __init__(self, module: Path) -> None:
        self.found: set[str] = set()
        self.members: set[str] = set()
        self.asked: set[str] = set()
        self._imported = {"torch": "torch"}
        self._types: dict[str, str] = {}
        tree = ast.parse(module.read_text())
        for _ in range(2):  # a name may be used above the line that gives it its type
            self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname:
                self._imported[alias.asname] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self._use(f"{node.module}.{alias.name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._typed(_last(target), self._type_of(node.value))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._typed(_last(node.target), self._mentioned(node.annotation))
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self._typed(node.arg, self._mentioned(node.annotation))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._typed(node.name, self._mentioned(node.returns))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and inner.value is not None:
                self._typed(node.name, self._type_of(inner.value))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._typed(_last(node.target), self._type_of(node.iter))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._typed(_last(node.target), self._type_of(node.iter))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.asked.add(name.value)
                if owner := self._dotted(node.args[0]):
                    self._use(f"{owner}.{name.value}")
                elif kind := self._type_of(node.args[0]):
                    self.members.add(f"{kind}.{name.value}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        for beginning, owner in BY_STRING.items():
            if isinstance(node.value, str) and node.value.startswith(beginning) and node.value.isidentifier():
                self.found.add(f"{owner}.{node.value}")
                self.asked.add(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self._dotted(node):
            self._use(name)
        else:
            if kind := self._type_of(node.value):
                self.members.add(f"{kind}.{node.attr}")
            self.generic_visit(node)

    def _use(self, name: str) -> None:
        if name.startswith(tuple(f"{one}." for one in SURFACE)):
            self.found.add(name)

    def _typed(self, name: str | None, kind: str | None) -> None:
        if name and kind:
            self._types[name] = kind

    def _dotted(self, node: ast.expr) -> str | None:
        """``torch.cuda.Event``, by whatever name it was imported."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._dotted(node.value)):
            return f"{owner}.{node.attr}"
        return None

    def _type_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Call):
            name = self._dotted(node.func)
            return TYPES.get(name) if name else self._types.get(_last(node.func) or "")
        return self._types.get(_last(node) or "")

    def _mentioned(self, annotation: ast.expr | None) -> str | None:
        names = (
            [self._dotted(node) for node in ast.walk(annotation) if isinstance(node, ast.expr)] if annotation else []
        )
        return next((TYPES[name] for name in names if name in TYPES), None)


def _last(node: ast.expr) -> str | None:
    """The name of a variable or an attribute: types are tracked by it within a module."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def used() -> tuple[dict[str, list[str]], set[str], set[str]]:
    """The names and the modules that use them; those of them that are only members of what may be an instance; the
    names that are asked for before they are used."""
    where: dict[str, list[str]] = {}
    sure: set[str] = set()
    asked: set[str] = set()
    for path in sorted(path for path in PACKAGE.rglob("*.py") if "torch" in path.read_text()):
        uses = Uses(path)
        for name in sorted(uses.found | uses.members):
            where.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
        sure |= uses.found
        asked |= uses.asked
    return where, where.keys() - sure, asked


def releases(names: Sequence[str], index: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each release, and what it lacks. One at a time on the disk: they have 1.5 to 2.5 GB each."""
    for release in RELEASES:
        folder = FOLDER / f"gpu-surface-{release}"
        shutil.rmtree(folder, ignore_errors=True)
        wheel = download(release, folder / "wheels", index)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "packages")
        wheel.unlink()
        write_stand_ins(folder / "packages")
        environ = {**os.environ, "PYTHONPATH": str(folder / "packages")}
        command = [sys.executable, "-W", "ignore", "-c", LOOK_UP]
        ran = subprocess.run(
            command, input=json.dumps(names), env=environ, stdout=subprocess.PIPE, text=True, check=True
        )
        shutil.rmtree(folder)
        yield wheel.name.split("-")[1], json.loads(ran.stdout)


def download(release: str, folder: Path, index: str | None) -> Path:
    """The wheel of a release for this Python."""
    wanted = "torch" if release == "newest" else f"torch=={release}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--python-version", python, "--implementation", "cp", "--abi", f"cp{python.replace('.', '')}"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--index-url", index] if index else []
    subprocess.run([*command, "-d", str(folder), wanted], check=True)
    (wheel,) = folder.glob("torch-*.whl")
    return wheel


def rows(
    where: Mapping[str, Sequence[str]],
    found: Mapping[str, Mapping[str, Any]],
    unsure: Iterable[str],
    asked: Iterable[str],
) -> list[dict[str, Any]]:
    """What each name is used in, which releases lack it, and how that is handled. A member that no release has belongs
    to something else, such as a list of events."""
    made = []
    for name, modules in sorted(where.items()):
        lacking = [release for release, one in found.items() if name in one["missing"]]
        if name in unsure and len(lacking) == len(found):
            continue
        instead = INSTEAD.get(name) if lacking and name.rpartition(".")[2] in asked else None
        made.append({"name": name, "used_in": list(modules), "missing": lacking, "instead": instead})
    return made


def text(figures: Mapping[str, Any]) -> str:
    builds = {release: f"{release} (CUDA {one['cuda']})" for release, one in figures["releases"].items()}
    lines = [HEAD.format(surface=", ".join(f"`{one}`" for one in SURFACE), releases=", ".join(builds.values()))]
    lacking = [row for row in figures["names"] if row["missing"]]
    everywhere = [row for row in figures["names"] if not row["missing"]]
    lines.append(
        f"Looked up on {figures['date']}: {len(figures['names'])} names, {len(lacking)} of which some release lacks.\n"
    )
    if later := figures.get("later"):  # added by hand, until all names are looked up again
        lines.append(f"Used since then, and not looked up: {', '.join(f'`{name}`' for name in later)}.\n")
    lines.append(
        table(
            ("name", "used in", "missing in torch", "what clusterddp does there"),
            [
                (
                    f"`{row['name']}`",
                    ", ".join(row["used_in"]),
                    ", ".join(row["missing"]),
                    row["instead"] or "**fails**",
                )
                for row in lacking
            ],
        )
    )
    lines.append("\n## In all of them\n")
    lines.append(table(("name", "used in"), [(f"`{row['name']}`", ", ".join(row["used_in"])) for row in everywhere]))
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    top = argparse.ArgumentParser(prog="python -m tests.versions.gpu_surface", description="Look up torch's names.")
    top.add_argument("--index", help="a package index with torch's CUDA builds; default: pip's")
    options = top.parse_args(arguments)
    where, unsure, asked = used()
    found = dict(releases(sorted(where), options.index))
    builds = {release: {"build": one["build"], "cuda": one["cuda"]} for release, one in found.items()}
    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "releases": builds,
        "names": rows(where, found, unsure, asked),
    }
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(text(figures))
    print(PAGE.read_text())
    return int(any(row["missing"] and not row["instead"] for row in figures["names"]))


if __name__ == "__main__":
    sys.exit(main())
