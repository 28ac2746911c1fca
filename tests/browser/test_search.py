"""What users look for, and the page that answers it: asked of the built site's own search, which node runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.product
REPOSITORY = Path(__file__).resolve().parents[2]
#: What a user types, and the page whose answer must come first.
QUESTIONS = {
    "install offline": "README",
    "preset timm": "guide/job-definition",
    "resume own checkpoint": "guide/existing-repository",
    "run unchanged repository": "guide/existing-repository",
    "job pending": "guide/runs",
    "hyperparameter sweep": "guide/runs",
    "clean up old checkpoints": "guide/runs",
    "NCCL_SOCKET_IFNAME": "guide/gpu-cluster",
    "infiniband": "guide/gpu-cluster",
    "wandb offline": "guide/report",
    "tensorboard": "guide/report",
    "slow rank": "guide/report",
    "goodput": "guide/report",
    "evaluate last epoch": "guide/evaluate",
    "best checkpoint": "guide/checkpoints",
    "pretrained weights": "guide/checkpoints",
    "start from checkpoint": "guide/checkpoints",
    "disk full": "guide/checkpoints",
    "gradscaler": "guide/mixed-precision",
    "nohup": "guide/terminals",
    "close terminal": "guide/terminals",
    "change learning rate": "guide/changed-settings",
    "change batch size": "guide/changed-settings",
    "change seed": "guide/changed-settings",
    "migrate submitit": "guide/migrating",
    "hydra multirun": "guide/launchers",
    "mpirun": "guide/launchers",
    "lightning": "guide/python",
    "hugging face trainer": "guide/python",
    "notebook": "guide/python",
    "apptainer": "guide/environment",
    "conda environment": "guide/environment",
    "out of memory": "guide/debugging",
    "hang": "guide/debugging",
    "breakpoint": "guide/debugging",
    "spare node": "guide/nodes",
    "exclude node": "guide/nodes",
    "time limit": "guide/preemption",
    "scancel": "guide/preemption",
    "requeue hold": "guide/preemption",
    "fully_shard": "guide/sharded",
    "weighted sampling": "recipes",
    "share run group": "guide/security",
    "api key secret": "guide/security",
    "account partition": "guide/your-cluster",
    "glossary": "guide/glossary",
}


def first_hits(site: Path, queries: list[str]) -> list[str]:
    """The page of the first result of each query, as the guide calls it. Empty if there is none."""
    command = ["node", str(Path(__file__).with_name("search.js")), str(site)]
    done = subprocess.run(command, input="\n".join(queries), capture_output=True, text=True, check=True)
    hits = [json.loads(line) for line in done.stdout.splitlines()]
    return [page_of(found[0]) if found else "" for found in hits]


def page_of(address: str) -> str:
    path = re.sub(r"\.html.*", "", address).removeprefix("docs/")
    return "README" if path == "index" else path.removesuffix("/index")


def test_the_first_hit_answers_the_question() -> None:
    if shutil.which("node") is None:
        pytest.skip("no node: apt-get install nodejs")
    subprocess.run([sys.executable, "-m", "docs.site"], cwd=REPOSITORY, check=True, capture_output=True)
    hits = first_hits(REPOSITORY / "build" / "docs" / "site", [*QUESTIONS])
    others = {query: hit for (query, page), hit in zip(QUESTIONS.items(), hits, strict=True) if hit != page}
    assert not others
