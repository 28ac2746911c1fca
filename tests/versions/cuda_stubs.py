"""Stand-ins for the CUDA libraries that a CUDA build of torch is linked against, so that it runs on CPUs without them.

PyPI has CUDA builds only, and their libraries are 2 to 3 GB per torch version. On a CPU none of their functions is
needed, but the dynamic loader wants to find them. A stand-in defines every symbol that torch's own libraries look for;
every function returns 100, cudaErrorNoDevice, so that torch finds no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

NO_DEVICE = 100
CUDA = re.compile(r"lib(cu|nccl|nv)")
#: Its absence is how everyone, torch included, finds out that there is no GPU driver.
DRIVER = "libcuda.so.1"
#: Functions of the driver that torch finds by name.
OPENED = {
    *("cuGetErrorString", "cuGetProcAddress_v2", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate", "cuMemMap"),
    *("cuMemExportToShareableHandle", "cuMemGetAllocationGranularity", "cuMemImportFromShareableHandle"),
    *("cuMemRelease", "cuMemSetAccess", "cuMemUnmap"),
}


def write_stand_ins(packages: Path) -> list[str]:
    """Write what is missing into torch's folder of libraries below ``packages``; nothing for a CPU build of torch."""
    folder = packages / "torch" / "lib"
    present = {path.name for path in (*folder.iterdir(), *packages.glob("nvidia/**/*.so*"))} | {DRIVER}
    dumps = [_readelf(path) for path in sorted(folder.glob("*.so*"))]
    needed = {name for dump in dumps for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dump) if CUDA.match(name)}
    versions = {version: name for dump in dumps for version, name in _versions(dump).items()}
    symbols = dict(match for dump in dumps for match in re.findall(r" UND (\w+)(?:@(\S+))?", dump))
    missing = sorted(needed - present)
    for name in missing:
        _link(
            folder / name, _symbols_of(name, symbols, versions), {v for v, owner in versions.items() if owner == name}
        )
    return missing


def replace(packages: Path, library: Path, source: Path, *needed: Path) -> None:
    """Replaces a stand-in by one that is compiled from ``source``; what else torch needs of it returns 0."""
    dumps = [_readelf(path) for path in sorted((packages / "torch" / "lib").glob("lib*torch*.so"))]
    dumps += [_readelf(path) for path in sorted((packages / "torch" / "lib").glob("libc10*.so"))]
    versions = {version: name for dump in dumps for version, name in _versions(dump).items()}
    symbols = dict(match for dump in dumps for match in re.findall(r" UND (\w+)(?:@(\S+))?", dump))
    own = set(re.findall(r"^[a-z][\w ]*?\**(\w+)\(", source.read_text(), re.MULTILINE))
    others = set(_symbols_of(library.name, symbols, versions)) - own
    owned = {version for version, owner in versions.items() if owner == library.name}
    _link(library, sorted(others), owned, returns=0, more=[source, *needed])


def write_driver(user: Path, target: Path) -> None:
    """A driver whose functions return 0, for all that ``user`` needs; the context of the device exists."""
    names = set(re.findall(r" UND (cu[A-Z]\w+)", _readelf(user))) - {"cuDevicePrimaryCtxGetState"}
    code = "int cuDevicePrimaryCtxGetState(int at, unsigned *flags, int *is) { *flags = 0; *is = 1; return 0; }"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "driver.c")
        source.write_text(code)
        _link(target, sorted(names | OPENED), (), returns=0, more=[source])


def _readelf(path: Path) -> str:
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", "--version-info", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _versions(dump: str) -> dict[str, str]:
    """From a symbol version to the library that has to define it."""
    owner, found = "", {}
    for line in dump.splitlines():
        if file := re.search(r"Version: \d+\s+File: (\S+)", line):
            owner = file[1]
        elif name := re.search(r"Name: (\S+)\s+Flags: .*Version: \d+", line):
            found[name[1]] = owner
    return found


def _symbols_of(library: str, symbols: Mapping[str, str], versions: Mapping[str, str]) -> list[str]:
    """A symbol names its library by its version; without one, by its prefix (ncclSend, curandCreateGenerator)."""
    prefix = re.sub(r"^lib(\w+)\.so.*", r"\1", library).lower()
    return sorted(
        name
        for name, version in symbols.items()
        if (versions.get(version) == library if version else name.lower().startswith(prefix))
    )


def _link(
    target: Path,
    symbols: Iterable[str],
    versions: Iterable[str],
    returns: int = NO_DEVICE,
    more: Iterable[Path] = (),
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "all.s"), Path(folder, "versions")
        definitions = "".join(f".globl {name}\n.type {name}, @function\n.set {name}, none\n" for name in symbols)
        code = f'.text\nnone: movl ${returns}, %eax\nret\n{definitions}.section .note.GNU-stack,"",@progbits\n'
        source.write_text(code)
        script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
        named = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
        compiled = ["-fPIC", "-O1", "-w", *map(str, more)] if more else ["-nostdlib"]
        command = ["gcc", "-shared", str(source), *compiled, "-o", str(target), f"-Wl,-soname,{target.name}", *named]
        subprocess.run(command, check=True)
