"""What a script does to its process and its run directory does not change the result of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.preempting import preempting
from tests.ranks.test_local import submit
from tests.runs_on_disk import outcome_of

HABITS = """
import locale, os, resource, shutil, sys, tempfile

run = os.environ["CLUSTERDDP_RUN_DIR"]
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
os.umask(0o777)
locale.setlocale(locale.LC_ALL, "C")
for name in ("logs", "checkpoints", "private"):
    shutil.rmtree(os.path.join(run, name))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
os.environ.clear()
if sys.argv[1] == "closes":
    sys.stdout.close()
    sys.stderr.close()
elif sys.argv[1] == "drops":
    sys.stdout = sys.stderr = None
else:
    os.close(1)
    os.close(2)
if sys.argv[1] == "raises":
    raise ValueError("its own mistake")
"""


@pytest.mark.parametrize(("end", "code", "said"), [
    ("returns", 0, "attempt 0: completed after 1 attempt"),
    ("closes", 0, "attempt 0: completed after 1 attempt"),
    ("drops", 0, "attempt 0: completed after 1 attempt"),
    ("raises", 1, "raised ValueError: its own mistake"),
])  # fmt: skip
def test_a_script_that_changes_everything_in_its_process_ends_like_any_other(
    tmp_path: Path, end: str, code: int, said: str
) -> None:
    """It loses its directory, outputs, file descriptors, environment, umask and the run directory's folders."""
    run = RunDirectory(tmp_path / "run")
    script = tmp_path / "habits.py"
    script.write_text(HABITS)
    done = submit(run, str(script), "--device", "cpu", "--", end)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and done.stderr.count("Traceback") == (end == "raises")
    assert (outcome_of(run) or {})["state"] == ("completed" if code == 0 else "failed")


DELETES_LOGS = """
import os, shutil, time
import torch
import clusterddp
from tests.descent import Descent

with clusterddp.init() as ctx:
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.ones(400, 1))
    run = ctx.run(model=model, optimizer=Descent(model), loader=ctx.loader(data, batch_size=1))
    for _ in run.steps(400):
        time.sleep(0.05 * (ctx.attempt == 0))
        if ctx.attempt == 0 and run.step == 2:
            shutil.rmtree(os.path.join(ctx.run_dir, "logs"))
"""


@pytest.mark.product  # test_lost_parts.py resumes without logs
def test_a_run_continues_after_its_script_has_deleted_the_logs(tmp_path: Path) -> None:
    """The next attempt has its log there."""
    run = RunDirectory(tmp_path / "run")
    script = tmp_path / "deletes_logs.py"
    script.write_text(DELETES_LOGS)
    with preempting(4):
        done = submit(run, str(script), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (outcome_of(run) or {})["state"] == "completed" and (outcome_of(run) or {})["attempts"] == 2
