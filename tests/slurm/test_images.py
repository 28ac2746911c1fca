"""Ranks in an image that has torch and no clusterddp: the supervisor stays on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.image import install_apptainer
from tests.trainings import events_of
from tests.waiting import story, wait_for_outcome, wait_for_step

SCRIPT = """import os, time
assert not os.path.exists({repository!r}), "the image sees the host"
exec(open({small!r}).read().replace("run.log(", "time.sleep(0.02), run.log("))
print(clusterddp.__file__)
"""


def submit(cluster: Cluster, runs: Path, *options: str) -> RunDirectory:
    """A run of 200 steps on two nodes in the image of the stand-in."""
    image, run = install_apptainer(cluster, runs), RunDirectory(runs / "run")
    small = runs / "small.py"
    small.write_text((Path(__file__).parents[1] / "scripts/small.py").read_text())
    (runs / "script.py").write_text(SCRIPT.format(repository=str(cluster.source / "clusterddp"), small=str(small)))
    wrapper = cluster.source / "slurm/apptainer-python"
    shape = "--nodes 2 --gpus 1 --device cpu --partition low".split()
    own = ["--set", f"python={wrapper}", "--set", f"env.APPTAINER_IMAGE={image}", "--run-dir", str(run), *options]
    command = [cluster.python, "-m", "clusterddp.submit", str(runs / "script.py"), *shape, *own, "--", str(run), "200"]
    path = {"PATH": f"{runs}:{cluster.search_path}", "PYTHONPATH": str(cluster.source)}
    cluster.run(command, cwd=runs, env=path)
    return run


@pytest.mark.product  # test_hostile_site.py has an image among its obstacles
def test_a_run_in_an_image_without_clusterddp_is_preempted_and_completes(cluster: Cluster, runs: Path) -> None:
    """The ranks have that of the submission, from the run directory."""
    run = submit(cluster, runs)
    wait_for_step(run, 20)
    cluster.preempt(seconds=0.1)
    assert wait_for_outcome(run) == "completed", story(run)
    (resumed,) = events_of(run, "resumed")
    assert resumed["redone"] == 0, story(run)
    assert f"{run.package_file}/clusterddp/__init__.py" in (run.attempt_logs(1) / "rank-0.out").read_text()


@pytest.mark.product
def test_a_variable_in_python_is_that_of_setup(cluster: Cluster, runs: Path) -> None:
    """``python: $WRAPPERS/apptainer-python``, where only `setup` sets the variable."""
    setup = f"setup=[export WRAPPERS={cluster.source}/slurm]"
    run = submit(cluster, runs, "--set", "python=$WRAPPERS/apptainer-python", "--set", setup)
    assert wait_for_outcome(run) == "completed", story(run)
