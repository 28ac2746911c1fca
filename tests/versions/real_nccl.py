"""``python -m tests.versions.real_nccl``: torch's own NCCL process group without a GPU, in gpu_surface.py's releases.

The CUDA build of torch runs over stand-ins for libcudart and libnccl (cuda_runtime.c, nccl.c), whose collectives are
complete at once or never. Two ranks show what torch does around them: the flight record, the watchdog's timeout, and
what a suspension of the job does that lasts longer. Prints a line per release, or fails. torch writes its own dumps to
~/.cache/torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterddp.failures import exit_status
from clusterddp.failures.hangs import outline
from tests.versions import cuda_stubs
from tests.versions.gpu_surface import FOLDER, RELEASES, download

SOURCES = Path(__file__).parent
#: The all-reduce of so many elements never completes.
NEVER = "1024"
SUSPENDED_S = 4.0

RANK = """
import datetime, json, os, sys
import torch, torch.distributed as dist
from clusterddp.distributed.process_group import flight_recorder
from clusterddp.training.heartbeat import flight_record
rank, port, timeout_s = map(int, sys.argv[1:])
os.environ.update(flight_recorder(torch.__version__, os.environ))
torch.cuda.set_device(0)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
timeout = datetime.timedelta(seconds=timeout_s)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timeout)
small, large = torch.empty(64, device="cuda"), torch.empty(1024, device="cuda")
for tensor in [small, small, small, large, *[small] * rank]:
    dist.all_reduce(tensor, async_op=True)
print(json.dumps(flight_record(torch._C._distributed_c10d)), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    top = argparse.ArgumentParser(prog="python -m tests.versions.real_nccl", description="torch's NCCL group, no GPU.")
    top.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE", help="default: all")
    top.add_argument("--index", help="a package index with torch's CUDA builds; default: pip's")
    options = top.parse_args(arguments)
    for release in options.releases:
        folder = FOLDER / f"real-nccl-{release}"
        shutil.rmtree(folder, ignore_errors=True)
        wheel = download(release, folder / "wheels", options.index)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "packages")
        environ = stand_ins(folder)
        recorded = record(environ)
        found = f"flight record: {recorded}; {timed_out(environ)}; {suspended(environ, folder)}"
        print(f"torch {wheel.name.split('-')[1]}: {found}", flush=True)
        shutil.rmtree(folder)
    return 0


def stand_ins(folder: Path) -> dict[str, str]:
    """Links them into torch's folder; the environment of ranks."""
    libraries = folder / "packages" / "torch" / "lib"
    cuda_stubs.write_stand_ins(folder / "packages")
    runtime = next(libraries.glob("libcudart.so.*"))
    cuda_stubs.replace(folder / "packages", runtime, SOURCES / "cuda_runtime.c")
    cuda_stubs.replace(folder / "packages", next(libraries.glob("libnccl.so.*")), SOURCES / "nccl.c", runtime)
    driver = folder / "driver"
    driver.mkdir()
    cuda_stubs.write_driver(libraries / "libcaffe2_nvrtc.so", driver / cuda_stubs.DRIVER)
    path = os.pathsep.join([str(folder / "packages"), str(SOURCES.parents[1])])
    return {**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": str(driver), "CLUSTERDDP_NEVER": NEVER}


def start(environ: Mapping[str, str], timeout_s: int) -> list[subprocess.Popen[str]]:
    """Both ranks; each prints its flight record."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [
        subprocess.Popen([*command, str(rank), port, str(timeout_s)], env=dict(environ), text=True, **pipes)  # type: ignore[call-overload]
        for rank in (0, 1)
    ]


def record(environ: Mapping[str, str]) -> str:
    """The last complete collective, and the one that is not, by each rank's record."""
    outlines = []
    for rank in (ranks := start(environ, 600)):
        assert rank.stdout is not None
        outlines.append(outline(json.loads(rank.stdout.readline())))
    for rank in ranks:
        rank.communicate("")
    expected = [(3, 4 + rank, f"all_reduce of {NEVER}") for rank in (0, 1)]
    assert [(row[1], row[2], row[3].partition(":")[2]) for (row,) in outlines] == expected, outlines
    return str(outlines[0][0][3])


def timed_out(environ: Mapping[str, str]) -> str:
    """What torch prints of the timeout: a text that clusterddp knows, before SIGABRT."""
    ranks = start(environ, 3)
    said = [rank.stderr.read() for rank in ranks if rank.stderr is not None]
    assert [rank.wait() for rank in ranks] == [-signal.SIGABRT] * 2, said
    known = exit_status.find(said[0])
    assert known is not None and known.blame is exit_status.Blame.PEER, said[0]
    found = re.search(known.pattern, said[0])
    assert found is not None
    return f"timeout: {found[0]!r}, SIGABRT"


def suspended(environ: Mapping[str, str], folder: Path) -> str:
    """Whether ranks survive that were stopped for longer than the timeout, if the collective is complete by then."""
    release = folder / "release"
    ranks = start({**environ, "CLUSTERDDP_RELEASE": str(release)}, int(SUSPENDED_S) - 1)
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    release.touch()
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)
    time.sleep(SUSPENDED_S)  # until the watchdog has looked
    alive = [rank.poll() is None for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.communicate()
    return f"after a suspension that outlasted it, ranks {'continue' if all(alive) else 'abort'}"


if __name__ == "__main__":
    sys.exit(main())
