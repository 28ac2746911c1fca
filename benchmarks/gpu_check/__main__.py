"""The command line of the GPU check.

It needs a torch, and what clusterddp imports: ``--wheels FOLDER`` installs what is missing for this call only, without
network. Cases are carried out one after another, each in a process of its own that is killed with all it has started
when its time is over. ``--out`` is written after each: the same command again continues with those that are left.
``--stand-in`` runs all on pretend devices of the tests, at small sizes; such results are marked, and are no
measurements. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
#: For the process that replaces this one: when the call began, by the monotonic clock, and the folder of packages.
STARTED, PREPARED = "GPU_CHECK_STARTED", "GPU_CHECK_PREPARED"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the results as JSON, with a page beside it",
    )
    top.add_argument("--wheels", type=Path, metavar="FOLDER", help="installs what is missing from the wheels there")
    top.add_argument("--stand-in", action="store_true", help="on pretend devices, at small sizes")
    top.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="of this call (%(default)g)")
    top.add_argument("--only", nargs="+", metavar="CASE")
    top.add_argument("--again", action="store_true", help="cases that have a result, too")
    top.add_argument("--size", action="append", default=[], metavar="NAME=VALUE", help="such as state_gb=5")
    top.add_argument("--ranks", type=int, help="default: the number of GPUs")
    top.add_argument("--backend", help="torch.compile's; default: inductor, on a stand-in aot_eager")
    top.add_argument("--folder", type=Path, help="of runs and files, 60 GB; default: a temporary one")
    top.add_argument("--list", action="store_true", help="prints the cases and their bounds")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Does not return where the environment has to be prepared first."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(arguments)
    if PREPARED not in os.environ:
        environment = prepared(options)
        os.chdir(REPOSITORY)
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.gpu_check", *absolute(arguments)], environment)
    from benchmarks.gpu_check import session

    try:
        return session.main(options, float(os.environ[STARTED]))
    finally:
        shutil.rmtree(os.environ[PREPARED], ignore_errors=True)


def absolute(arguments: Sequence[str]) -> list[str]:
    """The arguments with absolute paths, for another current folder."""
    paths = ("--out", "--wheels", "--folder")
    return [
        str(Path(word).resolve()) if before in paths else word
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]


def prepared(options: argparse.Namespace) -> dict[str, str]:
    """The environment of all processes: this tree, what the wheels add, and perhaps pretend devices."""
    packages = tempfile.mkdtemp(prefix="gpu-check-packages-")
    path = [str(REPOSITORY), packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    more: dict[str, str] = {}
    if options.wheels:
        install(options.wheels, packages)
    if options.stand_in:
        from tests.gpu import build

        more = build.environment(max(2, options.ranks or 2))
        path[:0] = [more.pop("PYTHONPATH")]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTERDDP_"))},
        **more,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is deterministic with this alone
        STARTED: str(time.monotonic()),
        PREPARED: packages,
    }


def install(folder: Path, target: str) -> None:
    """Installs those of the wheels in a folder that are missing here into another folder."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        sys.exit(f"--wheels {folder}: no .whl file there")
    missing = [wheel for wheel in wheels if not installed(wheel.name.partition("-")[0])]
    print(f"packages from {folder}: {' '.join(wheel.name for wheel in missing) or 'none is missing'}", flush=True)
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        quiet = ["--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore"]
        subprocess.run([*pip, *quiet, "--target", target, *map(str, missing)], check=True)


def installed(name: str) -> bool:
    """Whether there is a package of that name: one that torch came with must not be replaced."""
    try:
        importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
