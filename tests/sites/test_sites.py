"""One short command starts a run of several nodes at each site: sbatch accepts it, with the site's own options."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

import pytest

import clusterddp
from clusterddp.checks import nodes_job
from clusterddp.cli.command_line import command
from clusterddp.errors import JobDefinitionError
from tests.sites.slurm import SITES, Site, install, options_in, options_of
from tests.wording import raises

NAMES = sorted(path.parent.name for path in SITES.glob("*/config.yaml"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of a user without configuration files and Slurm's variables, who has a script."""
    for name in os.environ:
        if name.startswith(("SBATCH_", "SLURM_", "CLUSTERDDP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CLUSTERDDP_SITE_CONFIG", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    (tmp_path / ".config" / "clusterddp").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_sbatch_takes_and_refuses_what_the_sites_pages_say(name: str) -> None:
    """Else the rules would be what we send."""
    site = Site(name)
    assert site.refusal(options_of(shlex.split(site.module.ACCEPTED))) is None
    assert site.refusal(options_of(shlex.split(site.module.REFUSED))) is not None


@pytest.mark.parametrize("name", NAMES)
def test_one_command_starts_a_run(name: str, home: Path) -> None:
    """Of at most eight words after ``submit``, with the site's options in the script."""
    site = Site(name)
    install(name, home / "bin")
    (home / ".config" / "clusterddp" / "config.yaml").write_text((site.folder / "config.yaml").read_text())
    words = shlex.split(site.module.COMMAND)
    assert len(words) <= 8
    assert command(["submit", *words, "--run-dir", "run"]) == 0
    given, expected = options_in((home / "run" / "job.sbatch").read_text()), site.module.EXPECTED
    wanted = options_of(shlex.split(expected))
    assert {key: given.get(key) for key in wanted} == wanted


def test_doctor_and_launch_use_the_values_of_a_target(home: Path) -> None:
    """As ``submit`` does: those of its own nodes, which are in none of the default partition."""
    site = Site("jean_zay")
    install("jean_zay", home / "bin")
    (home / ".config" / "clusterddp" / "config.yaml").write_text((site.folder / "config.yaml").read_text())
    options = argparse.Namespace(**dict.fromkeys(nodes_job.KEYS), on="a100")
    options.nodes = 2
    job = nodes_job.job_of(options)
    assert (job.constraint, job.gpus_per_node) == ("a100", 8)
    clusterddp.launch("train.py", nodes=2, gpus_per_node=8, on="a100", run_dir="run")
    assert options_in((home / "run" / "job.sbatch").read_text())["constraint"] == "a100"
    with raises(JobDefinitionError):
        clusterddp.launch("train.py", nodes=2, gpus_per_node=8, on="a1000", run_dir="other")
    assert not (home / "other").exists()
