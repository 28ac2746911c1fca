"""Builds the stand-in devices for this Python and torch, and gives the environment that turns them on.

``python -m tests.gpu.build`` builds them and prints that environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).with_name("standin")
BUILDS = Path(__file__).parents[2] / "build" / "standin"


def build() -> Path:
    """The folder of the compiled extension; one g++ call of about 20 s where this torch has none yet."""
    import torch
    from torch.utils.cpp_extension import include_paths

    source = SOURCES / "standin.cpp"
    parts = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    version = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:12]
    folder = BUILDS / f"{sys.implementation.cache_tag}-torch{torch.__version__}-{version}"
    made = folder / f"_standin{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return folder
        library = Path(torch.__file__).parent / "lib"
        part = made.with_suffix(".part")
        # Optimizing takes longer than it saves: tests compute little on these devices.
        command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O0", "-w", str(source), "-o", str(part)]
        command += [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
        command += [f"-L{library}", f"-Wl,-rpath,{library}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        subprocess.run(command, check=True)
        part.replace(made)
    return folder


def environment(devices: int, **settings: str) -> dict[str, str]:
    """What a process and its children need to see so many devices; ``memory_gib="1"`` is STANDIN_CUDA_MEMORY_GIB=1."""
    inherited = os.environ.get("PYTHONPATH")
    path = [str(SOURCES), str(build()), *([inherited] if inherited else [])]
    named = {f"STANDIN_CUDA_{name.upper()}": value for name, value in settings.items()}
    return {"PYTHONPATH": os.pathsep.join(path), "STANDIN_CUDA_DEVICES": str(devices), **named}


if __name__ == "__main__":
    for name, value in environment(2).items():
        print(f"{name}={value}")
