"""The code that a run uses and the hook that is told of it, in real processes without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.waiting import story

#: Its first attempt changes the checkout, as its user may at any time, and is killed: the ranks are restarted in place.
TRAIN = """
import os, subprocess, sys
from pathlib import Path
import installed, net, tools

code, checkout = Path(os.environ["CLUSTERDDP_CODE"]), Path(os.environ["CLUSTERDDP_CHECKOUT"])
if os.environ["CLUSTERDDP_ATTEMPT"] == "0":
    for name in ("scripts/net.py", "lib/tools.py", "src/installed.py", "scripts/train.py"):
        (checkout / name).write_text("VALUE = 'edited'")
    os._exit(1)
child = subprocess.check_output([sys.executable, "-c", "import tools; print(tools.VALUE)"], text=True).strip()
print(net.VALUE, tools.VALUE, installed.VALUE, child, (Path(__file__).parents[1] / "data" / "images").read_text())
print(Path(__file__).parents[1] == code, os.getcwd() == str(checkout))
"""


def test_every_attempt_uses_the_code_of_the_submission(tmp_path: Path) -> None:
    """The script, a module beside it, a package that Python finds at its start as if installed in editable mode,
    PYTHONPATH, also in a child; ignored data as ever. The hook is told."""
    repository, run = tmp_path / "repo", RunDirectory(tmp_path / "run")
    code = dict.fromkeys(("scripts/net.py", "lib/tools.py", "src/installed.py"), "VALUE = 'submitted'")
    site = {"../site/sitecustomize.py": f"import sys; sys.path.append({str(repository / 'src')!r})"}
    more = {"scripts/train.py": TRAIN, "data/images": "pixels", ".gitignore": "data"}
    for name, text in {**code, **site, **more}.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    subprocess.run(["git", "-C", repository, "init", "-q"], check=True)
    command = [sys.executable, "-m", "clusterddp.submit", "--local", "--run-dir", str(run), "--device", "cpu"]
    options = ["--set", "snapshot=true", "--set", f"hook=cat > {tmp_path}/told", "scripts/train.py"]
    environment = {**os.environ, "PYTHONPATH": f"{repository}/lib:{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*command, *options], cwd=repository, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr + story(run)
    printed = (run.attempt_logs(1) / "rank-0.out").read_text()
    assert printed == "submitted submitted submitted submitted pixels\nTrue True\n"
    told = json.loads((tmp_path / "told").read_text())
    assert (told["event"], told["attempt"], told["run"]) == ("completed", 1, str(run))
    used = [event["code"]["snapshot"] for event in run.events() if event["event"] == "started"]
    assert len(used) == 2 and used[0] == used[1]
